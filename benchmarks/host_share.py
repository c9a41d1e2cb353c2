"""The host's share of a decode step: what `Engine.step` does beside the device, by requests and policy, on one thread.

    python benchmarks/host_share.py --out benchmarks/records/host_share.json
    python benchmarks/host_share.py --requests 64 --policies full --profile

Steps take the way of a GPU (captured, read one step late) with a stand-in for the device: it runs no model and writes
the next tokens of a text, `off` one a request and step, the others --progress on average. Its own time is left out.
Events, pinned copies and launches of CUDA are not in the figure. Milliseconds a step: median and mean over --steps, and
the median of the parts: plan (scheduler), launch, read, commit (text, pages, counts, what the policy learns).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import dscale
from dscale import LLM, SamplingParams
from dscale.config import resolve_dtype
from dscale.engine.graphs import GraphRunner, Step
from dscale.engine.results import OutputRing, Outputs
from dscale.models.loader import LoadedTarget, load_target

PROMPT, LENGTH = 24, 1024  # tokens of a prompt, and of the longest answer with it
PARTS = ("plan", "launch", "read", "commit")
REPLAY_SECONDS = 0.002  # what a captured step is said to take, where a policy asks


class Script:
    """Stands in for CUDA graphs: a replay writes the next tokens of `text`, from another place for each lane."""

    def __init__(self, text: Sequence[int], lanes: int, progress: float) -> None:
        self.text, self.progress = torch.tensor(text), progress
        self.at = torch.arange(lanes) * (len(text) // lanes)
        self.draw = np.random.default_rng(0)
        self.seconds_spent = 0.0

    def capture(self, step: Step) -> tuple[Outputs, Callable[[], None]]:
        """Run the step once for the shape of its outputs."""
        outputs = step()
        if outputs.signals is not None:
            outputs.signals.copy_(torch.linspace(1.0, 0.1, outputs.signals.shape[1]).expand_as(outputs.signals))
        return outputs, lambda: self.write(outputs)

    def write(self, outputs: Outputs) -> None:
        """A step's results: tokens, emitted, accepted, slots, finished."""
        began = time.perf_counter()
        lanes, width = outputs.counts.shape[0], outputs.drafts + 1
        drawn = np.minimum(self.draw.geometric(1 / self.progress, lanes), width)
        emitted, at = torch.from_numpy(drawn), self.at[:lanes]
        places = (at[:, None] + torch.arange(width)) % len(self.text)
        outputs.counts[:, :width] = self.text[places]
        slots = (emitted + 1).clamp(max=width)
        outputs.counts[:, -4:] = torch.stack([emitted, emitted - 1, slots, torch.zeros_like(emitted)], dim=1)
        at += emitted
        self.seconds_spent += time.perf_counter() - began

    def seconds(self, before: Callable[[], None], replay: Callable[[], None], repeats: int) -> float:
        """What a replay is said to take."""
        return REPLAY_SECONDS

    def free(self) -> int:
        """Nobody counts."""
        return 0


class Clock:
    """Seconds that a step spends in parts of it, without those of the device."""

    def __init__(self, llm: LLM, script: Script) -> None:
        self.engine, self.script = llm.engine, script
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._watch(self.engine.scheduler, "schedule", "plan")
        self._watch(self.engine.worker, "launch", "launch")
        self._watch(self.engine.worker, "collect", "read")

    def _watch(self, owner: Any, method: str, part: str) -> None:
        call = getattr(owner, method)

        def watched(*arguments: Any) -> Any:
            began, elsewhere = time.perf_counter(), self.script.seconds_spent
            try:
                return call(*arguments)
            finally:
                self.spent[part] += time.perf_counter() - began - (self.script.seconds_spent - elsewhere)

        setattr(owner, method, watched)

    def step(self) -> dict[str, float]:
        """One step of the engine; milliseconds by part, and in all."""
        self.spent = dict.fromkeys(PARTS, 0.0)
        began, elsewhere = time.perf_counter(), self.script.seconds_spent
        self.engine.step()
        total = time.perf_counter() - began - (self.script.seconds_spent - elsewhere)
        self.spent["commit"] = total - sum(self.spent.values())
        return {name: 1e3 * seconds for name, seconds in {**self.spent, "total": total}.items()}


