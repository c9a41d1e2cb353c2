"""On a CUDA GPU: the SGLang plug-in's captured steps give what the same steps give when launched kernel by kernel."""

from __future__ import annotations

import warnings

import pytest
import torch

from dscale.engine.graphs import CudaCapture
from dscale.integrations.sglang.fence import Fence
from dscale.integrations.sglang.graphs import StepGraphs
from dscale.integrations.sglang.stages import Settled, decided_together
from tests.integrations.sglang_steps import BUCKETS, WIDTH, Machine, Requests, alone, padded
from tests.integrations.test_sglang_graphs import COUNTS, POLICIES, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@torch.inference_mode()
@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_captured_steps_are_the_steps(policy: str, simulated: bool) -> None:
    machine, plain = Machine(policy, simulated, "cuda"), Machine(policy, simulated, "cuda")
    graphs = StepGraphs(machine.step, BUCKETS, WIDTH, CudaCapture(machine.device), machine.device)
    assert graphs.prepare().graphs == len(BUCKETS)
    requests = Requests(machine.device)
    for count in COUNTS:
        lanes = requests.some(count)
        made = graphs.run(lanes)
        filled = plain.step(padded(lanes, next(size for size in BUCKETS if size >= count)))
        assert same(made, Settled(*(value[:count] for value in vars(filled).values())))
        assert torch.equal(machine.written, plain.written)
        if simulated:  # q of a table: no rounding stands between the padded step and that of just these lanes
            assert same(made, plain.step(alone(lanes)))
        requests.move(lanes, made)


@torch.inference_mode()
def test_the_host_does_not_wait() -> None:
    machine = Machine("dvl", True, "cuda")
    graphs = StepGraphs(machine.step, BUCKETS, WIDTH, CudaCapture(machine.device), machine.device)
    graphs.prepare()
    requests = Requests(machine.device)
    given = [requests.some(count) for count in COUNTS]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for lanes in given:
                graphs.run(lanes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [f"{one.filename}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)] == []


@torch.inference_mode()
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_first_rank_decides_is_taken_as_it_is(policy: str) -> None:
    """It comes as columns of one message; kernels once read the neighbours of a length."""
    alike = Machine(policy, True, "cuda", lambda drafts, k: decided_together(drafts, k, torch.clone))
    plain = Machine(policy, True, "cuda")
    requests = Requests(plain.device)
    for count in COUNTS:
        lanes = requests.some(count)
        made = alike.step(alone(lanes))
        assert same(made, plain.step(alone(lanes)))
        assert torch.equal(alike.written, plain.written)
        requests.move(lanes, made)


def test_a_fence_holds_the_stream_back_and_not_the_host() -> None:
    busy, later = torch.cuda.Stream(), torch.cuda.Stream()
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)
        value.fill_(1.0)
        fence = Fence()
        fence.record()
    with torch.cuda.stream(later):
        fence.synchronize()
        assert not fence.query()  # the host went on
        seen = value.clone()
    torch.cuda.synchronize()
    assert seen.item() == 1.0
