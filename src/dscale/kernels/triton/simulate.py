"""Simulated acceptance in Triton: one launch looks a step's lanes up, one rewrites its rows.

Meaning and torch versions are in speculation/simulated.py; the numbers are the same, bit by bit.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.triton import dense
from dscale.kernels.triton.sample import GOLDEN, mix

ROWS = 256  # rows a program rewrites


@triton.jit
def _bits(stream, id):
    return mix(stream + id * GOLDEN)


@triton.jit
def _drawn(
    seed, position, survival, length, q, salt, REGION: tl.constexpr, REGION_BITS: tl.constexpr,
    ANCHOR_BITS: tl.constexpr, LENGTH: tl.constexpr, ANCHOR: tl.constexpr, PLACE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    at = tl.load(position + lane)
    salted = mix(tl.load(seed + lane) ^ salt)
    own, region = mix(salted + at * GOLDEN), mix(salted + (at // REGION) * GOLDEN)
    row = ((_bits(region, PLACE) >> (63 - REGION_BITS)) << ANCHOR_BITS) + (_bits(own, ANCHOR) >> (63 - ANCHOR_BITS))
    scores = tl.load(survival + row * WIDTH + column)
    chance = (_bits(own, LENGTH) >> 39).to(tl.float32) * 5.960464477539063e-08  # 2^-24
    passed = (chance < scores) & (column > 0)
    tl.store(length + lane, tl.sum(passed.to(tl.int64), axis=0))
    tl.store(q + lane * WIDTH + column, scores)


@triton.jit
def _rewrite(y, drafts, length, lanes, columns, out, rows, count, stride, vocab, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    lane, column = tl.load(lanes + row, mask=inside, other=0), tl.load(columns + row, mask=inside, other=0)
    drawn = tl.load(y + row, mask=inside, other=0)
    drafted = inside & (column < count)
    own = tl.load(drafts + lane * stride + column, mask=drafted, other=-1)
    passes = column < tl.load(length + lane, mask=inside, other=0)
    other = tl.where(drawn == own, (own + 1) % vocab, drawn)
    tl.store(out + row, tl.where(drafted, tl.where(passes, own, other), drawn), mask=inside)


def drawn(
    seed: Tensor,
    position: Tensor,
    survival: Tensor,
    salt: int,
    sizes: tuple[int, int, int],
    ids: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """`DrawnSimulation.at`: seed, position [N] int64, survival [classes, W] float32, W a power of two; sizes: positions
    of a region, classes of regions, classes of anchors; ids: of the length, the anchor's class, the region's."""
    lanes, width = seed.shape[0], survival.shape[1]
    length = torch.empty(lanes, dtype=torch.int64, device=seed.device)
    q = torch.empty(lanes, width, dtype=torch.float32, device=seed.device)
    region, regions, anchors = sizes
    seed, position = dense(seed, position)
    _drawn[(lanes,)](
        seed, position, survival, length, q, salt, REGION=region, REGION_BITS=(regions - 1).bit_length(),
        ANCHOR_BITS=(anchors - 1).bit_length(), LENGTH=ids[0], ANCHOR=ids[1], PLACE=ids[2], WIDTH=width, num_warps=1,
    )  # fmt: skip
    return length, q


def rewrite(y: Tensor, drafts: Tensor, length: Tensor, lanes: Tensor, columns: Tensor, vocab: int) -> Tensor:
    """`Simulation.rewrite`: y, lanes, columns [M], drafts [N, D], length [N], all int64 → [M] int64."""
    out = torch.empty_like(y)
    drafts = drafts if drafts.stride(1) == 1 else drafts.contiguous()
    y, length, lanes, columns = dense(y, length, lanes, columns)
    _rewrite[(triton.cdiv(y.shape[0], ROWS),)](
        y, drafts, length, lanes, columns, out, y.shape[0], drafts.shape[1], drafts.stride(0), vocab, ROWS=ROWS,
        num_warps=4,
    )  # fmt: skip
    return out
