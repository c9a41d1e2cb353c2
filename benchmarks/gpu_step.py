"""The time of a decode step beside its roofline, and what it is spent on, with simulated acceptance.

    python benchmarks/gpu_step.py --model random:qwen3-8b --concurrency 8,16,32,64 --out record.json
    python benchmarks/gpu_step.py --model random:tiny --device cpu --concurrency 2 --steps 20           in miniature

Requests of --context tokens decode together in bursts of --burst steps, all of them live, until --steps were timed; the
first --warm steps of a burst do not count. interval_ms is the median time between steps, gaps of the host included;
device_ms the device's own time in a step. The roofline counts, for each phase of the step (they follow one another),

    draft     drafter's weights, head and draft K/V read; block K/V written; projection of the verified rows' taps
    verify    target's weights, head and K/V read; K/V written
    floor     max(bytes / copy bandwidth, FLOPs / GEMM rate) of each phase, added up

with weights read once a phase and bandwidth and rate measured in the same run. `whole` takes the maximum over the step
as a whole, a lower floor. torch.profiler then splits --profile steps by kernel group. idle is what kernels leave of
the interval measured before (falling clocks count as idle there), gaps the share of the profiled time itself in which
no kernel ran (what the profiler adds between kernels counts there).
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_throughput import Arm, Models, acceptance, build, load_models, release
from torch import nn

import dscale
from dscale import LLM, SamplingParams
from dscale.config import DecoderConfig
from dscale.evaluate.record_file import write_record
from dscale.models.decoder import DecoderStack
from dscale.speculation.simulated import SIMULATED

GROUPS = {  # the first pattern found in a kernel's name says its group
    "simulation": r"_drawn|_rewrite",
    "predict": r"_predict",
    "allocate": r"_exact|_seeded",
    "pack": r"_pack\b|_pack_",
    "accept": r"_accept",
    "attention": r"decode_kernel|prefill_kernel|scaled_dot|attention|flash",
    "quantise": r"_quantise",
    "norm": r"_norm_row|norm",
    "rotary, cache write": r"_rotate|rotary|index_put",
    "gate": r"silu",
    "vocabulary": r"_tile_groups|_merge_groups|tile_best|_best_of_row|_noise_tiles|_cut_rows|topk|argmax|sort",
    "matrix products": r"gemm|nvjet|cublas|cutlass|splitk|aten::mm|addmm|matmul|linear",
    "copies": r"memcpy|memset|copy",
}
DECIDE = ("predict", "allocate", "pack")


@dataclass(frozen=True)
class Machine:
    """What was measured of the device in this run: bytes a second of a copy, FLOPs a second of a matrix product."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Work:
    """Bytes that must move and FLOPs that must be done in a phase."""

    bytes: float = 0.0
    flops: float = 0.0

    def floor(self, machine: Machine) -> float:
        """Seconds below which the phase cannot be."""
        return max(self.bytes / machine.bandwidth, self.flops / machine.rate)

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call, the device waited for."""
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 2):
        settle()
        began = time.perf_counter()
        run()
        settle()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """A copy of 2 GiB and a square matrix product of 8192 on a GPU; small ones on a CPU."""
    on_gpu = device.type == "cuda"
    size, side, repeats = (1 << 31, 8192, 20) if on_gpu else (1 << 25, 512, 5)
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).fill_(1.0)
    target = torch.empty_like(source)
    bandwidth = 2 * size / median_seconds(lambda: target.copy_(source), device, repeats)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Machine(bandwidth, 2 * side**3 / median_seconds(lambda: a @ b, device, repeats))


def weights(module: nn.Module, size: int) -> float:
    """Numbers of `size` bytes that the matrices of a module take. In eight bits a number is half the bytes of bfloat16
    and half the time of a product, so it counts half of one in both."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(one.numel() * one.element_size() for one in tensors if one.dim() == 2) / size


