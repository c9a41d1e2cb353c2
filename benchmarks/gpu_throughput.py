"""Tokens per second of an engine in steady state at given concurrencies, arm beside arm, with simulated acceptance.

    python benchmarks/gpu_throughput.py --model random:qwen3-8b --concurrency 8,32 --out record.json
    python benchmarks/gpu_throughput.py --arms off,control,auto,dvl@4,dvl@6,dvl@12 --repeats 5 --seconds 4 --out …
    python benchmarks/gpu_throughput.py --model random:tiny --device cpu --concurrency 4 --seconds 0.5      in miniature

Closed loop: c requests of --prompt-tokens in and --output-tokens out run at a time, greedily, and the next one enters
when one ends; request n has seed n, so all arms meet the same acceptance trace (speculation/simulated.py), and
repetition r begins at request 10,000 r, so that each is another sample of the text. A loop starts in the middle:
request i of the first c brings i/c of its answer along as a longer prompt, so that contexts and ends are spread evenly
from the first step on. After --warm-steps steps, tokens are counted for --seconds (eager arms: --eager-seconds).
Prefill is inside the window: decode_s is the device's time in decode steps (the host's on a CPU), rest_s what is left,
prefill and gaps.

--export-trace writes the trace by seed and position of the anchor, so that another engine can be given the same.

Arms: policy[@slots][+wide|+narrow][+eager][+deterministic][+fp8][+kv8][+draftkv8] or a name of ARMS; fp8 is of the
drafter's weights, kv8 and draftkv8 are the caches of target and drafter in eight bits. They take turns (A B B A) over
--repeats (eager arms over the first --eager-repeats of them); ratios to the base arm (the first of control, off,
whichever is there) and of auto to the better of full and dvl@8 are paired by repetition; 95% intervals are of the mean
log ratio by Student's t. Past --limit seconds the remaining runs are skipped and the record says so.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from gpu_tables import best_fixed, cell_tables, rate
from paired_ratios import REPETITION, compare, geometric_means, interval, paired, turns

import dscale
from dscale import LLM, SamplingParams
from dscale.config import require, resolve_dtype
from dscale.engine.graphs import kinds_for
from dscale.engine.pages import pages_for
from dscale.engine.placement import default_dtype, resolve_device
from dscale.engine.request import Request, Status
from dscale.evaluate.record_file import write_record
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import load_drafter
from dscale.models.loader import LoadedTarget, load_target
from dscale.models.shapes import random_drafter_of
from dscale.speculation.simulated import SIMULATED, SimulatedAcceptance, export_trace

LEAST_STEPS = 100  # of a window, however slow the machine: fewer say little about progress
ARMS = {
    "control": "full+wide+eager",  # as a native engine does it
    "tiles": "full+eager",
    "tiles-dvl": "dvl@8+eager",
}
TRACED = 1024  # requests of an exported trace
FLAGS = ("wide", "narrow", "eager", "deterministic", "fp8", "kv8", "draftkv8")


@dataclass(frozen=True)
class Arm:
    """One configuration of the engine. eager: no captured steps; width: of the blocks, None for the drafter's own."""

    name: str
    policy: str
    slots: float = 8.0
    layout: str = "packed"
    eager: bool = False
    deterministic: bool = False
    width: int | None = None
    draft_weights: str = "auto"
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Arm:
        """From a name of ARMS or policy[@slots][+flag…], w12 among the flags for blocks of 12."""
        head, *flags = ARMS.get(text, text).split("+")
        policy, _, slots = head.partition("@")
        widths = [flag for flag in flags if flag[:1] == "w" and flag[1:].isdigit()]
        unknown = [flag for flag in flags if flag not in FLAGS and flag not in widths]
        require(not unknown, f"arm {text!r}: {unknown} not known; flags are {', '.join(FLAGS)}")
        layout = next((flag for flag in flags if flag in ("wide", "narrow")), "packed")
        width = int(widths[0][1:]) if widths else None
        eager, deterministic = "eager" in flags, "deterministic" in flags
        eight = ["fp8" if flag in flags else "auto" for flag in ("fp8", "kv8", "draftkv8")]
        return cls(text, policy, float(slots or 8), layout, eager, deterministic, width, *eight)

    @property
    def bits(self) -> dict[str, str]:
        """What it keeps in eight bits, as LLM names it."""
        names = ("draft_weights", "kv_cache_dtype", "draft_kv_cache_dtype")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Models:
    """What all arms share."""

    loaded: LoadedTarget
    drafter: Drafter
    predictor: str


