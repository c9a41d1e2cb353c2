"""What the acceptance predictor sees of a draft block, before anything is verified (dscale.md §2, Features).

For each of the W-1 new positions, in draft order, 18 confidence features: highest logit; its 15 gaps to ranks 2…16;
log-probability of the top token; entropy. Then each position's hidden state projected to 64 values, then each
position's mean-centred logits projected to 32, then 25 values of batch context: the number of live requests first, the
flag of a request's first step fourth, zeros elsewhere. 1735 in all for W = 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.config import require
from dscale.kernels.top_logits import RANKS, TopLogits
from dscale.speculation.noise import random_bits

CONFIDENCE, HIDDEN, LOGITS, CONTEXT = RANKS + 2, 64, 32, 25  # features; the first three are per position
FOLD_ROWS = 16384  # rows of the head widened to float32 at once
GROUPS = ("confidence", "hidden", "logits", "context")


def feature_size(width: int, groups: tuple[str, ...] = GROUPS) -> int:
    """Length of a feature row for blocks of `width` rows: 114·(width-1) + 25 with every group."""
    per_position = {"confidence": CONFIDENCE, "hidden": HIDDEN, "logits": LOGITS}
    size = sum(count * (width - 1) for group, count in per_position.items() if group in groups)
    return size + (CONTEXT if "context" in groups else 0)


def sign_matrix(rows: int, columns: int, seed: int, stream: int) -> Tensor:
    """A fixed random matrix of ±1 [rows, columns] float32: the same on any machine and torch version.

    Random signs preserve distances as well as normal numbers do (Achlioptas 2003).
    """
    keys = torch.full((1,), seed, dtype=torch.int64), torch.full((1,), stream, dtype=torch.int64)
    bits = random_bits(*keys, torch.arange(rows * columns))
    return ((bits.view(rows, columns) >> 40) & 1).float().mul_(2.0).sub_(1.0)


@dataclass(frozen=True)
class FeatureProjections:
    """Fixed projections of a drafter's hidden state, joined: matrix [H, 64 + 32] float32, hidden then logits."""

    seed: int
    matrix: Tensor

    @classmethod
    def build(
        cls,
        head_weight: Tensor,
        seed: int,
        shard: tuple[int, int] | None = None,
        total: Callable[[Tensor], Tensor] = lambda part: part,
    ) -> FeatureProjections:
        """From the LM head E [V, H] (dscale.md §2): logits fold into Eᵀ(P - mean_rows(P)), so V is never touched again.

        Not valid for a head with a bias or a soft-cap. P [V, 32] is made anew from the seed and never stored.
        shard: head_weight holds only rows from the first on, of that many in all; total then adds up the ranks' parts.
        """
        rows, size = head_weight.shape
        first, vocab = shard or (0, rows)
        device = head_weight.device
        hidden = sign_matrix(size, HIDDEN, seed, stream=0).to(device) / math.sqrt(size)
        p = logit_projection(vocab, seed).to(device)
        centred = (p - p.mean(0, keepdim=True))[first : first + rows].split(FOLD_ROWS)
        heads = head_weight.detach().split(FOLD_ROWS)
        folded = torch.stack([head.float().T @ part for head, part in zip(heads, centred, strict=True)]).sum(0)
        return cls(seed, torch.cat([hidden, total(folded)], dim=1))

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden [..., H] after the final norm → ([..., 64], [..., 32]) float32."""
        both = hidden.float() @ self.matrix
        return both[..., :HIDDEN], both[..., HIDDEN:]


def logit_projection(vocab: int, seed: int) -> Tensor:
    """P [V, 32] float32 on the CPU, entries ±1/√V."""
    return sign_matrix(vocab, LOGITS, seed, stream=1) / math.sqrt(vocab)


def confidence_features(top: TopLogits) -> Tensor:
    """18 values for each position: top of shape [..., 16] → [..., 18] float32."""
    highest, others = top.values[..., :1], top.values[..., 1:]
    return torch.cat([highest, highest - others, top.log_probability[..., None], top.entropy[..., None]], dim=-1)


def batch_context(lanes: Tensor | int, initial: Tensor) -> Tensor:
    """25 values for each request: [N, 25] float32 from the number of live requests and the first-step flags [N]."""
    context = torch.zeros(initial.shape[0], CONTEXT, device=initial.device)
    context[:, 0] = lanes
    context[:, 3] = initial.float()
    return context


def draft_features(
    top: TopLogits,
    hidden: Tensor | None,
    lanes: Tensor | int,
    initial: Tensor,
    projections: FeatureProjections | None,
    groups: tuple[str, ...] = GROUPS,
) -> Tensor:
    """Feature rows [N, F] float32 of N draft blocks; F = feature_size(W, groups).

    top: of the drafter's logits at the new positions, values [N, W-1, 16]. hidden [N, W-1, H]: the drafter's rows that
    those logits came from. lanes: live requests, an int or a tensor of no dimensions. initial [N] bool: the request's
    first step after its prompt. hidden and projections may be None when groups has neither "hidden" nor "logits".
    """
    parts = []
    if "confidence" in groups:
        parts.append(confidence_features(top).flatten(1))
    if "hidden" in groups or "logits" in groups:
        require(
            hidden is not None and projections is not None, f"features: {groups} need hidden states and projections"
        )
        assert hidden is not None
        assert projections is not None
        of_hidden, of_logits = projections.project(hidden)
        parts += [of_hidden.flatten(1)] * ("hidden" in groups) + [of_logits.flatten(1)] * ("logits" in groups)
    if "context" in groups:
        parts.append(batch_context(lanes, initial))
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class FeatureReader:
    """Feature rows as they are recorded: float16, of chosen groups.

    projections may be None when groups has neither "hidden" nor "logits".
    """

    groups: tuple[str, ...]
    projections: FeatureProjections | None

    @classmethod
    def build(cls, groups: tuple[str, ...], head_weight: Tensor, seed: int) -> FeatureReader:
        """A reader for a target's head; projections are made where a group asks for them."""
        projects = "hidden" in groups or "logits" in groups
        return cls(groups, FeatureProjections.build(head_weight, seed) if projects else None)

    def read(self, top: TopLogits, hidden: Tensor, lanes: Tensor | int, initial: Tensor) -> Tensor:
        """Features float16 [N, F]; arguments as of draft_features."""
        made = draft_features(top, hidden, lanes, initial, self.projections, self.groups)
        largest = torch.finfo(torch.float16).max
        return made.clamp(-largest, largest).half()