def cache_numbers(config: DecoderConfig) -> int:
    """Numbers of a token's keys and values over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def attention_flops(config: DecoderConfig, rows: float, keys: float) -> float:
    """Scores and mixing of `rows` rows over `keys` keys each, over all layers."""
    return 4.0 * rows * keys * config.num_layers * config.num_heads * config.head_dim


def through(
    stack: DecoderStack, head: float, rows: float, head_rows: float, lanes: float, context: float, size: int, kept: int
) -> Work:
    """A pass of `rows` rows of `lanes` requests through a stack, `head_rows` of them through a head of `head` numbers;
    size: bytes of a number of the weights; kept: of the cache."""
    config, matrices = stack.config, weights(stack, size)
    moved = size * (matrices + (head if head_rows else 0)) + kept * cache_numbers(config) * (lanes * context + rows)
    flops = 2.0 * (rows * matrices + head_rows * head) + attention_flops(config, rows, context + rows / lanes)
    return Work(moved, flops)


def phases(llm: LLM, lanes: float, width: int, rows: float, context: float) -> dict[str, Work]:
    """What a step of `lanes` requests must do: drafts of `width` rows (1: none), `rows` rows verified in all."""
    models = llm.engine.worker.models
    target, drafter = models.target, models.drafter
    size = target.embedding.element_size()
    head, draft_head = (weights(one.head, size) for one in (target, models.reader or target))
    found = {"verify": through(target.stack, head, rows, rows, lanes, context, size, models.target_cache.itemsize)}
    if drafter is not None and width > 1:
        queries, kept = lanes * drafter.config.queries(width), models.draft_cache.itemsize
        found["draft"] = through(drafter.stack, draft_head, queries, lanes * (width - 1), lanes, context, size, kept)
        decoder = drafter.config.decoder
        joined = weights(drafter.fc, size) + weights(drafter.context_projection, size)
        found["draft"] += Work(size * joined + kept * rows * cache_numbers(decoder), 2.0 * rows * joined)
    return found


class Burst:
    """`lanes` requests of `context` tokens, decoding side by side."""

    def __init__(self, llm: LLM, lanes: int, args: argparse.Namespace, number: int) -> None:
        self.engine = llm.engine
        vocabulary = llm.loaded.config.decoder.vocab_size
        for index in range(lanes):
            seed = number * lanes + index
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(vocabulary, (args.context,), generator=generator).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True, seed=seed)
            self.engine.add(f"burst-{seed}", ids, params, seed)
        running = self.engine.scheduler.running
        while self.engine.scheduler.waiting or any(request.prefill_left for request in running):
            self.engine.step()

    def steps(self, count: int) -> list[float]:
        """Seconds of each of `count` engine steps."""
        times, last = [], time.perf_counter()
        for _ in range(count):
            self.engine.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times

    def context(self) -> float:
        """Mean tokens of a request."""
        running = self.engine.scheduler.running
        return statistics.fmean(request.length for request in running)

    def close(self) -> None:
        """Abort the requests."""
        for request in list(self.engine.scheduler.running):
            self.engine.abort(request.id)
        while self.engine.busy:
            self.engine.step()


def measure(llm: LLM, arm: Arm, lanes: int, machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """Step time, floor and breakdown of one arm at one concurrency."""
    intervals: list[float] = []
    device_seconds, steps, rows, contexts, number = 0.0, 0, 0, [], 0
    while len(intervals) < args.steps:
        burst, number = Burst(llm, lanes, args, number), number + 1
        burst.steps(args.warm)
        llm.engine.counters.__init__()  # type: ignore[misc]
        counters, before = llm.engine.counters, burst.context()
        intervals += burst.steps(args.burst)
        contexts.append((before + burst.context()) / 2)
        device_seconds, steps, rows = (
            device_seconds + counters.decode_seconds,
            steps + counters.steps,
            rows + counters.slots,
        )
        burst.close()
    context, width = statistics.fmean(contexts), llm.engine.worker.policy.width
    found = phases(llm, lanes, width, rows / steps, context)
    floor, whole = sum(work.floor(machine) for work in found.values()), sum(found.values(), Work()).floor(machine)
    interval, device = statistics.median(intervals), device_seconds / steps
    burst = Burst(llm, lanes, args, number)
    burst.steps(args.warm)
    groups, gaps = breakdown(lambda: burst.steps(args.profile), args.profile, llm.engine.worker.device)
    burst.close()
    busy = sum(groups.values()) / 1e3
    return {
        "note": SIMULATED,
        **asdict(arm),
        "concurrency": lanes,
        "context": context,
        "rows": rows / steps,
        "steps": steps,
        "interval_ms": 1e3 * interval,
        "device_ms": 1e3 * device,
        "floor_ms": 1e3 * floor,
        "whole_floor_ms": 1e3 * whole,
        "times_floor": interval / floor,
        "times_whole_floor": interval / whole,
        "phases": {name: {**asdict(work), "floor_ms": 1e3 * work.floor(machine)} for name, work in found.items()},
        "groups_ms": groups,
        "decide_share": sum(groups.get(name, 0.0) for name in DECIDE) / max(sum(groups.values()), 1e-9),
        "idle_share": max(1 - busy / interval, 0.0),
        "gap_share": gaps,
    }


def breakdown(run: Callable[[], object], steps: int, device: torch.device) -> tuple[dict[str, float], float | None]:
    """Milliseconds a step by kernel group, largest first (on a CPU: by torch operation), and the share of the profiled
    time in which nothing ran (on a CPU: None)."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    groups: dict[str, float] = {}
    for event in seen.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        taken = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        name = group_of(event.key)
        groups[name] = groups.get(name, 0.0) + taken / 1e3 / steps
    ran = [one.time_range for one in seen.events() if one.device_type == DeviceType.CUDA] if on_gpu else []
    gaps = gap_share([(one.start, one.end) for one in ran]) if ran else None
    return dict(sorted(groups.items(), key=lambda item: -item[1])), gaps