def load_models(args: argparse.Namespace) -> Models:
    """Target and drafter on the device, once."""
    device = resolve_device(args.device)
    dtype = default_dtype(device) if args.dtype == "auto" else resolve_dtype(args.dtype)
    loaded = load_target(args.model, dtype, device)
    if args.drafter == "random":
        return Models(loaded, random_drafter_of(loaded.config, dtype, device), "random")
    return Models(loaded, load_drafter(args.drafter, loaded, dtype, device), "random")


def build(arm: Arm, models: Models, args: argparse.Namespace, concurrency: int) -> LLM:
    """An engine for `concurrency` requests with just the pages they need."""
    length = args.prompt_tokens + args.output_tokens + 1
    return LLM(
        models.loaded, drafter=None if arm.policy == "off" else models.drafter, predictor=models.predictor,
        policy=arm.policy, slots=arm.slots, width=arm.width, simulate=acceptance(args), dtype=args.dtype,
        device=args.device,
        max_requests=concurrency, max_model_len=length, max_prefill_tokens=args.prefill_tokens,
        num_pages=concurrency * pages_for(length + 64) + 2, prefix_caching=False, attention_layout=arm.layout,
        deterministic=arm.deterministic, graphs=not arm.eager,
        graph_kinds=kinds_for([args.temperature]), **arm.bits,
    )  # fmt: skip


def acceptance(args: argparse.Namespace) -> SimulatedAcceptance:
    """The acceptance that all arms meet."""
    return SimulatedAcceptance(progress=args.progress, spearman=args.spearman, trace=args.trace)


