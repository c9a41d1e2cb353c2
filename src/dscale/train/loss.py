"""The drafter's loss: cross-entropy over the vocabulary, later slots of a block weighted down.

    loss = Σ w_r · (logsumexp(z_r) - z_r[label_r]) / Σ w_r,    z = hidden · headᵀ,    w = exp(-(k - 1) / γ) for slot k

The [rows, V] logits never exist at once: rows go through in chunks, and each chunk's gradient with respect to its
hidden rows is made right there (the head is frozen, so nothing else is needed). The weights of the
mean are known before, so its gradient is too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def slot_weights(supervised: Tensor, gamma: float) -> Tensor:
    """supervised bool [..., W-1] → weights float32 of the same shape; slot 1 weighs 1."""
    slot = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    return supervised * torch.exp(-slot / gamma)


def chunk_terms(hidden: Tensor, label: Tensor, weight: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: hidden [C, H], label [C], weight [C], head [V, H] → (Σ w·loss, gradient [C, H], correct [C])."""
    logits = hidden @ head.t()
    wide = logits.float()
    total = wide.logsumexp(-1)
    picked = wide.gather(1, label[:, None]).squeeze(1)
    column = torch.arange(head.shape[0], device=hidden.device)
    delta = (wide - total[:, None]).exp() - (column[None, :] == label[:, None]).float()
    slope = (delta * weight[:, None]).to(hidden.dtype)
    return ((total - picked) * weight).sum(), slope @ head, picked >= wide.amax(-1)


class ChunkedCrossEntropy(torch.autograd.Function):
    """(hidden [N, H], label [N], weight [N], head [V, H]) → (Σ weight · cross-entropy, correct bool [N])."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, label: Tensor, weight: Tensor, head: Tensor, chunks: int, terms: Callable
    ) -> tuple[Tensor, Tensor]:
        losses, slopes, correct = [], [], []
        split = [part.chunk(chunks) for part in (hidden.detach().to(head.dtype), label, weight)]
        for piece in zip(*split, strict=True):
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
        return (slope * grad).to(ctx.dtype), None, None, None, None, None


def block_loss(
    hidden: Tensor,
    label: Tensor,
    weight: Tensor,
    head: Tensor,
    total_weight: Tensor,
    chunks: int = 1,
    terms: Callable = chunk_terms,
) -> tuple[Tensor, Tensor]:
    """Σ weight · cross-entropy / total_weight, and which rows were right. Shapes as in ChunkedCrossEntropy.

    total_weight: the sum of weights the mean is taken over, which may span several processes. terms: chunk_terms or a
    compiled version of it.
    """
    scaled = weight / total_weight.clamp_min(1e-6)
    return ChunkedCrossEntropy.apply(hidden, label, scaled, head, chunks, terms)
