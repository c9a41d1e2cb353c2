"""Milliseconds of the CPU kernels by number of rows, beside torch's library, at SmolLM2-135M's sizes.

    python benchmarks/cpu_kernels.py                          both dtypes, torch's number of threads, wall clock
    python benchmarks/cpu_kernels.py --threads 1 --clock cpu  on a machine that others use: CPU time of one thread

One line a row count: the linears of 30 layers and the head in the native kernel, the same in torch's functional.linear;
then attention of 30 layers, native and torch, for rows that stand behind --context tokens, 8 to a request at most. The
smallest of --repeats runs counts. `floor` is the time to read all weights once at --bandwidth GB/s, where given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dscale.kernels import native
from dscale.kernels.attention import RaggedBatch, paged_attention_torch

LAYERS, HEADS, KV, SIZE, PAGE = 30, 9, 3, 64, 16
LINEARS = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
BLOCK = 8


def fastest(run: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    """Milliseconds of the fastest of `repeats` runs, after one more."""
    run()
    times = []
    for _ in range(repeats):
        began = clock()
        run()
        times.append(clock() - began)
    return 1e3 * min(times)


def ragged(rows: int, context: int) -> RaggedBatch:
    """`rows` rows in requests of at most 8, pages in random order."""
    counts = torch.tensor([min(BLOCK, rows - first) for first in range(0, rows, BLOCK)])
    lanes, pages = torch.arange(len(counts)), -(-(context + BLOCK) // PAGE)
    table = torch.randperm(len(counts) * pages).view(-1, pages).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    lane = lanes.repeat_interleave(counts)
    positions = context + torch.arange(rows) - starts[lane]
    slots = table[lane, positions // PAGE].long() * PAGE + positions % PAGE
    contexts = torch.full((len(counts),), context)
    return RaggedBatch(positions, slots, table, lanes, starts, contexts, BLOCK, context + BLOCK)


class Weights:
    """Random weights of every linear, plain and packed."""

    def __init__(self, dtype: torch.dtype) -> None:
        shapes = [shape for _ in range(LAYERS) for shape in LINEARS] + [HEAD]
        self.plain = [torch.randn(shape).to(dtype) for shape in shapes]
        self.packed = [packed for weight in self.plain if (packed := native.pack(weight)) is not None]
        self.bytes = sum(weight.nbytes for weight in self.plain)

    def times(self, rows: int, clock: Callable[[], float], repeats: int) -> list[float]:
        """Milliseconds: native layers, native head, torch layers, torch head."""
        inputs = {depth: torch.randn(rows, depth).to(self.plain[0].dtype) for depth in (576, 1536)}

        def packed(part: slice) -> None:
            for weight in self.packed[part]:
                native.linear(inputs[weight.in_features], weight, None)

        def plain(part: slice) -> None:
            for weight in self.plain[part]:
                functional.linear(inputs[weight.shape[1]], weight)

        parts = (slice(0, -1), slice(-1, None))
        return [fastest(partial(run, part), clock, repeats) for run in (packed, plain) for part in parts]


def attention_times(
    dtype: torch.dtype, rows: int, context: int, clock: Callable[[], float], repeats: int
) -> list[float]:
    """Milliseconds of 30 layers of attention: native, torch."""
    batch = ragged(rows, context)
    cache = torch.randn(LAYERS, 2, batch.page_table.numel(), KV, PAGE, SIZE).to(dtype)
    q = torch.randn(rows, HEADS, SIZE).to(dtype)

    def layers(attend: Callable[[Tensor, Tensor, Tensor, RaggedBatch, float], Tensor]) -> None:
        for keys, values in cache:
            attend(q, keys, values, batch, SIZE**-0.5)

    ways = (native.paged_attention, paged_attention_torch)
    return [fastest(partial(layers, way), clock, repeats) for way in ways]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,12,16,24,32,48,64,128,256,512")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bandwidth", type=float, help="GB/s this machine reads with these threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.thread_time
    print(f"{native.status()}; {args.threads} threads, {args.clock} clock, torch {torch.__version__}")
    with torch.inference_mode():
        for name in args.dtypes.split(","):
            report(getattr(torch, name), args, clock)


def report(dtype: torch.dtype, args: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Print the table of one dtype."""
    weights = Weights(dtype)
    floor = f", floor {weights.bytes / args.bandwidth / 1e6:.1f} ms" if args.bandwidth else ""
    print(f"\n{dtype}: {weights.bytes / 1e6:.0f} MB of weights{floor}; context {args.context}; ms")
    print("  rows   layers    head     all |   torch: layers    head     all | attention   torch")
    for rows in map(int, args.rows.split(",")):
        layers, head, torch_layers, torch_head = weights.times(rows, clock, args.repeats)
        attention, torch_attention = attention_times(dtype, rows, args.context, clock, min(args.repeats, 3))
        print(
            f"{rows:6d} {layers:8.2f}{head:8.2f}{layers + head:8.2f} |{torch_layers:16.2f}{torch_head:8.2f}"
            f"{torch_layers + torch_head:8.2f} |{attention:10.2f}{torch_attention:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
