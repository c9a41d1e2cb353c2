"""Sharing the verification slots of a step among its requests (dscale.md §2, Allocation).

    maximise Σ_i Σ_{j < k_i} q_{i,j}     subject to Σ_i k_i = total,  1 ≤ k_i ≤ W

q [N, W] is `survival`: 1 first, nonincreasing. Lanes that are not live get k = 0. No value is read on the host, so
both allocators can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.kernels import triton


def initial_windows(q: Tensor) -> Tensor:
    """k⁰ [N] int64: the expected accepted drafts Σ_{j≥1} q_j, rounded and clipped to [1, W]; the anchor is included."""
    return q[:, 1:].sum(-1).round().long().clamp(1, q.shape[-1])


def clip_total(total: Tensor | int, live: Tensor, width: int) -> Tensor:
    """The budget clipped to [live requests, live requests · W], int64 of no dimensions."""
    requests = live.sum()
    return torch.maximum((requests * width).clamp(max=total), requests)


def count_highest(scores: Tensor, owners: Tensor, count: Tensor, lanes: int) -> Tensor:
    """How many of the `count` highest scores each lane owns; among equal scores the earlier ones win.

    scores [S] float, owners [S] int64 in [0, lanes), count int64 of no dimensions → [lanes] int64.
    """
    order = scores.sort(descending=True, stable=True).indices
    taken = (torch.arange(scores.shape[0], device=scores.device) < count).long()
    return torch.zeros(lanes, dtype=torch.int64, device=scores.device).scatter_add_(0, owners[order], taken)


def allocate_exact(q: Tensor, total: Tensor | int, live: Tensor) -> Tensor:
    """k [N] int64 of the highest objective; ties go by (position, request).

    Since q is nonincreasing in j, the optimum is the anchors and the total - N highest scores among all q_{i,j≥1}.
    q [N, W] float, live [N] bool.
    """
    if triton.usable(q):
        from dscale.kernels.triton import allocate

        if allocate.fits(q):
            return allocate.allocate_exact(q, total, live)
    lanes, width = q.shape
    extra = clip_total(total, live, width) - live.sum()
    scores = q[:, 1:].masked_fill(~live[:, None], -1.0).T.reshape(-1)  # position-major: the tie order
    owners = torch.arange(lanes, device=q.device).repeat(width - 1)
    return live.long() + count_highest(scores, owners, extra, lanes)


def allocate_seeded(q: Tensor, total: Tensor | int, live: Tensor) -> Tensor:
    """k [N] int64 of the paper's Algorithm 1: from k⁰ grow the likeliest next slots or drop the unlikeliest last ones.

    The turns of the paper, one slot each, ties to the lowest request, visit scores in sorted order because q is
    nonincreasing; so all turns together are one selection: growth takes the highest q_{i,j≥k⁰_i} in order (request,
    position), shrinking the lowest q_{i,1≤j<k⁰_i} in order (request, position from the end).
    """
    if triton.usable(q):
        from dscale.kernels.triton import allocate

        if allocate.fits(q):
            return allocate.allocate_seeded(q, total, live)
    lanes, width = q.shape
    start = initial_windows(q) * live
    missing = clip_total(total, live, width) - start.sum()
    position = torch.arange(width, device=q.device)
    owners = torch.arange(lanes, device=q.device).repeat_interleave(width)
    can_grow = (position >= start[:, None]) & live[:, None]
    can_drop = (position >= 1) & (position < start[:, None])
    grown = count_highest(q.masked_fill(~can_grow, -1.0).reshape(-1), owners, missing, lanes)
    lowest = (-q).masked_fill(~can_drop, -2.0).flip(1).reshape(-1)
    return start + grown - count_highest(lowest, owners, -missing, lanes)
