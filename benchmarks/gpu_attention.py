"""Attention kernels on a CUDA GPU: right first, then microseconds beside the time to read the keys and values once.

    python benchmarks/gpu_attention.py --out record.json            everything, under 100 s
    python benchmarks/gpu_attention.py --out record.json --sweep    tile shapes too
    python benchmarks/gpu_attention.py --cache fp8 --sweep          the same over a cache in eight bits

1. Errors against plain torch in float32 on random ragged batches: dtypes, head sizes, groups, layouts, windows, fp8,
   prefill; deterministic mode bit for bit over batches; repeated runs; a captured graph with new lengths.
2. Verification of k = 16 at 32/8 heads of 128, bf16, by CUDA graph replay. A graph calls the kernel on set after set of
   pages (--working-set bytes in all, several times the L2), and the median of its replays counts. floor = bytes of keys
   and values over the bandwidth of a large copy in the same run.
3. The same for other shapes: one row, half the rows, uneven contexts, drafts, other heads, prefill.
Every case stands alone: what fails is reported and the rest goes on; past --seconds the rest is skipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_measure import DEVICE, copy_bandwidth, replay_time
from torch import Tensor

from dscale.evaluate.record_file import write_record
from dscale.kernels.attention import AttentionOptions, RaggedBatch, arrival_counters, paged_attention_torch
from dscale.kernels.triton import attention as fast
from dscale.kernels.triton.attention import Tile

PAGE = 16
SWEEP = [
    Tile(64, 64, 4, 3, 1),
    Tile(64, 64, 4, 3, 2),
    Tile(64, 64, 4, 2, 2),
    Tile(64, 64, 4, 4, 1),
    Tile(64, 64, 8, 3, 1),
    Tile(64, 32, 4, 4, 2),
    Tile(64, 32, 4, 4, 3),
    Tile(64, 32, 4, 6, 2),
    Tile(64, 128, 8, 2, 1),
    Tile(64, 128, 8, 3, 1),
    Tile(64, 128, 4, 2, 1),
]
EIGHT_BITS_SWEEP = [
    Tile(64, 64, 4, 3, 2),
    Tile(64, 64, 4, 4, 2),
    Tile(64, 64, 4, 5, 1),
    Tile(64, 64, 4, 5, 2),
    Tile(64, 64, 8, 5, 1),
    Tile(64, 64, 8, 5, 2),
    Tile(64, 32, 4, 6, 2),
    Tile(64, 128, 8, 3, 1),
    Tile(64, 128, 8, 4, 1),
    Tile(32, 64, 4, 5, 2),
]
ONE_ROW_SWEEP = [
    Tile(16, 64, 4, 3, 2),
    Tile(16, 64, 4, 3, 3),
    Tile(16, 64, 2, 3, 3),
    Tile(16, 128, 4, 2, 2),
    Tile(16, 32, 2, 4, 4),
    Tile(64, 64, 4, 3, 2),
]


@dataclass(frozen=True)
class Shape:
    """One attention problem: what the lanes hold, the heads, and which path they take."""

    lanes: int
    context: int
    rows: int = 16
    heads: int = 32
    kv: int = 8
    size: int = 128
    path: str = "verify"
    spread: float = 0.0  # contexts are spread evenly over context · (1 ± spread)
    cache: torch.dtype = torch.bfloat16

    def contexts(self) -> list[int]:
        """Tokens before each lane's rows."""
        steps = [2 * i / max(self.lanes - 1, 1) - 1 for i in range(self.lanes)]
        return [int(self.context * (1 + self.spread * step)) for step in steps]

    def bytes(self) -> int:
        """Bytes of the keys and values that the lanes see."""
        keys = sum(self.contexts()) + self.lanes * self.rows
        return keys * self.kv * self.size * 2 * self.cache.itemsize


