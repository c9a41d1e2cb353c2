"""The host's share of a decode step: what `Engine.step` does beside the device, by requests and policy, on one thread.

    python benchmarks/host_share.py --out benchmarks/records/host_share.json
    python benchmarks/host_share.py --requests 64 --policies full --profile

Steps take the way of a GPU (captured, read one step late) with a stand-in for the device: it runs no model and writes
the next tokens of a text. Whole blocks emit --progress of them on average, more in some lanes than in others, and the
scores it writes are those of its own law, so that `auto` learns what it would on a GPU; steps are said to take what
SmolLM2's take on an H200. Its own time is left out. Events, pinned copies and launches of CUDA are not in the figure.
With --answer 200 answers end after so many tokens, each followed by a new request. dvl@8: `dvl` with so many slots.

Milliseconds of processor time a step, so that other work on the machine counts little: median and mean over --steps,
and the mean of the parts: add, plan (scheduler), prefill, launch, read, commit (text, pages, counts, what the policy
learns).
"""

from __future__ import annotations

import argparse
import cProfile
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
from dscale.engine.graphs import GraphRunner
from dscale.engine.prefill_graphs import PrefillRunner
from dscale.engine.request import FinishReason, Request
from dscale.engine.results import OutputRing, Outputs
from dscale.engine.worker import Launched
from dscale.evaluate.machine import processor
from dscale.evaluate.record_file import write_record
from dscale.models.loader import LoadedTarget, load_target
from dscale.speculation.workspace import StepShape

PROMPT, LENGTH = 24, 1024  # tokens of a prompt, and of the longest answer with it
PARTS = ("add", "plan", "prefill", "launch", "read", "commit")
EASE_SPREAD = 0.7  # of the logarithm of a block's mean length, between lanes and steps
OFF_SECONDS, DRAFT_SECONDS, ROW_SECONDS = 1.1e-3, 1.7e-3, 0.4e-6  # what a step is said to take, alone and a row


