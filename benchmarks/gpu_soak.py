"""Thousands of steps with requests that come, go and are given up, few pages, and policies that change meanwhile.

    python benchmarks/gpu_soak.py --steps 30000 --seconds 500 --deterministic --out gpu_soak.json
    python benchmarks/gpu_soak.py --model random:tiny --device cpu --dtype float32 --steps 1500      in miniature

Prompts of 1 to --prompt-tokens tokens (half of them begin like an earlier one), answers of 1 to --output-tokens,
temperatures 0 to 1.5 with and without filters, stop tokens, now and then log-probabilities or penalties (steps that the
host must see), aborts, and a cache that holds about a third of what the lanes could use. The policies take turns, three
times around, so that each can be compared with itself.

Checked at every finished request: why it ended fits its tokens. Every 1,000 steps and at the end: every page is free,
idle or held just as often as running requests hold it, the rows of the state likewise, nothing illegal was accessed
(the device is waited for), and what is allocated is recorded. At the end: all requests are accounted for, no page is
held, memory by policy is that of its turn before, and --recheck finished texts are made again by `off`: with
--deterministic, or in float32, they must be equal. Exit code 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dscale import LLM, SamplingParams
from dscale.config import resolve_dtype
from dscale.engine.pages import SCRATCH_PAGE, pages_for
from dscale.engine.placement import resolve_device
from dscale.engine.request import FinishReason, Request, Status
from dscale.evaluate.record_file import write_record
from dscale.models.loader import load_target
from dscale.models.shapes import is_shape

POLICIES = "auto,dvl,full,off,confidence,dvl:seeded,fixed:4,dspark"
TURNS = 3
CHECK_EVERY = 1000  # steps
STUCK = 2000  # turns of the engine without a decode step
ALLOCATED_GROWTH = 8 << 20  # bytes by which a policy's turn may exceed the one before it
RSS_GROWTH = 256 << 20  # bytes from the second turn to the last: arenas of the allocator fill slowly


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass
class Soak:
    """The engine, what is in it, and what was seen."""

    llm: LLM
    args: argparse.Namespace
    rng: random.Random
    live: dict[str, Request] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    kept: list[Request] = field(default_factory=list)  # finished, to be made again
    prompts: list[list[int]] = field(default_factory=list)
    steps: int = 0
    idle: int = 0  # turns of the engine since the last decode step

    @property
    def vocabulary(self) -> int:
        return self.llm.loaded.config.decoder.vocab_size

    def wrong(self, text: str) -> None:
        """Note a problem once it is one; the first fifty are kept."""
        self.counts["problems"] += 1
        if len(self.problems) < 50:
            self.problems.append(f"step {self.steps}: {text}")
            print(f"PROBLEM at step {self.steps}: {text}", file=sys.stderr, flush=True)

    def prompt(self) -> list[int]:
        """New tokens, after the beginning of an earlier prompt in half of the cases."""
        length = self.rng.randint(1, self.args.prompt_tokens)
        begin = self.rng.choice(self.prompts) if self.prompts and self.rng.random() < 0.5 else []
        begin = begin[: self.rng.randint(0, length)]
        made = begin + [self.rng.randrange(self.vocabulary) for _ in range(length - len(begin))]
        self.prompts = [*self.prompts[-15:], made]
        return made

    def params(self) -> SamplingParams:
        """One request's parameters."""
        rng, options = self.rng, {}
        if rng.random() < 0.02:
            options = rng.choice(
                [{"logprobs": 2}, {"frequency_penalty": 0.5}, {"min_tokens": 1, "logit_bias": {1: 2.0}}]
            )
        temperature = rng.choice([0.0, 0.3, 0.7, 1.0, 1.5])
        return SamplingParams(
            temperature=temperature, top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 0, 40]),
            min_p=rng.choice([0.0, 0.0, 0.05]), max_tokens=rng.randint(1, self.args.output_tokens),
            ignore_eos=rng.random() < 0.5, seed=rng.getrandbits(40),
            stop_token_ids=[rng.randrange(self.vocabulary) for _ in range(rng.choice([0, 0, 1]))], **options,
        )  # fmt: skip

    def arrive(self) -> None:
        """Bursts of requests while few wait."""
        if len(self.llm.engine.scheduler.waiting) < 6 and self.rng.random() < self.args.arrivals:
            for _ in range(self.rng.randint(1, 4)):
                params = self.params()
                assert params.seed is not None
                name = f"soak-{self.counts['added']}"
                self.live[name] = self.llm.engine.add(name, self.prompt(), params, params.seed)
                self.counts["added"] += 1

    def leave(self) -> None:
        """Now and then someone gives up, waiting or running."""
        if self.live and self.rng.random() < self.args.aborts:
            request = self.live.pop(self.rng.choice(list(self.live)))
            self.llm.engine.abort(request.id)
            self.counts["aborted"] += 1
            if request.finish_reason is not FinishReason.ABORT or request.pages:
                self.wrong(f"{request.id}: aborted, yet {request.finish_reason} with {len(request.pages)} pages")

    def step(self) -> None:
        """Arrivals, aborts, one step of the engine."""
        self.arrive()
        self.leave()
        self.advance()

    def advance(self) -> None:
        """One step of the engine, and a look at what ended; RuntimeError where nothing moves any more."""
        before = self.llm.engine.counters.steps
        for request in self.llm.engine.step():
            if request.status is Status.FINISHED and self.live.pop(request.id, None) is not None:
                self.ended(request)
        done = self.llm.engine.counters.steps - before
        self.steps, self.idle = self.steps + done, 0 if done or not self.llm.engine.busy else self.idle + 1
        if self.idle > STUCK:
            self.check()
            raise RuntimeError(f"stuck: {len(self.live)} requests and no decode step in {STUCK} turns")

    def ended(self, request: Request) -> None:
        """Does the reason fit the tokens?"""
        self.counts["finished"] += 1
        output, reason = request.output, request.finish_reason
        stops = [at for at, token in enumerate(output, start=1) if token in request.end_ids]
        by_length = reason is FinishReason.LENGTH and len(output) == request.cap and not stops
        by_stop = reason is FinishReason.STOP and stops == [len(output)] and len(output) <= request.cap
        if not (by_length or by_stop):
            self.wrong(f"{request.id}: ended by {reason} after {len(output)} of {request.cap} tokens, stops at {stops}")
        if not all(0 <= token < self.vocabulary for token in output) or request.pages:
            self.wrong(f"{request.id}: tokens out of range, or {len(request.pages)} pages kept")
        if sum(step.emitted for step in request.steps) != len(output):
            self.wrong(f"{request.id}: steps emitted {sum(s.emitted for s in request.steps)} of {len(output)} tokens")
        self.counts["tokens"] += len(output)
        self.counts["preempted requests"] += request.preemptions > 0
        at = self.rng.randrange(self.counts["finished"])  # every finished request is kept with the same chance
        if len(self.kept) < self.args.recheck:
            self.kept.append(request)
        elif at < self.args.recheck:
            self.kept[at] = request

    def check(self) -> None:
        """Pages and rows add up; memory is noted."""
        scheduler, pool = self.llm.engine.scheduler, self.llm.engine.scheduler.pool
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        held = Counter(page for request in scheduler.running for page in request.pages)
        counted = {page: count for page, count in enumerate(pool._references) if count and page != SCRATCH_PAGE}
        if dict(held) != counted:
            self.wrong(f"pages: requests hold {sum(held.values())}, the pool counts {sum(counted.values())}")
        apart = [*pool._free, *pool._idle, *held]
        if len(apart) != len(set(apart)) or len(apart) != pool.capacity:
            self.wrong(f"pages: {len(apart)} free, idle or held, {len(set(apart))} of them once; {pool.capacity} exist")
        rows = [*scheduler._rows, *(request.row for request in scheduler.running)]
        if sorted(rows) != list(range(scheduler.max_requests)):
            self.wrong(f"rows of the state: {sorted(rows)}")
        live = {request.id for request in [*scheduler.running, *scheduler.waiting]}
        if live != set(self.live):
            self.wrong(f"{len(live)} requests in the engine, {len(self.live)} are awaited")
        sample = {
            "step": self.steps,
            "policy": self.llm.policy,
            "rss": resident_bytes(),
            "running": len(scheduler.running),
        }
        if torch.cuda.is_available():
            sample |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        self.samples.append(sample)

    def drain(self) -> None:
        """Let everything end; then nothing is held."""
        while self.llm.engine.busy:
            self.advance()
        self.check()
        pool = self.llm.engine.scheduler.pool
        pool.clear_cached()
        if pool.held or len(pool._free) != pool.capacity:
            self.wrong(f"at the end {pool.held} pages are held and {len(pool._free)} of {pool.capacity} are free")
        if self.live or self.counts["added"] != self.counts["finished"] + self.counts["aborted"]:
            self.wrong(f"{len(self.live)} requests never ended: {dict(self.counts)}")