def build(loaded: LoadedTarget, policy: str, requests: int, text: Sequence[int], args: argparse.Namespace) -> LLM:
    """An engine as on a GPU, over the stand-in, with every request queued."""
    drafter = "none" if policy == "off" else args.drafter
    llm = LLM(
        loaded, drafter=drafter, predictor=args.predictor, policy=policy, dtype=args.dtype, device="cpu", lag=1,
        max_requests=requests, max_model_len=LENGTH, max_prefill_tokens=requests * PROMPT,
        prefix_caching=args.prefix_caching,
    )  # fmt: skip
    llm._captured = True  # the policy as it is built where steps are captured
    llm.switch(policy)
    worker = llm.engine.worker
    script = Script(text, requests, 1.0 if policy == "off" else args.progress)
    worker.ring = OutputRing(requests, max(worker.policy.width, 1), worker.device)
    worker.graphs = GraphRunner(worker.state, worker.models, worker.policy, requests, script)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH - PROMPT, ignore_eos=True, stop=args.stop)
    for number in range(requests):
        start = number * (len(text) // requests)
        prompt = [text[(start + offset) % len(text)] for offset in range(PROMPT)]
        llm.engine.add(str(number), prompt, params, number)
    return llm


def cell(
    loaded: LoadedTarget, policy: str, requests: int, text: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a step's host share."""
    llm = build(loaded, policy, requests, text, args)
    graphs = llm.engine.worker.graphs
    assert graphs is not None
    script = graphs.backend
    assert isinstance(script, Script)
    clock = Clock(llm, script)
    for _ in range(args.warm):
        clock.step()
    before, profile = llm.engine.counters.emitted, cProfile.Profile() if args.profile else None
    if profile is not None:
        profile.enable()
    steps = [clock.step() for _ in range(args.steps)]
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
    if len(llm.engine.scheduler.running) < requests:
        raise SystemExit(f"{policy} at {requests}: some of the answers ended within {args.steps} steps; ask for fewer")
    totals = [step["total"] for step in steps]
    return {
        "policy": policy,
        "requests": requests,
        "tokens_a_step": (llm.engine.counters.emitted - before) / args.steps / requests,
        "median_ms": statistics.median(totals),
        "mean_ms": statistics.mean(totals),
        "least_ms": min(totals),
        "parts_ms": {part: statistics.median(step[part] for step in steps) for part in PARTS},
    }


def long_text(loaded: LoadedTarget, path: Path) -> list[int]:
    """Token ids to answer with; InputError where the model has no tokenizer."""
    return loaded.tokenizer.encode(path.read_text(), add_special=False)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--predictor", default="auto")
    parser.add_argument("--policies", default="off,full,dvl")
    parser.add_argument("--requests", default="1,16,32,64,128")
    parser.add_argument("--progress", type=float, default=4.9, help="mean of the tokens a step before blocks end them")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md", help="what is answered")
    parser.add_argument("--stop", nargs="*", default=[], help="stop strings of every request (not in the text)")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", type=int, nargs="?", const=25, default=0, help="print so many lines of a profile")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, write the record, print the table; returns the record."""
    args = arguments(given)
    torch.set_num_threads(1)
    loaded = load_target(args.model, resolve_dtype(args.dtype))
    text = long_text(loaded, args.text)
    record: dict[str, Any] = {
        "schema": "dscale.host_share/1",
        "date": time.strftime("%Y-%m-%d"),
        "model": args.model,
        "processor": processor(),
        "versions": {"dscale": dscale.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "prefix_caching": args.prefix_caching,
        "steps": args.steps,
        "cells": [],
    }
    for policy in args.policies.split(","):
        for requests in map(int, args.requests.split(",")):
            row = cell(loaded, policy, requests, text, args)
            record["cells"].append(row)
            parts = "  ".join(f"{name} {value:.3f}" for name, value in row["parts_ms"].items())
            tokens = f"{row['tokens_a_step']:.2f} tokens"
            print(f"{policy:10} {requests:4} requests  {tokens}  {row['median_ms']:7.3f} ms   {parts}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def processor() -> str:
    """The processor's name, as the system gives it."""
    path = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
