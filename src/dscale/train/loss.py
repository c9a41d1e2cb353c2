"""The drafter's loss over the vocabulary, later slots of a block weighted down.

    loss = Σ w_r · [(1-A) · CE_r + A · distance(p_r, q_r)] / Σ w_r,            w = exp(-(k - 1) / γ) for slot k
    CE   = logsumexp(z) - z[label],   z = hidden · headᵀ,   p = softmax(z),    q = softmax(target's own logits)
    l1   = Σ_v |p_v - q_v|            its slope by z: p ∘ (s - ⟨s, p⟩),        s = sign(p - q)
    kl   = Σ_v q_v · log(q_v / p_v)   its slope by z: p - q

The [rows, V] logits of neither model ever exist at once: rows go through in chunks, and each chunk's gradient with
respect to its hidden rows is made right there (the head is frozen, so nothing else is needed). The weights of the mean
are known before, so its gradient is too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dscale.config import require
from dscale.train.recipe import DISTANCES


def slot_weights(supervised: Tensor, gamma: float) -> Tensor:
    """supervised bool [..., W-1] → weights float32 of the same shape; slot 1 weighs 1."""
    slot = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    return supervised * torch.exp(-slot / gamma)


def chunk_terms(hidden: Tensor, label: Tensor, weight: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: hidden [C, H], label [C], weight [C], head [V, H] → (Σ w·CE, gradient [C, H], correct [C])."""
    logits = hidden @ head.t()
    wide = logits.float()
    total = wide.logsumexp(-1)
    picked = wide.gather(1, label[:, None]).squeeze(1)
    column = torch.arange(head.shape[0], device=hidden.device)
    delta = (wide - total[:, None]).exp() - (column[None, :] == label[:, None]).float()
    slope = (delta * weight[:, None]).to(hidden.dtype)
    return ((total - picked) * weight).sum(), slope @ head, picked >= wide.amax(-1)


def distil_terms(
    share: float, distance: str, hidden: Tensor, label: Tensor, weight: Tensor, truth: Tensor, head: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As chunk_terms with A = share; truth [C, H]: the target's final hidden that predicts the same token."""
    wide = (hidden @ head.t()).float()
    total = wide.logsumexp(-1)
    log_p, log_q = wide - total[:, None], (truth @ head.t()).float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    picked = wide.gather(1, label[:, None]).squeeze(1)
    column = torch.arange(head.shape[0], device=hidden.device)
    delta = p - (column[None, :] == label[:, None]).float()
    if distance == "l1":
        sign = (p - q).sign()
        apart, bend = (p - q).abs().sum(-1), p * (sign - (sign * p).sum(-1, keepdim=True))
    else:
        apart, bend = (q * (log_q - log_p)).sum(-1), p - q
    slope = (((1 - share) * delta + share * bend) * weight[:, None]).to(hidden.dtype)
    loss = (((1 - share) * (total - picked) + share * apart) * weight).sum()
    return loss, slope @ head, picked >= wide.amax(-1)


def loss_terms(share: float, distance: str, compiled: bool) -> Callable:
    """The chunk function of a recipe: plain cross-entropy, or with distillation when share > 0."""
    require(distance in DISTANCES, f"train.distance: {distance!r}; allowed are {', '.join(DISTANCES)}")

    def distilled(hidden: Tensor, label: Tensor, weight: Tensor, truth: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        return distil_terms(share, distance, hidden, label, weight, truth, head)

    chosen: Callable = distilled if share else chunk_terms
    return torch.compile(chosen, dynamic=False) if compiled else chosen


class ChunkedLoss(torch.autograd.Function):
    """(hidden [N, H], label [N], weight [N], truth [N, H] or None, head [V, H]) → (Σ weight · loss, correct [N])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        label: Tensor,
        weight: Tensor,
        truth: Tensor | None,
        head: Tensor,
        chunks: int,
        terms: Callable,
    ) -> tuple[Tensor, Tensor]:
        losses, slopes, correct = [], [], []
        parts = [hidden.detach().to(head.dtype), label, weight] + ([] if truth is None else [truth.to(head.dtype)])
        for piece in zip(*(part.chunk(chunks) for part in parts), strict=True):
            loss, slope, hit = terms(*piece, head)
            losses.append(loss)
            slopes.append(slope)
            correct.append(hit)
        ctx.save_for_backward(torch.cat(slopes))
        ctx.dtype = hidden.dtype
        hits = torch.cat(correct)
        ctx.mark_non_differentiable(hits)
        return torch.stack(losses).sum(), hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return (slope * grad).to(ctx.dtype), None, None, None, None, None, None


def block_loss(
    hidden: Tensor,
    label: Tensor,
    weight: Tensor,
    head: Tensor,
    total_weight: Tensor,
    chunks: int = 1,
    terms: Callable = chunk_terms,
    truth: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ weight · loss / total_weight, and which rows were right. Shapes as in ChunkedLoss.

    total_weight: the sum of weights the mean is taken over, which may span several batches and processes. terms: of
    loss_terms; truth goes with its distillation.
    """
    scaled = weight / total_weight.clamp_min(1e-6)
    return ChunkedLoss.apply(hidden, label, scaled, truth, head, chunks, terms)