@dataclass
class Bench:
    """What a run has measured; problems holds one line for each case that failed."""

    deadline: float
    working_set: int
    bandwidth: float = 0.0  # bytes a second
    errors: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def attempt(self, name: str, case: Callable[[], None]) -> None:
        """Run a case unless time is up; a failure is kept as a line."""
        if time.monotonic() > self.deadline:
            self.problems.append(f"{name}: skipped, time is up")
            return
        try:
            case()
        except Exception as problem:  # the other cases still count
            self.problems.append(f"{name}: {type(problem).__name__}: {str(problem).splitlines()[0][:160]}")


def ragged(counts: list[int], contexts: list[int], sets: int = 1, **fields: Any) -> list[RaggedBatch]:
    """`sets` batches of these lanes, each on pages of its own, in random order of one pool."""
    longest = max(context + count for context, count in zip(contexts, counts, strict=True))
    pages = -(-longest // PAGE)
    tables = torch.randperm(sets * len(counts) * pages, device=DEVICE).view(sets, len(counts), pages).int()
    lanes = torch.arange(len(counts), device=DEVICE)
    starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    none = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    context = torch.tensor(contexts, device=DEVICE)
    return [RaggedBatch(none, none, table, lanes, starts, context, max(counts), longest, **fields) for table in tables]


def error(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(bench: Bench, name: str, counts: list[int], contexts: list[int], **options: Any) -> None:
    """One error: options are heads, kv, size, dtype, cache, window and the fields of RaggedBatch."""
    heads, kv, size = options.pop("heads", 32), options.pop("kv", 8), options.pop("size", 128)
    dtype, window = options.pop("dtype", torch.bfloat16), options.pop("window", None)
    cache, bound = options.pop("cache", dtype), 1e-5 if dtype is torch.float32 else 1e-2
    batch = ragged(counts, contexts, **options)[0]
    q = torch.randn(sum(counts) + 5, heads, size, device=DEVICE).to(dtype)
    caches = torch.randn(2, batch.page_table.numel(), kv, PAGE, size, device=DEVICE).to(cache)
    keys, values = caches
    runs = [fast.paged_attention(q, keys, values, batch, size**-0.5, window) for _ in range(3)]
    want = paged_attention_torch(q.float(), keys.float(), values.float(), batch, size**-0.5, window)
    found = error(runs[0], want)
    steady = all(torch.equal(runs[0], run) for run in runs) and bool((runs[0][sum(counts) :] == 0).all())
    bench.errors.append({"case": name, "error": found, "ok": found < bound and steady, "steady": steady})


def check_all(bench: Bench) -> None:
    """Errors over the kernel's range, on lengths drawn at random."""
    generator = torch.Generator().manual_seed(int(time.time()))

    def draw(lanes: int, low: int, high: int) -> list[int]:
        return torch.randint(low, high + 1, (lanes,), generator=generator).tolist()

    counts, contexts = [16, 0, *draw(9, 0, 16)], draw(11, 0, 3000)
    cases: dict[str, dict[str, Any]] = {
        "verify": {},
        "draft": {"causal": False, "path": "draft"},
        "narrow": {"options": AttentionOptions("narrow")},
        "wide": {"options": AttentionOptions("wide")},
        "window 700": {"window": 700},
        "draft, window 40": {"causal": False, "window": 40},
        "heads 24/2 of 256": {"heads": 24, "kv": 2, "size": 256},
        "wide, heads 24/2 of 256": {"heads": 24, "kv": 2, "size": 256, "options": AttentionOptions("wide")},
        "heads 9/3 of 64": {"heads": 9, "kv": 3, "size": 64},
        "heads 16/1": {"heads": 16, "kv": 1},
        "heads 4/4": {"heads": 4, "kv": 4},
        "float16": {"dtype": torch.float16},
        "float32, heads 9/3 of 64": {"dtype": torch.float32, "heads": 9, "kv": 3, "size": 64},
        "fp8 cache": {"cache": torch.float8_e4m3fn},
        "fp8 cache, narrow": {"cache": torch.float8_e4m3fn, "options": AttentionOptions("narrow")},
        "fp8 cache, deterministic": {"cache": torch.float8_e4m3fn, "options": AttentionOptions(deterministic=True)},
        "fp8 cache, heads 24/2 of 256": {"cache": torch.float8_e4m3fn, "heads": 24, "kv": 2, "size": 256},
        "deterministic": {"options": AttentionOptions(deterministic=True)},
    }
    for name, options in cases.items():
        bench.attempt(name, partial(check, bench, name, counts, contexts, **options))
    long, before = [1000, 0, *draw(3, 1, 500)], draw(5, 0, 1500)
    prefills: dict[str, dict[str, Any]] = {
        "prefill": {},
        "prefill, window 300": {"window": 300},
        "prefill, deterministic": {"options": AttentionOptions(deterministic=True)},
        "prefill, heads 24/2 of 256": {"heads": 24, "kv": 2, "size": 256},
        "prefill, fp8 cache": {"cache": torch.float8_e4m3fn},
        "prefill, float32": {"dtype": torch.float32, "heads": 9, "kv": 3, "size": 64},
    }
    for name, options in prefills.items():
        bench.attempt(name, partial(check, bench, name, long, before, path="prefill", **options))
    for cache in (torch.bfloat16, torch.float8_e4m3fn):
        bench.attempt("same bits", partial(check_bits, bench, cache))
    bench.attempt("graph", partial(check_graph, bench))


def check_bits(bench: Bench, cache: torch.dtype) -> None:
    """Deterministic mode: rows one at a time, together, and as a prefill have the same bits."""
    counts, contexts = [16, 5, 16], [3000, 1020, 17]
    batch = ragged(counts, contexts, options=AttentionOptions(deterministic=True), path="verify")[0]
    q = torch.randn(37, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    keys, values = torch.randn(2, batch.page_table.numel(), 8, PAGE, 128, device=DEVICE).to(cache)
    together = fast.paged_attention(q, keys, values, batch, 0.09)
    ok = torch.equal(together, fast.paged_attention(q, keys, values, replace(batch, path="prefill"), 0.09))
    single = torch.tensor([0, 1], device=DEVICE)
    for row in range(37):
        lane = 0 if row < 16 else 1 if row < 21 else 2
        context = torch.tensor([contexts[lane] + row - sum(counts[:lane])], device=DEVICE)
        lanes = batch.lanes[lane : lane + 1]
        alone = replace(batch, lanes=lanes, starts=single, contexts=context, max_rows=1)
        out = fast.paged_attention(q[row : row + 1], keys, values, alone, 0.09)
        ok &= torch.equal(out, together[row : row + 1])
    bench.errors.append({"case": f"same bits alone, together, as prefill, {cache}", "error": 0.0, "ok": ok})


def check_graph(bench: Bench) -> None:
    """A captured call serves new starts, contexts, lanes and page tables."""
    batch = ragged([16] * 8, [2000] * 8)[0]
    batch = replace(batch, arrivals=arrival_counters(8, 16, 32, DEVICE))
    q = torch.randn(128, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    keys, values = torch.randn(2, batch.page_table.numel(), 8, PAGE, 128, device=DEVICE).bfloat16()
    fast.paged_attention(q, keys, values, batch, 0.09)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.paged_attention(q, keys, values, batch, 0.09)
    worst = 0.0
    for turn in range(20):
        counts = torch.randint(0, 17, (8,))
        counts[0] = max(int(counts[0]), 1)
        batch.starts[1:] = counts.cumsum(0).to(DEVICE)
        batch.contexts.copy_(torch.randint(0, 2000 if turn % 2 else 60, (8,)))
        batch.lanes.copy_(torch.randperm(8))
        batch.page_table.copy_(torch.randperm(batch.page_table.numel()).view_as(batch.page_table))
        graph.replay()
        want = paged_attention_torch(q.float(), keys.float(), values.float(), batch, 0.09)
        worst = max(worst, error(out, want))
    assert batch.arrivals is not None
    ok = worst < 1e-2 and bool((batch.arrivals == 0).all())
    bench.errors.append({"case": "captured graph, new lengths", "error": worst, "ok": ok})


class Problem:
    """Inputs of a shape: sets of pages beyond the cache's size, and the calls over them."""

    def __init__(self, shape: Shape, working_set: int) -> None:
        self.shape = shape
        sets = max(2, -(-working_set // shape.bytes()))
        fields = {"causal": shape.path != "draft", "path": shape.path}
        contexts = shape.contexts()
        self.batches = ragged([shape.rows] * shape.lanes, contexts, sets, **fields)
        self.q = torch.randn(shape.lanes * shape.rows, shape.heads, shape.size, device=DEVICE, dtype=torch.bfloat16)
        pages = sets * self.batches[0].page_table.numel()
        caches = torch.empty(2, pages, shape.kv, PAGE, shape.size, device=DEVICE, dtype=torch.bfloat16).normal_()
        self.keys, self.values = caches.to(shape.cache)
        self.arrivals = arrival_counters(shape.lanes, shape.rows, shape.heads, DEVICE)

    def time(self, options: AttentionOptions) -> float:
        """Microseconds of one call."""
        batches = [replace(batch, options=options, arrivals=self.arrivals) for batch in self.batches]
        scale = self.shape.size**-0.5
        run = partial(fast.paged_attention, self.q, self.keys, self.values, scale=scale)
        return replay_time([partial(run, batch=batch) for batch in batches])

    def flashinfer(self) -> float:
        """Microseconds of FlashInfer's paged prefill kernel on the same inputs."""
        import flashinfer

        shape, calls = self.shape, []
        for batch in self.batches:
            used = torch.tensor([-(-(c + shape.rows) // PAGE) for c in shape.contexts()])
            indices = torch.cat([batch.page_table[i, : int(n)] for i, n in enumerate(used)]).int()
            bounds = torch.cat([torch.zeros(1, dtype=torch.int64), used.cumsum(0)]).int().to(DEVICE)
            last = torch.tensor([(c + shape.rows - 1) % PAGE + 1 for c in shape.contexts()]).int().to(DEVICE)
            buffer = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "HND")
            wrapper.plan(
                batch.starts.int(), bounds, indices, last, shape.heads, shape.kv, shape.size, PAGE,
                causal=True, q_data_type=torch.bfloat16,
            )  # fmt: skip
            calls.append(partial(wrapper.run, self.q, (self.keys, self.values)))
        return replay_time(calls)


def measure(bench: Bench, name: str, problem: Problem, options: AttentionOptions | None) -> None:
    """Time one way of doing a problem; options None is FlashInfer."""
    shape = problem.shape
    microseconds = problem.flashinfer() if options is None else problem.time(options)
    floor = shape.bytes() / bench.bandwidth * 1e6
    entry = {"case": name, **{k: str(v) if k == "cache" else v for k, v in asdict(shape).items()}}
    entry |= {"tile": asdict(options.tile) if options and options.tile else None, "us": microseconds, "floor": floor}
    if shape.path == "prefill":
        pairs = shape.lanes * shape.rows * (shape.context + shape.rows / 2)
        entry["tflops"] = 4 * pairs * shape.heads * shape.size / microseconds / 1e6
    bench.times.append(entry)


def time_ways(bench: Bench, shape: Shape, ways: dict[str, AttentionOptions | None]) -> None:
    """Time every way of doing one problem."""
    problem = Problem(shape, bench.working_set)
    for name, options in ways.items():
        where = f"{name} {shape.path} N={shape.lanes} ctx={shape.context}"
        bench.attempt(where, partial(measure, bench, name, problem, options))


def label(tile: Tile) -> str:
    """Short name of a tile."""
    return f"{tile.rows}x{tile.keys} w{tile.warps} s{tile.stages} p{tile.programs}"


def time_all(bench: Bench, sweep: bool, cache: torch.dtype) -> None:
    """All timed cases, those with a bound in the issue first, over a cache of this dtype."""
    ways: dict[str, AttentionOptions | None] = {name: AttentionOptions(name) for name in ("packed", "narrow", "wide")}
    ways["deterministic"] = AttentionOptions(deterministic=True)
    packed = {"packed": ways["packed"]}
    asked = [Shape(lanes, context) for context in (1024, 4096) for lanes in (8, 16, 32)]
    single = [Shape(lanes, 1024, rows=1) for lanes in (8, 32)]
    others = [
        Shape(1, 1024), Shape(1, 16384), Shape(64, 1024), Shape(128, 1024), Shape(32, 1024, rows=8),
        Shape(32, 1024, spread=0.9), Shape(32, 1024, path="draft"), Shape(8, 1024, heads=24, kv=2, size=256),
        Shape(32, 1024, heads=9, kv=3, size=64), Shape(32, 1024, heads=64), Shape(32, 1024, cache=torch.float8_e4m3fn),
        Shape(4, 0, rows=1024, path="prefill"), Shape(1, 3072, rows=1024, path="prefill"),
    ]  # fmt: skip
    cases = [(shape, ways) for shape in asked] + [(shape, packed) for shape in single + others]
    tiles = SWEEP if cache is torch.bfloat16 else EIGHT_BITS_SWEEP
    if sweep:
        cases += [(shape, {label(tile): AttentionOptions(tile=tile) for tile in tiles}) for shape in asked]
        cases += [(shape, {label(tile): AttentionOptions(tile=tile) for tile in ONE_ROW_SWEEP}) for shape in single]
    if cache is not torch.bfloat16:
        cases = [(replace(shape, cache=cache), some) for shape, some in cases]
    elif find_spec("flashinfer"):  # last: it may compile its kernels
        cases += [(shape, {"flashinfer": None}) for shape in asked]
    for shape, some in cases:
        bench.attempt(f"{shape}", partial(time_ways, bench, shape, some))


def print_tables(bench: Bench) -> None:
    """Errors in one block, then a line a shape with microseconds and multiples of the floor."""
    for entry in bench.errors:
        print(f"{'ok ' if entry['ok'] else 'BAD'} {entry['error']:.2e}  {entry['case']}")
    print("\n".join(dict.fromkeys(bench.problems)))
    print(f"copy {bench.bandwidth / 1e12:.2f} TB/s; microseconds (multiple of the floor)")
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in bench.times:
        key = "{path} N={lanes} ctx={context}±{spread:.0%} k={rows} {heads}/{kv}x{size} {cache}".format(**entry)
        groups.setdefault(key.replace("±0%", "").replace(" torch.bfloat16", ""), []).append(entry)
    for key, entries in groups.items():
        print(f"{key}  floor {entries[0]['floor']:.1f}")
        cells = [f"{e['case']} {e['us']:.1f} ({e['us'] / e['floor']:.2f}x)" for e in entries]
        cells = [
            c + (f" {e['tflops']:.0f} TFLOP/s" if "tflops" in e else "") for c, e in zip(cells, entries, strict=True)
        ]
        for first in range(0, len(cells), 4):
            print("   " + " | ".join(cells[first : first + 4]))


def main() -> None:
    """Parse, check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON record")
    parser.add_argument("--sweep", action="store_true", help="other tile shapes beside the chosen ones")
    parser.add_argument("--cache", choices=("bfloat16", "fp8"), default="bfloat16", help="of the timed cases")
    parser.add_argument("--seconds", type=float, default=95, help="no case begins later than this")
    parser.add_argument("--working-set", type=int, default=300_000_000, help="bytes of keys and values in rotation")
    args = parser.parse_args()
    bench = Bench(time.monotonic() + args.seconds, args.working_set)
    with torch.inference_mode():
        bench.bandwidth = copy_bandwidth()
        check_all(bench)
        time_all(bench, args.sweep, torch.float8_e4m3fn if args.cache == "fp8" else torch.bfloat16)
    print_tables(bench)
    if args.out:
        record = {"schema": "dscale.gpu_attention/1"} | asdict(bench)
        record |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"triton": triton.__version__, "command": "benchmarks/gpu_attention.py" + " --sweep" * args.sweep}
        record["command"] += f" --cache {args.cache}"
        del record["deadline"]
        write_record(args.out, record)


if __name__ == "__main__":
    main()