class Loop:
    """A closed loop over an engine, in steady state from its start. first: number of the first request."""

    def __init__(self, llm: LLM, concurrency: int, args: argparse.Namespace, first: int = 0) -> None:
        self.engine, self.args = llm.engine, args
        self.vocabulary = llm.loaded.config.decoder.vocab_size
        self.finished = 0
        self._numbers = count(first)
        self.first = [self._add(args.output_tokens * index // concurrency) for index in range(concurrency)]

    def _add(self, done: int = 0) -> Request:
        """The next request, of whose answer `done` tokens exist already."""
        number = next(self._numbers)
        length, left = self.args.prompt_tokens + done, self.args.output_tokens - done
        ids = torch.randint(self.vocabulary, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        params = SamplingParams(temperature=self.args.temperature, max_tokens=left, ignore_eos=True, seed=number)
        return self.engine.add(f"loop-{number}", ids, params, number)

    def step(self) -> None:
        """One step; requests that ended make room for the next."""
        ended = sum(request.status is Status.FINISHED for request in self.engine.step())
        self.finished += ended
        for _ in range(ended):
            self._add()

    def warm(self) -> None:
        """Past the first prefill, and --warm-steps decode steps further."""
        while any(request.status in (Status.WAITING, Status.PREFILL) for request in self.first):
            self.step()
        for _ in range(self.args.warm_steps):
            self.step()

    def close(self) -> None:
        """Abort what still runs."""
        for request in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self.engine.abort(request.id)
        while self.engine.busy:
            self.engine.step()


def measure(llm: LLM, arm: Arm, repetition: int, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run: tokens per second and what its steps did."""
    seconds = args.eager_seconds if arm.eager and args.eager_seconds is not None else args.seconds
    first = REPETITION * repetition
    row = window(Loop(llm, concurrency, args, first), seconds)
    return {"note": SIMULATED, **row, "repetition": repetition, "first_request": first}


def window(loop: Loop, seconds: float) -> dict[str, Any]:
    """The loop warmed, measured for so many seconds and LEAST_STEPS at least, and closed."""
    loop.warm()
    counters, plain = loop.engine.counters, []
    counters.__init__()  # type: ignore[misc]
    finished, began = loop.finished, time.perf_counter()
    last, quiet, now = began, False, began
    while now - began < seconds or counters.steps < LEAST_STEPS:
        prefilled = counters.prefill_seconds
        loop.step()
        now = time.perf_counter()
        was_quiet, quiet = quiet, counters.prefill_seconds == prefilled
        if quiet and was_quiet:  # with results a step late a prefill shows in the interval after its own
            plain.append(now - last)
        last = now
    row = summary(counters, plain, now - began, loop.finished - finished)
    loop.close()  # its last steps do not count
    return row


def summary(counters: Any, plain: Sequence[float], seconds: float, finished: int) -> dict[str, Any]:
    """The row of a run. interval_ms: between steps without prefill, gaps of the host included."""
    steps, lanes = max(counters.steps, 1), max(counters.request_steps, 1)
    return {
        "tokens": counters.emitted,
        "seconds": seconds,
        "tokens_per_s": counters.emitted / seconds,
        "requests_finished": finished,
        "steps": counters.steps,
        "step_ms": 1e3 * counters.decode_seconds / steps,
        "interval_ms": 1e3 * statistics.median(plain) if plain else None,
        "decode_s": counters.decode_seconds,
        "rest_s": max(seconds - counters.decode_seconds, 0.0),
        "running": counters.request_steps / steps,
        "mean_progress": counters.emitted / lanes,
        "slots_per_request": counters.slots / lanes,
        "shapes": dict(counters.shapes),
    }


def cell(
    args: argparse.Namespace, concurrency: int, deadline: float, make: Callable[[Arm, int], LLM]
) -> dict[str, Any]:
    """All arms at one concurrency, in turns. make: an arm's engine for so many requests."""
    arms = {arm.name: arm for arm in map(Arm.parse, args.arms.split(","))}
    engines, skipped = build_all(arms.values(), concurrency, make)
    made = {name: about(arms[name], llm) for name, llm in engines.items()}
    for repeat, name in turns(list(engines), args.repeats):
        if arms[name].eager and repeat >= args.eager_repeats:
            continue
        if time.perf_counter() > deadline:
            skipped.append(f"{name}, repetition {repeat}: time is up")
            continue
        run = measure(engines[name], arms[name], repeat, concurrency, args)
        made[name]["runs"].append(run)
        print(progress(name, concurrency, run), file=sys.stderr, flush=True)
    compare(made)
    whole = {"concurrency": concurrency, "note": SIMULATED, "skipped": skipped, "arms": made, **auto_over_best(made)}
    if torch.cuda.is_available():
        whole["memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return whole


def build_all(
    arms: Iterable[Arm], concurrency: int, make: Callable[[Arm, int], LLM]
) -> tuple[dict[str, LLM], list[str]]:
    """Engines by the names of their arms, and a line for each that cannot be built: it leaves the others."""
    engines: dict[str, LLM] = {}
    skipped = []
    for arm in arms:
        try:
            engines[arm.name] = make(arm, concurrency)
        except (RuntimeError, ValueError) as problem:
            why = next(iter(str(problem).splitlines()), "")
            skipped.append(f"{arm.name}: {type(problem).__name__}: {why[:200]}")
    return engines, skipped


def about(arm: Arm, llm: LLM) -> dict[str, Any]:
    """How the row of an arm begins."""
    graphs = getattr(llm.engine.worker, "graphs", None)
    return {**asdict(arm), "graphs": None if graphs is None else asdict(graphs.counters), "runs": []}


def progress(name: str, concurrency: int, run: dict[str, Any]) -> str:
    """A line for the terminal, as soon as a run is there."""
    rest = 100 * run["rest_s"] / run["seconds"]
    return (
        f"c={concurrency} {name:12} {run['tokens_per_s']:9.1f} tokens/s {run['step_ms']:7.2f} ms a step, "
        f"{run['mean_progress']:.2f} tokens, {run['slots_per_request']:.1f} slots, rest {rest:.0f}%   [{SIMULATED}]"
    )


def release() -> None:
    """Give back what engines no longer in use held: their caches and graphs lie in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def auto_over_best(arms: dict[str, Any]) -> dict[str, Any]:
    """auto over the better of full and dvl at 8 slots. auto_over_best: ratio of the medians, None where one is missing;
    auto_over_best_paired: the median of ratios paired by repetition and its interval, where there are any."""
    best, auto = best_fixed(arms), rate(arms.get("auto"))
    if best is None or auto is None:
        return {"auto_over_best": None}
    made: dict[str, Any] = {"auto_over_best": auto / arms[best]["tokens_per_s"]}
    if ratios := paired(arms["auto"], arms[best]):
        found = {"best": best, "ratio": statistics.median(ratios), "interval": interval(ratios)}
        made["auto_over_best_paired"] = found
    return made


def table(record: dict[str, Any]) -> str:
    """Markdown: what tables.py shows of the cells."""
    return "\n\n".join([f"{record['model']}, {SIMULATED}, {record['device']}", *cell_tables(record["cells"])])


def add_loop_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of this closed loop takes; who wants other defaults sets them afterwards."""
    parser.add_argument("--model", default="random:qwen3-8b")
    parser.add_argument("--drafter", default="random", help="random, or a drafter folder for the model")
    parser.add_argument("--arms", default="off,control,tiles,tiles-dvl,full,dvl,auto")
    parser.add_argument("--concurrency", default="8,16,32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager-repeats", type=int, default=5, help="of arms without graphs, whose steps take long")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a measured window")
    parser.add_argument("--eager-seconds", type=float, default=None, help="the same of eager arms (default: --seconds)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which no run begins")
    parser.add_argument("--warm-steps", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="most prompt tokens of a step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--progress", type=float, default=6.09, help="simulated mean progress of whole blocks")
    parser.add_argument("--spearman", type=float, default=0.74, help="of predicted with accepted length")
    parser.add_argument("--trace", default=None, help="a trace file to replay instead")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="JSON record with every repetition")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_arguments(parser)
    parser.add_argument("--export-trace", type=Path, default=None, help="write what requests would meet, and stop")
    return parser.parse_args(given)


def head(schema: str, args: argparse.Namespace, dtype: str, on_gpu: bool) -> dict[str, Any]:
    """How a record of this closed loop begins."""
    return {
        "schema": schema,
        "note": SIMULATED,
        "acceptance": acceptance(args).about(),
        "model": args.model,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "versions": {"dscale": dscale.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "cells": [],
    }


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, write the record, print the table; returns the record."""
    args = arguments(given)
    if args.export_trace is not None:
        export_trace(acceptance(args), args.export_trace, TRACED, args.prompt_tokens + args.output_tokens + 1)
        return {"trace": str(args.export_trace)}
    deadline = time.perf_counter() + args.limit
    models = load_models(args)
    embedding = models.loaded.model.embedding
    record = head("dscale.gpu_throughput/1", args, str(embedding.dtype).removeprefix("torch."), embedding.is_cuda)

    def make(arm: Arm, concurrency: int) -> LLM:
        return build(arm, models, args, concurrency)

    for concurrency in map(int, args.concurrency.split(",")):
        record["cells"].append(cell(args, concurrency, deadline, make))
        release()
        record["geometric_mean"] = geometric_means(record["cells"])
        if args.out is not None:  # after every concurrency: what is cut off later is not lost
            write_record(args.out, record)
    print(table(record))
    return record


if __name__ == "__main__":
    main()
