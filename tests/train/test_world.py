"""Two processes equal one that takes their passes one after another."""

import os
import socket

import torch
import torch.multiprocessing as spawned

from .test_drafter import trainer

STEPS = 3


def _two(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    run = trainer(optimizer="adamw", steps=STEPS, log_every=STEPS)
    run.run()
    run.world.wait()
    torch.save({"history": run.history, "parameters": run.parameters}, f"{folder}/{rank}.pt")
    run.world.close()


def test_two_processes_equal_two_passes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawned.spawn(_two, (port, str(tmp_path)), nprocs=2)
    one = trainer(optimizer="adamw", steps=STEPS, log_every=STEPS, accumulate=2)
    one.run()
    for rank in (0, 1):
        two = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert abs(two["history"][-1]["loss"] - one.history[-1]["loss"]) < 1e-4
        assert two["history"][-1]["uniform_progress"] == one.history[-1]["uniform_progress"]
        for ours, theirs in zip(one.parameters, two["parameters"], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
