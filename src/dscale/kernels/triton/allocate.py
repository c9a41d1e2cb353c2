"""Both allocators of speculation/budget.py in one block of a GPU each, in Triton.

A choice of the `count` highest scores needs no sort: the count-th highest is found bit by bit (30 counts over the
whole table, which lies in registers), everything above it is taken, and of those equal to it the first ones in tie
order, by a prefix sum. Scores lie in [0, 1], whose float32 bits are integers of the same order below 2^30.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ENTRIES = 8192  # lanes · width, both rounded up to powers of two, that one block holds
TOP_BIT = tl.constexpr(1 << 29)
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


@triton.jit
def _take(code, allowed, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mask of the `count` highest codes among the allowed ones [ROWS, COLUMNS]; ties in row-major order."""
    level = tl.zeros([], tl.int32)
    step = tl.full([], TOP_BIT, tl.int32)
    for _ in range(30):
        trial = level | step
        step = step >> 1
        reached = tl.sum(tl.sum((allowed & (code >= trial)).to(tl.int32), axis=1), axis=0)
        level = tl.where(reached >= count, trial, level)
    above = allowed & (code > level)
    equal = allowed & (code == level)
    left = count - tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0)
    flat = tl.reshape(equal.to(tl.int32), [ROWS * COLUMNS])
    before = tl.reshape(tl.cumsum(flat, axis=0) - flat, [ROWS, COLUMNS])
    return (above | (equal & (before < left))) & (count > 0)


@triton.jit
def _bits(scores):
    return tl.maximum(scores, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def _clip_total(total, requests, width, ON_DEVICE: tl.constexpr):
    wanted = tl.load(total).to(tl.int32) if ON_DEVICE else total
    return tl.maximum(tl.minimum(wanted, requests * width), requests)


@triton.jit
def _exact(q, live, total, k, lanes, width, stride, ON_DEVICE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    lane = tl.arange(0, LANES)
    running = tl.load(live + lane, mask=lane < lanes, other=0).to(tl.int32) != 0
    requests = tl.sum(running.to(tl.int32), axis=0)
    extra = _clip_total(total, requests, width, ON_DEVICE) - requests
    position = tl.arange(0, WIDTH)[:, None]  # positions are rows: ties go by (position, request)
    allowed = (position >= 1) & (position < width) & running[None, :]
    scores = tl.load(q + lane[None, :].to(tl.int64) * stride + position, mask=allowed, other=0.0)
    taken = _take(_bits(scores), allowed, extra, WIDTH, LANES)
    result = running.to(tl.int32) + tl.sum(taken.to(tl.int32), axis=0)
    tl.store(k + lane, result.to(tl.int64), mask=lane < lanes)


@triton.jit
def _seeded(q, live, total, k, lanes, width, stride, ON_DEVICE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    lane = tl.arange(0, LANES)
    running = tl.load(live + lane, mask=lane < lanes, other=0).to(tl.int32) != 0
    requests = tl.sum(running.to(tl.int32), axis=0)
    column = tl.arange(0, WIDTH)[None, :]
    at = q + lane[:, None].to(tl.int64) * stride
    exists = running[:, None] & (column < width)

    drafts = tl.sum(tl.load(at + column, mask=exists & (column >= 1), other=0.0), axis=1)
    whole = tl.floor(drafts)
    part = drafts - whole
    odd = (whole.to(tl.int32) & 1) == 1
    start = whole.to(tl.int32) + ((part > 0.5) | ((part == 0.5) & odd)).to(tl.int32)  # halves go to the even number
    start = tl.where(running, tl.maximum(tl.minimum(start, width), 1), 0)
    missing = _clip_total(total, requests, width, ON_DEVICE) - tl.sum(start, axis=0)

    # Dropping is the same choice of the lowest scores, and goes from the end of a request.
    grow = missing >= 0
    position = tl.where(grow, column, width - 1 - column)
    grown, dropped = position >= start[:, None], (position >= 1) & (position < start[:, None])
    allowed = exists & (tl.where(grow, grown.to(tl.int32), dropped.to(tl.int32)) == 1)
    code = _bits(tl.load(at + position, mask=allowed, other=0.0))
    taken = _take(tl.where(grow, code, -code + ONE), allowed, tl.abs(missing), LANES, WIDTH)
    change = tl.sum(taken.to(tl.int32), axis=1)
    tl.store(k + lane, (start + tl.where(grow, change, -change)).to(tl.int64), mask=lane < lanes)


def fits(q: Tensor) -> bool:
    """True when one block holds q [N, W] float32."""
    return q.dtype is torch.float32 and triton.next_power_of_2(q.shape[0]) * _width(q) <= MAX_ENTRIES


def allocate_exact(q: Tensor, total: Tensor | int, live: Tensor) -> Tensor:
    """See speculation/budget.py: q [N, W] in [0, 1], live [N] bool → k [N] int64. A tensor total lies on the device."""
    return _run(_exact, q, total, live)


def allocate_seeded(q: Tensor, total: Tensor | int, live: Tensor) -> Tensor:
    """See speculation/budget.py: q [N, W] in [0, 1], live [N] bool → k [N] int64. A tensor total lies on the device."""
    return _run(_seeded, q, total, live)


def _width(q: Tensor) -> int:
    return int(triton.next_power_of_2(q.shape[1]))


def _run(kernel: triton.JITFunction, q: Tensor, total: Tensor | int, live: Tensor) -> Tensor:
    q = q if q.stride(1) == 1 else q.contiguous()
    k = torch.empty(q.shape[0], dtype=torch.int64, device=q.device)
    lanes = int(triton.next_power_of_2(q.shape[0]))
    entries = lanes * _width(q)
    kernel[(1,)](
        q, live.contiguous(), total, k, *q.shape, q.stride(0),
        ON_DEVICE=isinstance(total, Tensor), LANES=lanes, WIDTH=_width(q),
        num_warps=1 if entries <= 512 else min(16, entries // 256),
    )  # fmt: skip
    return k
