"""Packing of the chosen slots into flat rows, in Triton; see speculation/packing.py.

Every program sums the slots of all lanes anew (a few hundred numbers), so one launch does the boundaries, the maps and
the fields of the rows: token id, position and cache slot.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.triton import dense

ROWS = 32  # rows a program fills


@triton.jit
def _pack(
    k, starts, lane_of_row, column_of_row, valid_rows, ids, positions, slots, anchor, drafts, context, page_table,
    owner, lanes, rows, draft_stride, table_stride, page_size,
    FIELDS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(k + lane, mask=lane < lanes, other=0).to(tl.int32)
    ends = tl.cumsum(own, axis=0)
    if tl.program_id(0) == 0:
        tl.store(starts + lane, (ends - own).to(tl.int64), mask=lane < lanes)
        tl.store(starts + lanes + lane, tl.sum(own, axis=0).to(tl.int64), mask=lane == 0)
    passed = (ends[None, :] <= row[:, None]) & (lane < lanes)[None, :]
    # The first lane whose end lies beyond the row: lanes of no rows are skipped.
    of_row = tl.sum(passed.to(tl.int32), axis=1)
    valid = of_row < lanes
    of_row = tl.minimum(of_row, lanes - 1)
    is_owner = of_row[:, None] == lane[None, :]
    start = tl.sum(tl.where(is_owner, (ends - own)[None, :], 0), axis=1)
    column = tl.where(valid, row - start, 0)
    inside = row < rows
    tl.store(lane_of_row + row, of_row.to(tl.int64), mask=inside)
    tl.store(column_of_row + row, column.to(tl.int64), mask=inside)
    tl.store(valid_rows + row, valid, mask=inside)
    if FIELDS:
        used = inside & valid
        first = tl.load(anchor + of_row, mask=used, other=0)
        draft = drafts + of_row.to(tl.int64) * draft_stride + column - 1
        token = tl.where(column == 0, first, tl.load(draft, mask=used & (column > 0), other=0))
        position = tl.load(context + of_row, mask=used, other=0) + column
        table = page_table + tl.load(owner + of_row, mask=used, other=0) * table_stride
        page = tl.load(table + position // page_size, mask=used, other=0).to(tl.int64)
        tl.store(ids + row, tl.where(used, token, 0), mask=inside)
        tl.store(positions + row, tl.where(used, position, 0), mask=inside)
        tl.store(slots + row, tl.where(used, page * page_size + position % page_size, 0), mask=inside)


def pack(k: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See speculation/packing.py: k [N] int64 → starts [N+1], lane_of_row, column_of_row [M] int64, valid [M] bool."""
    k, maps = k.contiguous(), _maps(k, rows)
    _launch(k, rows, maps, (k,) * 8, None)
    return maps


def pack_rows(
    k: Tensor,
    rows: int,
    anchor: Tensor,
    drafts: Tensor,
    context: Tensor,
    page_table: Tensor,
    lanes: Tensor,
    page_size: int,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The maps of `pack`, and the rows' token ids, positions and cache slots, int64 [M]; sentinels hold zeros."""
    maps = _maps(k, rows)
    ids, positions, slots = torch.empty(3, rows, dtype=torch.int64, device=k.device).unbind()
    drafts = drafts if drafts.shape[1] == 0 or drafts.stride(1) == 1 else drafts.contiguous()
    k, anchor, context, lanes = dense(k, anchor, context, lanes)
    _launch(k, rows, maps, (ids, positions, slots, anchor, drafts, context, page_table, lanes), page_size)
    return maps, (ids, positions, slots)


def _maps(k: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    starts = torch.empty(k.shape[0] + 1, dtype=torch.int64, device=k.device)
    lane, column = torch.empty(2, rows, dtype=torch.int64, device=k.device).unbind()
    return starts, lane, column, torch.empty(rows, dtype=torch.bool, device=k.device)


def _launch(k: Tensor, rows: int, maps: tuple[Tensor, ...], fields: tuple[Tensor, ...], page_size: int | None) -> None:
    """Without a page size only the maps are filled, and fields are stand-ins."""
    drafts, table = fields[4], fields[6]
    _pack[(max(triton.cdiv(rows, ROWS), 1),)](
        k, *maps, *fields, k.shape[0], rows, drafts.stride(0), table.stride(0), page_size or 1,
        FIELDS=page_size is not None, LANES=int(triton.next_power_of_2(k.shape[0])), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
