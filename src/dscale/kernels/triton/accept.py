"""Acceptance of drafts and the cut at end tokens and caps, one program a lane, in Triton.

Formulas and torch versions are in speculation/acceptance.py.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.triton import dense


@triton.jit
def _accept(
    drafts, k, y, starts, end_ids, remaining, count_out, emitted_out, tokens, next_anchor, clipped_out, finished_out,
    owners, context, length, anchor, initial, rows, width, draft_stride, ends, end_stride,
    CLIP: tl.constexpr, COMMIT: tl.constexpr, WIDTH: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    slots = tl.load(k + lane)
    row = tl.minimum(tl.load(starts + lane) + column, rows - 1)
    own = tl.load(y + row, mask=inside, other=0)
    draft = tl.load(drafts + lane * draft_stride + column, mask=column < width - 1, other=0)
    passed = (draft == own) & (column + 1 < slots) & (column < width - 1)
    count = tl.min(tl.where(passed, WIDTH, column), axis=0)
    alive = slots > 0
    emitted = tl.where(alive, count + 1, 0)
    tl.store(count_out + lane, count.to(tl.int64))
    tl.store(emitted_out + lane, emitted.to(tl.int64))
    tl.store(tokens + lane * width + column, tl.where(column < emitted, own, -1), mask=inside)
    last = tl.sum(tl.where(column == count, own, 0), axis=0)
    tl.store(next_anchor + lane, tl.where(alive, last, 0))
    if CLIP:
        owner = tl.load(owners + lane) if COMMIT else lane
        index = tl.arange(0, ENDS)
        end = tl.load(end_ids + owner * end_stride + index, mask=index < ends, other=-1)
        same = (own[:, None] == end[None, :]).to(tl.int32)
        is_end = (tl.max(same, axis=1) == 1) & (column < emitted)
        until_end = tl.min(tl.where(is_end, column + 1, width + 1), axis=0).to(tl.int64)
        left = tl.load(remaining + owner)
        clipped = tl.minimum(tl.minimum(emitted.to(tl.int64), tl.maximum(left, 0)), until_end)
        tl.store(clipped_out + lane, clipped)
        finished = (emitted > 0) & ((clipped == until_end) | (clipped >= left))
        tl.store(finished_out + lane, finished)
        if COMMIT:  # lanes not in use share a row that nobody reads
            tl.store(length + owner, tl.load(context + lane) + clipped)
            tl.store(anchor + owner, tl.where(alive, last, 0))
            tl.store(remaining + owner, tl.where(finished, 0, left - clipped))
            tl.store(initial + owner, 0)


Outcome = tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, Tensor]


def accept(drafts: Tensor, k: Tensor, y: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See speculation/acceptance.py: count [N], emitted [N], tokens [N, W], next_anchor [N], all int64."""
    return _run(drafts, k, y, starts)[0]


def accept_clipped(drafts: Tensor, k: Tensor, y: Tensor, starts: Tensor, end_ids: Tensor, remaining: Tensor) -> Outcome:
    """`accept` and `clip_at_end` at once: (accept's four, emitted after the cut [N] int64, finished [N] bool)."""
    return _run(drafts, k, y, starts, end_ids, remaining)


def commit(
    drafts: Tensor,
    k: Tensor,
    y: Tensor,
    starts: Tensor,
    end_ids: Tensor,
    remaining: Tensor,
    moved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> Outcome:
    """`accept_clipped` for lanes that own rows of a state, which moves on in place.

    end_ids [rows, E], remaining [rows]; moved: the row of each lane [N], its committed length [N] before the step, and
    the state's length, anchor [rows] int64 and initial [rows] bool.
    """
    return _run(drafts, k, y, starts, end_ids, remaining, moved)


def _run(
    drafts: Tensor,
    k: Tensor,
    y: Tensor,
    starts: Tensor,
    end_ids: Tensor | None = None,
    remaining: Tensor | None = None,
    moved: tuple[Tensor, ...] | None = None,
) -> Outcome:
    lanes, width = drafts.shape[0], drafts.shape[1] + 1
    drafts = drafts if drafts.shape[1] == 0 or drafts.stride(1) == 1 else drafts.contiguous()
    count, emitted, anchor, clipped = torch.empty(4, lanes, dtype=torch.int64, device=y.device).unbind()
    tokens = torch.empty(lanes, width, dtype=torch.int64, device=y.device)
    finished = torch.empty(lanes, dtype=torch.bool, device=y.device)
    k, y, starts, left = dense(k, y, starts, k if remaining is None else remaining)
    if moved is not None and not all(one.is_contiguous() for one in moved):
        raise ValueError("accept: rows of the state have gaps between them; a state is written in place")
    table = k[:, None] if end_ids is None else end_ids
    table = table if table.stride(1) == 1 else table.contiguous()
    _accept[(lanes,)](
        drafts, k, y, starts, table, left, count, emitted, tokens, anchor, clipped,
        finished, *(moved or (k,) * 5), y.shape[0], width, drafts.stride(0), table.shape[1], table.stride(0),
        CLIP=end_ids is not None, COMMIT=moved is not None, WIDTH=int(triton.next_power_of_2(width)),
        ENDS=int(triton.next_power_of_2(table.shape[1])), num_warps=1,
    )  # fmt: skip
    return (count, emitted, tokens, anchor), clipped, finished
