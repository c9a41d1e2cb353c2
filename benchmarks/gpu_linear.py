"""The deterministic matrix product on a CUDA GPU: the same bits whatever the tile, and its time beside cuBLAS.

    python benchmarks/gpu_linear.py --out gpu_linear.json            the chosen tiles, under 60 s
    python benchmarks/gpu_linear.py --sweep --seconds 150            other tiles too, and the best one for every case

bfloat16, weights of Qwen3-8B, Qwen3-4B and SmolLM2, 1 … 2048 rows. Microseconds are of a captured graph that goes
through copies of the weight (several times the L2 in all), the median of its replays. floor: bytes of the weight, x and
y over the bandwidth of a large copy, or the products over --teraflops, whichever takes longer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_measure import copy_bandwidth, replay_time
from torch import Tensor
from torch.nn import functional

from dscale.evaluate.record_file import write_record
from dscale.kernels.triton import linear as fast
from dscale.kernels.triton.linear import LinearTile

SHAPES = {  # out, in
    "qwen3-8b": {"qkv": (6144, 4096), "output": (4096, 4096), "gate-up": (24576, 4096), "down": (4096, 12288)},
    "qwen3-4b": {"qkv": (6144, 2560), "output": (2560, 4096), "gate-up": (19456, 2560), "down": (2560, 9728)},
    "smollm2": {"qkv": (960, 576), "output": (576, 576), "gate-up": (3072, 576), "down": (576, 1536)},
    "heads": {"qwen3-8b": (151936, 4096), "smollm2": (49152, 576)},
}
ROWS = (1, 8, 32, 64, 128, 256, 2048)
WORKING_SET = 256 << 20  # bytes of the copies of a weight


def sweep_tiles() -> Iterator[LinearTile]:
    """Tiles of the same instruction, so of the same bits."""
    for columns, depth, stages in ((64, 64, 6), (64, 128, 4), (128, 64, 3), (128, 64, 6), (128, 128, 3), (256, 64, 4)):
        yield LinearTile(64, columns, depth, 4, stages)
    for columns, depth, stages in ((64, 64, 4), (64, 128, 3), (128, 64, 4), (128, 64, 5), (128, 128, 3), (256, 64, 3)):
        yield LinearTile(128, columns, depth, 8, stages)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").mul_(shape[-1] ** -0.25).bfloat16()


def floor_us(rows: int, columns: int, depth: int, bandwidth: float, teraflops: float) -> float:
    """Microseconds that no kernel can be under."""
    moved = 2 * (columns * depth + rows * depth + rows * columns)
    return 1e6 * max(moved / bandwidth, 2 * rows * columns * depth / (teraflops * 1e12))


def case(name: str, rows: int, shape: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    """One weight and number of rows."""
    columns, depth = shape
    copies = min(max(math.ceil(WORKING_SET / (2 * columns * depth)), 2), 64)
    x, weights = normal(rows, depth), [normal(columns, depth) for _ in range(copies)]
    want = fast.linear(x, weights[0])
    chosen = fast.choose_tile(rows, x.dtype)
    plain = functional.linear(x, weights[0]).float()
    row: dict[str, Any] = {
        "weight": name, "rows": rows, "parts": fast.parts_of(columns, depth),
        "error": ((want.float() - plain).norm() / plain.norm()).item(),
        "alone": all(torch.equal(fast.linear(x[n : n + 1], weights[0]), want[n : n + 1]) for n in (0, rows - 1)),
        "floor_us": floor_us(rows, columns, depth, args.bandwidth, args.teraflops),
        "cublas_us": replay_time([partial(functional.linear, x, weight) for weight in weights]),
        "us": replay_time([partial(fast.linear, x, weight) for weight in weights]),
    }  # fmt: skip
    if args.sweep:
        row["tiles"], row["other_bits"], row["failed"] = {}, [], []
        for tile in sweep_tiles():
            key = f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
            if time.perf_counter() > args.deadline or (rows <= 64 < tile.rows) or (rows > 256 and tile.rows == 64):
                continue
            try:
                if not torch.equal(fast.linear(x, weights[0], tile=tile), want):
                    row["other_bits"].append(key)
                row["tiles"][key] = replay_time([partial(fast.linear, x, one, tile=tile) for one in weights], 5)
            except Exception as problem:  # a tile too large for the chip leaves the others
                row["failed"].append(f"{key}: {type(problem).__name__}")
        row["best"] = min(row["tiles"], key=row["tiles"].__getitem__, default=None)
    row["ratio"] = row["us"] / row["cublas_us"]
    row["chosen"] = str(chosen)
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    text = (
        f"{row['weight']:18} {row['rows']:5} rows  floor {row['floor_us']:8.1f}  cuBLAS {row['cublas_us']:8.1f}  "
        f"ours {row['us']:8.1f} us  {row['ratio']:.2f}x  parts {row['parts']}  error {row['error']:.1e}"
    )
    text += "" if row["alone"] else "  BITS DEPEND ON THE ROWS"
    if row.get("best"):
        best = row["tiles"][row["best"]]
        text += f"  best {row['best']} {best:.1f} us {best / row['cublas_us']:.2f}x"
        text += f"  OTHER BITS: {row['other_bits']}" if row["other_bits"] else ""
    return text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-8b,qwen3-4b,smollm2,heads")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--teraflops", type=float, default=990.0, help="peak of the chip in bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_linear: no CUDA device is here")
    args.deadline = time.perf_counter() + args.seconds
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    device = torch.cuda.get_device_name()
    record: dict[str, Any] = {
        "schema": "dscale.gpu_linear/1",
        "device": device,
        "torch": torch.__version__,
        "rows": rows,
    }
    with torch.inference_mode():
        args.bandwidth = record["bandwidth"] = copy_bandwidth()
        for model in args.models.split(","):
            for name, shape in SHAPES[model].items():
                for count in map(int, args.rows.split(",")):
                    if time.perf_counter() > args.deadline:
                        print(f"{model} {name} {count}: skipped, out of time")
                        continue
                    rows.append(case(f"{model} {name}", count, shape, args))
                    print(line(rows[-1]), flush=True)
                    if args.out is not None:
                        write_record(args.out, record)
    few = [row["ratio"] for row in rows if row["rows"] <= 256]
    if few:
        print(f"geometric mean over cuBLAS, up to 256 rows: {statistics.geometric_mean(few):.2f}x")


if __name__ == "__main__":
    main()
