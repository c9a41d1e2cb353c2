"""Accepting drafts (dscale.md §3): the target drew its own token y at every row; drafts pass while they equal it.

    count_i = the largest a ≤ k_i - 1 with drafts_{i,j} = y_{i,j} for all j < a
    emitted tokens: y_{i,0} … y_{i,count_i}, that is the accepted drafts and the successor, which is the next anchor

Row j of request i predicts draft j (0-based among the drafts), so y at row j is what the text would have had anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.kernels import triton

NO_TOKEN = -1  # pads token tables


@dataclass(frozen=True)
class Accepted:
    """Per lane: count [N] accepted drafts, emitted [N] tokens (count + 1; 0 for a lane without slots), tokens [N, W]
    padded with -1, next_anchor [N] (0 for a lane without slots). All int64."""

    count: Tensor
    emitted: Tensor
    tokens: Tensor
    next_anchor: Tensor


def accept(drafts: Tensor, k: Tensor, y: Tensor, starts: Tensor) -> Accepted:
    """Compare drafts [N, W-1] with the target's tokens y [M] of the packed rows; k [N] slots, starts [N+1] int64."""
    if triton.usable(y):
        from dscale.kernels.triton import accept as kernel

        return Accepted(*kernel.accept(drafts, k, y, starts))
    width = drafts.shape[1] + 1
    column = torch.arange(width, device=drafts.device)
    rows = (starts[:-1, None] + column).clamp(max=y.shape[0] - 1)
    own = y[rows]
    passed = (drafts == own[:, :-1]) & (column[1:] < k[:, None])
    count = passed.long().cumprod(-1).sum(-1)
    alive = (k > 0).long()
    emitted = (count + 1) * alive
    tokens = torch.where(column < emitted[:, None], own, NO_TOKEN)
    next_anchor = own.gather(1, count[:, None]).squeeze(1) * alive
    return Accepted(count, emitted, tokens, next_anchor)


def clip_at_end(tokens: Tensor, emitted: Tensor, end_ids: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
    """Cut emitted tokens after the first end token and at the output cap: (emitted [N] int64, finished [N] bool).

    tokens [N, W]; end_ids [N, E] int64, padded with -1 (all -1 where end tokens are ignored); remaining [N] int64,
    tokens the lane may still emit. The end token itself counts as emitted. A lane that emitted nothing is not finished.
    """
    width = tokens.shape[1]
    column = torch.arange(width, device=tokens.device)
    is_end = (tokens[:, :, None] == end_ids[:, None, :]).any(-1) & (column < emitted[:, None])
    until_end = torch.where(is_end, column + 1, width + 1).amin(-1)
    clipped = torch.minimum(torch.minimum(emitted, remaining.clamp(min=0)), until_end)
    finished = (emitted > 0) & ((clipped == until_end) | (clipped >= remaining))
    return clipped, finished


def accept_clipped(
    drafts: Tensor, k: Tensor, y: Tensor, starts: Tensor, end_ids: Tensor, remaining: Tensor
) -> tuple[Accepted, Tensor, Tensor]:
    """`accept`, then `clip_at_end`: (what was accepted, emitted after the cut [N] int64, finished [N] bool)."""
    if triton.usable(y):
        from dscale.kernels.triton import accept as kernel

        parts, emitted, finished = kernel.accept_clipped(drafts, k, y, starts, end_ids, remaining)
        return Accepted(*parts), emitted, finished
    outcome = accept(drafts, k, y, starts)
    return outcome, *clip_at_end(outcome.tokens, outcome.emitted, end_ids, remaining)
