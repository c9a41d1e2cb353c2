"""y = x · weightᵀ + bias whose rows do not depend on each other: the same bits alone or among any others, in Triton.

Every element is one chain of sums in float32 over the depth,
    part_p = Σ_(k in part p, ascending) x[r, k] · weight[c, k]        y[r, c] = part_0 + part_1 + … + bias[c]
and how the depth is cut into parts follows from the weight's shape alone. Few rows: a program takes one part of a tile,
so that the weight is read by the whole chip, and a second kernel adds the parts. Many rows: a program takes all parts
of its tile, one after another. The sums are the same.

Tiles may be of any size as long as the products within them are made by the same instruction: all 16-bit tiles have at
least 64 rows (Hopper's warp-group product of m64, k16, in steps of k), and float32 has one tile, of plain fused
multiply-adds. tests/gpu/test_deterministic.py compares the bits of all of them.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # about one for each multiprocessor of a large GPU; a constant, so that bits do not depend on the chip
PART_COLUMNS = 128  # columns of a tile when parts are counted
LEAST_DEPTH = 1024  # of a part: below it adding parts costs more than reading the weight slowly
BAND = 16  # row tiles that share a column tile while it lies in the cache
SUM_BLOCK = 1024


@dataclass(frozen=True)
class LinearTile:
    """rows and columns of a tile, depth of a turn, warps, pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FLOAT32 = LinearTile(rows=16, columns=64, depth=32, warps=4, stages=2)
FEW_ROWS = LinearTile(rows=64, columns=128, depth=64, warps=4, stages=4)
MANY_ROWS = LinearTile(rows=128, columns=128, depth=64, warps=8, stages=3)


def parts_of(columns: int, depth: int) -> int:
    """Parts of the depth, of a weight [columns, depth] alone: enough programs to fill a chip when rows are few."""
    tiles = triton.cdiv(columns, PART_COLUMNS)
    return int(max(min(triton.cdiv(PROGRAMS, tiles), depth // LEAST_DEPTH), 1))


def choose_tile(rows: int, dtype: torch.dtype) -> LinearTile:
    """The tile for a number of rows; which one does not change a bit."""
    if dtype is torch.float32:
        return FLOAT32
    return FEW_ROWS if rows <= FEW_ROWS.rows else MANY_ROWS


@triton.jit
def _part(
    total, x_at, weight_at, live, begin, end, depth,
    EVEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """total + the products of columns begin … end-1 of x and weight, in this order."""
    k = tl.arange(0, DEPTH)
    for start in range(begin, end, DEPTH):
        if EVEN:
            own = tl.load(x_at + start, mask=live[:, None], other=0.0)
            weights = tl.load(weight_at + start)
        else:
            inside = k < depth - start
            own = tl.load(x_at + start, mask=live[:, None] & inside[None, :], other=0.0)
            weights = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
        total = tl.dot(own, tl.trans(weights), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _products(
    x, weight, bias, out, rows, columns, depth, part_depth, x_row, weight_row,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """APART: program (tile, part) stores its part to out [parts, rows, columns] float32. WHOLE: there is one part."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    first = tile // (BAND * column_tiles) * BAND
    height = tl.minimum(row_tiles - first, BAND)
    within = tile % (BAND * column_tiles)
    row = (first + within % height) * ROWS + tl.arange(0, ROWS)
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    live, k = row < rows, tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    weight_at = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * weight_row + k[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = live[:, None] & (column < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if APART:
        part = tl.program_id(1)
        begin = part * part_depth
        total = _part(total, x_at, weight_at, live, begin, tl.minimum(begin + part_depth, depth), depth, EVEN, DEPTH)
        tl.store(out + part.to(tl.int64) * rows * columns + at, total, mask=inside)
    else:
        if WHOLE:
            total = _part(total, x_at, weight_at, live, 0, depth, depth, EVEN, DEPTH)
        else:
            for begin in range(0, depth, part_depth):
                nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
                end = tl.minimum(begin + part_depth, depth)
                total += _part(nothing, x_at, weight_at, live, begin, end, depth, EVEN, DEPTH)
        if BIAS:
            total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_parts(parts, bias, out, rows, columns, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows.to(tl.int64) + row) * columns + column, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: LinearTile | None = None) -> Tensor:
    """x [..., in] times weight [out, in] plus bias [out] → [..., out]; float32, bfloat16 or float16, summed in float32.

    tile overrides the choice (tuning).
    """
    own = x.reshape(-1, x.shape[-1])
    own = own if own.stride(1) == 1 else own.contiguous()
    (rows, depth), columns = own.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        _run(own, weight, bias, out, parts_of(columns, depth), tile or choose_tile(rows, x.dtype))
    return out.view(*x.shape[:-1], columns)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, parts: int, tile: LinearTile) -> None:
    (rows, depth), columns = x.shape, weight.shape[0]
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    part_depth = triton.cdiv(triton.cdiv(depth, parts), LEAST_DEPTH // 8) * (LEAST_DEPTH // 8)
    parts = triton.cdiv(depth, part_depth)
    apart = parts > 1 and tiles < PROGRAMS
    made = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device) if apart else out
    given = x if bias is None else bias
    _products[(tiles, parts if apart else 1)](
        x, weight, given, made, rows, columns, depth, part_depth, x.stride(0), weight.stride(0),
        BIAS=bias is not None, WHOLE=parts == 1, APART=apart, EVEN=depth % tile.depth == 0, ROWS=tile.rows,
        COLUMNS=tile.columns, DEPTH=tile.depth, BAND=BAND, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if apart:
        _add_parts[(rows, triton.cdiv(columns, SUM_BLOCK))](
            made, given, out, rows, columns, PARTS=parts, BIAS=bias is not None, BLOCK=SUM_BLOCK, num_warps=4
        )
