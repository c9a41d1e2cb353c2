"""Packing the chosen slots of all requests into flat rows for the target (dscale.md §2, Packing).

    starts_0 = 0, starts_i = Σ_{t<i} k_t;   flat[starts_i + j] = field[i, j],  0 ≤ j < k_i

Row starts_i holds the anchor of request i, the next rows its drafts. Lanes with k = 0 own no row. The rows from
starts_N on are sentinels. The same boundaries serve packing, attention and acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.config import PAGE_SIZE
from dscale.kernels import triton


@dataclass(frozen=True)
class Packed:
    """Which lane and column each of M flat rows holds.

    starts [N+1] int64; lane_of_row, column_of_row [M] int64 (0 ≤ lane < N; sentinels have column 0); valid [M] bool is
    False for sentinels.
    """

    starts: Tensor
    lane_of_row: Tensor
    column_of_row: Tensor
    valid: Tensor


def pack(k: Tensor, rows: int) -> Packed:
    """Boundaries and maps for k [N] int64 slots in `rows` flat rows; Σ k may be at most `rows`. Reads nothing back."""
    if triton.usable(k):
        from dscale.kernels.triton import pack as kernel

        return Packed(*kernel.pack(k, rows))
    ends = k.cumsum(0)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends])
    row = torch.arange(rows, device=k.device)
    # The first lane whose end lies beyond the row: lanes of no rows are skipped.
    lane = torch.searchsorted(ends, row, right=True)
    valid = lane < k.shape[0]
    lane = lane.clamp(max=k.shape[0] - 1)
    return Packed(starts, lane, torch.where(valid, row - starts[lane], 0), valid)


def gather(packed: Packed, field: Tensor, fill: int | float) -> Tensor:
    """The rows of a field [N, W], flat: [M] in the field's dtype; sentinels hold `fill`."""
    return field[packed.lane_of_row, packed.column_of_row].masked_fill(~packed.valid, fill)


@dataclass(frozen=True)
class PackedRows:
    """What the target reads of M flat rows, int64 [M] each: token ids, positions, cache slots; sentinels hold zeros."""

    ids: Tensor
    positions: Tensor
    slots: Tensor


def pack_rows(
    k: Tensor,
    rows: int,
    anchor: Tensor,
    drafts: Tensor,
    context: Tensor,
    page_table: Tensor,
    lanes: Tensor,
    page_size: int = PAGE_SIZE,
) -> tuple[Packed, PackedRows]:
    """`pack`, and the rows of the blocks [anchor | drafts] that stand at positions context, context + 1, …

    anchor, context [N] int64; drafts [N, W-1] int64; page_table [state rows, pages] int32; lanes [N] int64 maps a lane
    to its page-table row.
    """
    if triton.usable(k):
        from dscale.kernels.triton import pack as kernel

        maps, fields = kernel.pack_rows(k, rows, anchor, drafts, context, page_table, lanes, page_size)
        return Packed(*maps), PackedRows(*fields)
    packed = pack(k, rows)
    block = torch.cat([anchor[:, None], drafts], dim=1)
    positions = context[:, None] + torch.arange(block.shape[1], device=k.device)
    slots = page_table[lanes].gather(1, positions // page_size).long() * page_size + positions % page_size
    return packed, PackedRows(*(gather(packed, field, 0) for field in (block, positions, slots)))