def build(args: argparse.Namespace) -> LLM:
    """The engine under test, with too few pages."""
    loaded = load_target(args.model, resolve_dtype(args.dtype), args.device)
    given = "random" if is_shape(args.model) else "auto"
    length = args.prompt_tokens + args.output_tokens + 1
    pages = max(args.lanes * pages_for(length) // 3, pages_for(length + 64) + 1) + 1
    return LLM(
        loaded, drafter=given, predictor=given, policy=args.policies.split(",")[0], dtype=args.dtype, slots=6.0,
        device=args.device, max_requests=args.lanes, max_model_len=length, max_prefill_tokens=args.prefill_tokens,
        num_pages=pages, deterministic=args.deterministic,
    )  # fmt: skip


def memory_problems(turns: Sequence[dict[str, Any]]) -> list[str]:
    """Where a policy's last turn holds more than its turn before (the first one warms up)."""
    found: list[str] = []
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for turn in turns:
        by_policy.setdefault(turn["policy"], []).append(turn)
    for policy, own in by_policy.items():
        if len(own) >= TURNS and "allocated" in own[-1]:
            growth = own[-1]["allocated"] - own[-2]["allocated"]
            if growth > ALLOCATED_GROWTH:
                found.append(
                    f"{policy}: {growth / 2**20:.1f} MiB more allocated in its last turn than in the one before"
                )
    first = len(by_policy)  # of the second turn
    if len(turns) > first and turns[-1]["rss"] - turns[first]["rss"] > RSS_GROWTH:
        found.append(f"resident memory grew by {(turns[-1]['rss'] - turns[first]['rss']) / 2**20:.0f} MiB")
    return found


def recheck(soak: Soak, exact: bool) -> dict[str, Any]:
    """The kept requests once more, plainly."""
    llm, again = soak.llm, []
    llm.switch("off")
    for number, request in enumerate(soak.kept):
        again.append(llm.engine.add(f"again-{number}", request.prompt, request.params, request.seed))
    while llm.engine.busy:
        llm.engine.step()
    different = [one.id for one, other in zip(soak.kept, again, strict=True) if one.output != other.output]
    if exact and different:
        soak.wrong(f"{len(different)} of {len(again)} texts differ from those of off: {different[:10]}")
    preempted = sum(request.preemptions > 0 for request in soak.kept)
    return {"texts": len(again), "different": len(different), "must_be_equal": exact, "of_preempted": preempted}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole soak; its record."""
    began = time.perf_counter()
    soak = Soak(build(args), args, random.Random(args.seed))
    policies = args.policies.split(",")
    each = max(args.steps // (TURNS * len(policies)), 1)
    turns: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "schema": "dscale.gpu_soak/1", "model": args.model, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "CPU",
        "arguments": {key: str(value) for key, value in vars(args).items()}, "turns": turns, "samples": soak.samples,
        "problems": soak.problems,
    }  # fmt: skip

    def write() -> None:
        scheduler = soak.llm.engine.scheduler
        record["steps"], record["counts"] = soak.steps, dict(soak.counts)
        record.update(preemptions=scheduler.preemptions, prefix_hits=scheduler.prefix_hits)
        record["seconds"] = round(time.perf_counter() - began, 1)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_record(args.out, record)

    try:
        while soak.steps < args.steps and time.perf_counter() - began < args.seconds:
            policy = policies[len(turns) % len(policies)]
            soak.llm.switch(policy)
            end = min((len(turns) + 1) * each, args.steps) if len(turns) + 1 < TURNS * len(policies) else args.steps
            while soak.steps < end and time.perf_counter() - began < args.seconds:
                checked = soak.steps // CHECK_EVERY
                soak.step()
                if soak.steps // CHECK_EVERY > checked:
                    soak.check()
            soak.check()
            turns.append(soak.samples[-1] | {"policy": policy})
            write()
            print(f"step {soak.steps}: {policy}, {dict(soak.counts)}", file=sys.stderr, flush=True)
        soak.drain()
        for text in memory_problems(turns):
            soak.wrong(text)
        exact = args.deterministic or args.dtype == "float32"
        record["recheck"] = recheck(soak, exact)
        soak.check()
    except (
        Exception
    ) as problem:  # an illegal access ends the process's use of the device: say where and keep the record
        traceback.print_exc()
        soak.wrong(f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}")
    record["complete"] = soak.steps >= args.steps
    write()
    return record


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--deterministic", action="store_true", help="so that texts can be compared in bfloat16")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--steps", type=int, default=30000, help="decode steps")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--prefill-tokens", type=int, default=96, help="most prompt tokens of a step")
    parser.add_argument("--arrivals", type=float, default=0.15, help="chance of a burst of requests, by step")
    parser.add_argument("--aborts", type=float, default=0.01, help="chance of an abort, by step")
    parser.add_argument("--recheck", type=int, default=64, help="finished texts made again by off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON record")
    args = parser.parse_args(given)
    args.device = resolve_device(args.device)
    return args


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print what was found; exit code 1 where something is wrong."""
    record = run(arguments(given))
    shown = {key: record[key] for key in ("steps", "seconds", "counts", "preemptions", "prefix_hits", "complete")}
    print(json.dumps(shown | {"recheck": record.get("recheck"), "problems": record["problems"]}, indent=1))
    return record


if __name__ == "__main__":
    sys.exit(bool(main()["problems"]))