class Script:
    """Stands in for CUDA graphs: a replay writes the next tokens of `text`, from another place for each lane."""

    def __init__(self, text: Sequence[int], lanes: int, progress: float) -> None:
        self.text, self.progress = torch.tensor(text), progress
        self.at = torch.arange(lanes) * (len(text) // lanes)
        self.draw = np.random.default_rng(0)
        self.seconds_spent = 0.0
        self.live, self.rows = lanes, lanes  # of the step that comes next

    def capture(self, step: Callable[[], Any], runs: int = 1) -> tuple[Any, Callable[[], None]]:
        """Run the step once for the shape of its outputs; a prefill has none that are read."""
        began = time.thread_time()
        outputs = step()
        self.seconds_spent += time.thread_time() - began
        if not isinstance(outputs, Outputs):
            return outputs, lambda: None
        if outputs.signals is not None:
            outputs.signals.copy_(torch.linspace(1.0, 0.1, outputs.signals.shape[1]).expand_as(outputs.signals))
        return outputs, lambda: self.write(outputs)

    def write(self, outputs: Outputs) -> None:
        """A step's results: tokens, emitted, accepted, slots, finished; and survival where it is scored."""
        began = time.thread_time()
        lanes, width = outputs.counts.shape[0], outputs.drafts + 1
        goes_on, survival = self._survival(lanes, width)
        slots = np.full(lanes, width)
        if outputs.scored:
            slots[: self.live] = _granted(survival[: self.live], self.rows)
        emitted = torch.from_numpy(np.minimum(self.draw.geometric(1 - goes_on), slots))
        places = (self.at[:lanes, None] + torch.arange(width)) % len(self.text)
        outputs.counts[:, :width] = self.text[places]
        sums = [emitted, emitted - 1, torch.from_numpy(slots), torch.zeros_like(emitted)]
        outputs.counts[:, -4:] = torch.stack(sums, dim=1)
        if outputs.scored and outputs.signals is not None:
            outputs.signals[:, :width] = torch.from_numpy(survival)
        self.at[:lanes] += emitted
        self.seconds_spent += time.thread_time() - began

    def _survival(self, lanes: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Chance [N] that one more draft passes after another, and q [N, W]."""
        ease = self.draw.normal(-(EASE_SPREAD**2) / 2, EASE_SPREAD, lanes)
        goes_on = 1 - 1 / np.maximum(self.progress * np.exp(ease), 1.05)
        return goes_on, goes_on[:, None] ** np.arange(width)

    def seconds(self, before: Callable[[], None], replay: Callable[[], None], repeats: int) -> float:
        """Nobody asks: `step_seconds` speaks for the replays."""
        raise NotImplementedError

    def free(self) -> int:
        """Nobody counts."""
        return 0


def step_seconds(shape: StepShape) -> float:
    """What a captured step is said to take."""
    return (OFF_SECONDS if shape.width == 1 else DRAFT_SECONDS) + ROW_SECONDS * shape.rows


def _granted(survival: np.ndarray, rows: int) -> np.ndarray:
    """Slots [N], each lane's first included, where the drafts of highest q [N, W] are granted."""
    lanes, width = survival.shape
    order = np.argsort(-survival[:, 1:], axis=None, kind="stable")[: rows - lanes]
    return 1 + np.bincount(order // (width - 1), minlength=lanes)


class ScriptedSteps(GraphRunner):
    """Captured steps that tell the stand-in which one comes."""

    def run(self, rows: Sequence[int], shape: StepShape, all_greedy: bool) -> Outputs:
        assert isinstance(self.backend, Script)
        self.backend.live, self.backend.rows = len(rows), shape.rows
        return super().run(rows, shape, all_greedy)


class Clock:
    """Seconds that a step spends in parts of it, without those of the device."""

    def __init__(self, llm: LLM, script: Script, asks: Asks) -> None:
        self.engine, self.script, self.asks = llm.engine, script, asks
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._watch(self.asks, "ask", "add")
        self._watch(self.engine.scheduler, "schedule", "plan")
        self._watch(self.engine.worker, "prefill", "prefill")
        self.engine.worker.launch = _timed_as_said(self.engine.worker.launch, len(script.at))  # type: ignore[method-assign]
        self._watch(self.engine.worker, "launch", "launch")
        self._watch(self.engine.worker, "collect", "read")

    def _watch(self, owner: Any, method: str, part: str) -> None:
        call = getattr(owner, method)

        def watched(*arguments: Any) -> Any:
            began, elsewhere = time.thread_time(), self.script.seconds_spent
            try:
                return call(*arguments)
            finally:
                self.spent[part] += time.thread_time() - began - (self.script.seconds_spent - elsewhere)

        setattr(owner, method, watched)

    def step(self) -> dict[str, float]:
        """One step of the engine, and a new request for each that ended; milliseconds by part, and in all."""
        self.spent = dict.fromkeys(PARTS, 0.0)
        began, elsewhere = time.thread_time(), self.script.seconds_spent
        for request in self.engine.step():
            if request.finish_reason is FinishReason.LENGTH:
                self.asks.ask()
        total = time.thread_time() - began - (self.script.seconds_spent - elsewhere)
        self.spent["commit"] = total - sum(self.spent.values())
        return {name: 1e3 * seconds for name, seconds in {**self.spent, "total": total}.items()}


def _timed_as_said(launch: Callable[..., Launched], lanes: int) -> Callable[..., Launched]:
    def timed(requests: Sequence[Request]) -> Launched:
        launched = launch(requests)
        launched.seconds = step_seconds(launched.shape.over(lanes))
        return launched

    return timed


class Asks:
    """Asks one thing after another: prompts from the text, answers of `answer` tokens (0: as long as there is room)."""

    def __init__(self, llm: LLM, text: Sequence[int], answer: int, stop: list[str]) -> None:
        self.llm, self.text, self.stop = llm, text, stop
        self.answer, self.asked = answer or LENGTH - PROMPT, 0

    def ask(self, share: float = 1.0) -> None:
        """Queue a request for this share of an answer."""
        start = self.asked * 31
        prompt = [self.text[(start + offset) % len(self.text)] for offset in range(PROMPT)]
        most = max(round(share * self.answer), 1)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, stop=self.stop)
        self.llm.engine.add(str(self.asked), prompt, params, self.asked)
        self.asked += 1


def build(loaded: LoadedTarget, policy: str, requests: int, text: Sequence[int], args: argparse.Namespace) -> LLM:
    """An engine as on a GPU, over the stand-in."""
    policy, _, slots = policy.partition("@")
    drafter = "none" if policy == "off" else args.drafter
    llm = LLM(
        loaded, drafter=drafter, predictor=args.predictor, policy=policy, slots=float(slots or 8), dtype=args.dtype,
        device="cpu", lag=1, max_requests=requests, max_model_len=LENGTH, max_prefill_tokens=requests * PROMPT,
        prefix_caching=args.prefix_caching,
    )  # fmt: skip
    worker = llm.engine.worker
    worker.replay_seconds = lambda live, shape: step_seconds(shape.over(requests))  # type: ignore[method-assign]
    llm._captured = True  # the policy as it is built where steps are captured
    llm.switch(policy)
    script = Script(text, requests, 1.0 if policy == "off" else args.progress)
    worker.ring = OutputRing(requests, max(worker.policy.width, 1), worker.device)
    worker.graphs = ScriptedSteps(worker.state, worker.models, worker.policy, requests, script)
    worker.prefills = PrefillRunner(worker.state, worker.models, requests * PROMPT, script)
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
    asks = Asks(llm, text, args.answer, args.stop)
    for number in range(requests):
        asks.ask((number + 1) / requests if args.answer else 1.0)
    clock = Clock(llm, script, asks)
    for _ in range(args.warm):
        clock.step()
    before, profile = llm.engine.counters.emitted, cProfile.Profile() if args.profile else None
    if profile is not None:
        profile.enable()
    steps = [clock.step() for _ in range(args.steps)]
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
    if asks.asked > requests and not args.answer:
        raise SystemExit(f"{policy} at {requests}: some of the answers ended within {args.steps} steps; ask for fewer")
    totals = [step["total"] for step in steps]
    return {
        "policy": policy,
        "requests": requests,
        "tokens_a_step": (llm.engine.counters.emitted - before) / args.steps / requests,
        "median_ms": statistics.median(totals),
        "mean_ms": statistics.mean(totals),
        "least_ms": min(totals),
        "parts_ms": {part: statistics.mean(step[part] for step in steps) for part in PARTS},
        "answers": asks.asked - requests,
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
    parser.add_argument("--answer", type=int, default=0, help="tokens of an answer; 0: none ends")
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
        "answer": args.answer,
        "steps": args.steps,
        "cells": [],
    }
    for policy in args.policies.split(","):
        for requests in map(int, args.requests.split(",")):
            row = cell(loaded, policy, requests, text, args)
            record["cells"].append(row)
            parts = "  ".join(f"{name} {value:.3f}" for name, value in row["parts_ms"].items() if value)
            about = f"{policy:8} {requests:4} requests  {row['tokens_a_step']:.2f} tokens"
            print(f"{about}  {row['median_ms']:7.3f} ms, mean {row['mean_ms']:.3f}   {parts}", flush=True)
    if args.out is not None:
        write_record(args.out, record)
    return record


if __name__ == "__main__":
    main()