def gap_share(spans: Sequence[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end that no span covers."""
    ordered = sorted(spans)
    covered, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return 1 - covered / max(reached - ordered[0][0], 1e-9)


def group_of(kernel: str) -> str:
    """The group of a kernel by its name."""
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, kernel.lower())), "other")


def table(record: dict[str, Any]) -> str:
    """A line an arm and concurrency, and the kernel groups below."""
    machine = record["machine"]
    lines = [
        f"{record['model']} on {record['device']}, {SIMULATED}; copy {machine['bandwidth'] / 1e12:.2f} TB/s, "
        f"products {machine['rate'] / 1e12:.0f} TFLOP/s",
        "",
        "| c | arm | rows | context | interval ms | device ms | floor ms | times floor | decide | idle | gaps |",
        "| --- " * 11 + "|",
    ]
    for row in record["rows"]:
        gaps = "–" if row["gap_share"] is None else f"{100 * row['gap_share']:.1f}%"
        lines.append(
            f"| {row['concurrency']} | {row['name']} | {row['rows']:.0f} | {row['context']:.0f} | "
            f"{row['interval_ms']:.2f} | {row['device_ms']:.2f} | {row['floor_ms']:.2f} | {row['times_floor']:.2f} | "
            f"{100 * row['decide_share']:.1f}% | {100 * row['idle_share']:.1f}% | {gaps} |"
        )
    for row in record["rows"]:
        parts = ", ".join(f"{name} {took:.3f}" for name, took in row["groups_ms"].items())
        lines.append(f"c={row['concurrency']} {row['name']}, ms a step: {parts}")
    return "\n".join([*lines, *record["skipped"]])


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; what gpu_throughput.py needs besides has its values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-8b")
    parser.add_argument("--drafter", default="random")
    parser.add_argument("--arms", default="full,dvl@8,off", help="as of gpu_throughput.py")
    parser.add_argument("--concurrency", default="8,16,32,64")
    parser.add_argument("--context", type=int, default=640, help="tokens of a request when a burst begins")
    parser.add_argument("--steps", type=int, default=700, help="timed steps, at least")
    parser.add_argument("--burst", type=int, default=50)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--profile", type=int, default=20, help="steps under the profiler")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which no arm begins")
    parser.add_argument("--progress", type=float, default=6.09)
    parser.add_argument("--spearman", type=float, default=0.74)
    parser.add_argument("--prefill-tokens", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(given)
    args.trace, args.prompt_tokens, args.temperature = None, args.context, 0.0
    args.output_tokens = (args.warm + max(args.burst, args.profile) + 3) * 16  # none may end inside a burst
    return args


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, write the record, print the table; returns the record."""
    args = arguments(given)
    deadline = time.perf_counter() + args.limit
    models: Models = load_models(args)
    embedding = models.loaded.model.embedding
    machine = measure_machine(embedding.device, embedding.dtype)
    record: dict[str, Any] = {
        "schema": "dscale.gpu_step/1",
        "note": SIMULATED,
        "acceptance": acceptance(args).about(),
        "model": args.model,
        "dtype": str(embedding.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if embedding.is_cuda else "CPU",
        "versions": {"dscale": dscale.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "machine": asdict(machine),
        "rows": [],
        "skipped": [],
    }
    for lanes in map(int, args.concurrency.split(",")):
        for arm in map(Arm.parse, args.arms.split(",")):
            if time.perf_counter() > deadline:
                record["skipped"].append(f"c={lanes} {arm.name}: time is up")
                continue
            try:
                record["rows"].append(measure(build(arm, models, args, lanes), arm, lanes, machine, args))
            except (RuntimeError, ValueError) as problem:  # the other arms still count
                line = str(problem).splitlines()[0][:200]
                record["skipped"].append(f"c={lanes} {arm.name}: {type(problem).__name__}: {line}")
            release()
            if args.out is not None:
                write_record(args.out, record)
    print(table(record))
    return record


if __name__ == "__main__":
    main()
