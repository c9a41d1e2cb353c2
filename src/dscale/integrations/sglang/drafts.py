"""What the drafter's rows say on SGLang: the best logits over a head that may be parted among ranks, and q from them.

Every rank holds some rows of the LM head and makes its own top 16, log-sum-exp ℓ_r and entropy H_r. Together, with
p_r = exp(ℓ_r - ℓ):
    top 16 = the best of all ranks' tops        ℓ = log Σ_r exp(ℓ_r)        H = ℓ - Σ_r p_r · (ℓ_r - H_r)
since ℓ_r - H_r is the mean logit of a rank's part. 34 numbers a row travel, not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dscale.config import require
from dscale.integrations.sglang.settings import Settings
from dscale.kernels.top_logits import RANKS, TopLogits, top_logits
from dscale.speculation.budget import allocate_exact, allocate_seeded
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.features import FeatureProjections
from dscale.speculation.policies import Draft
from dscale.speculation.predictor import Predictor, random_predictor
from dscale.speculation.survival import predicted_survival

Gather = Callable[[Tensor], Tensor]  # a rank's [R, C] → [ranks, R, C]


@dataclass(frozen=True)
class Head:
    """This rank's rows of the target's LM head: weight [rows, H], of tokens first … first + rows - 1 of `vocab`."""

    weight: Tensor
    first: int
    vocab: int
    gather: Gather | None = None  # None: one rank

    @classmethod
    def of(cls, lm_head: Any, vocab: int, group: Any) -> Head:
        """From SGLang's vocabulary-parallel head, without the rows that only fill it up."""
        shard = getattr(lm_head, "shard_indices", None)
        require(shard is None or shard.num_added_elements == 0, "DSCALE: tokens added to the vocabulary (LoRA)")
        rows = lm_head.weight.shape[0] if shard is None else shard.num_org_elements
        first = 0 if shard is None else shard.org_vocab_start_index
        ranks = 1 if group is None else group.world_size
        require(ranks == 1 or rows >= RANKS, f"DSCALE: a rank has {rows} tokens of the vocabulary, {RANKS} are needed")

        def gather(part: Tensor) -> Tensor:
            return group.all_gather(part.contiguous(), dim=0).view(ranks, *part.shape)

        return cls(lm_head.weight[:rows], first, vocab, gather if ranks > 1 else None)

    def top(self, hidden: Tensor) -> TopLogits:
        """The best logits of rows hidden [R, H] over the whole vocabulary."""
        own = top_logits(hidden.to(self.weight.dtype) @ self.weight.T)
        if self.gather is None:
            return own
        numbers = torch.cat([own.values, own.log_sum_exp[:, None], own.entropy[:, None]], dim=1)
        return merge(self.gather(numbers), self.gather(own.ids + self.first))


def merge(numbers: Tensor, ids: Tensor) -> TopLogits:
    """One TopLogits from those of the ranks: numbers [ranks, R, 18] (values, log-sum-exp, entropy), ids [ranks, R, 16].

    Ranks are in the order of the vocabulary, so that equal logits keep the order of their ids.
    """
    values = numbers[..., :RANKS].transpose(0, 1).flatten(1)  # [R, ranks · 16]
    best = values.sort(dim=1, descending=True, stable=True)
    order = best.indices[:, :RANKS]
    part, entropy = numbers[..., RANKS], numbers[..., RANKS + 1]
    whole = part.logsumexp(0)
    mean = ((part - whole).exp() * (part - entropy)).sum(0)
    return TopLogits(best.values[:, :RANKS], ids.transpose(0, 1).flatten(1).gather(1, order), whole, whole - mean)


class Drafts:
    """Reads a draft block and shares out the rows that verify it, as the policy says."""

    def __init__(self, settings: Settings, width: int, head: Head) -> None:
        self.settings, self.width, self.head = settings, width, head
        self.rows = settings.rows(width)
        device = head.weight.device
        self.adaptive = settings.kind in ("dvl", "confidence") and self.rows < width
        self.predictor: Predictor | None = None
        self.projections: FeatureProjections | None = None
        if settings.kind == "dvl" and self.adaptive:
            self.predictor = self._load(settings.predictor).to(device)
            if self.predictor.config.projects:
                seed = self.predictor.config.projection_seed
                shard = (head.first, head.vocab)
                self.projections = FeatureProjections.build(head.weight, seed, shard, self._sum)
        self.confidence = ConfidenceModel.day_one(width, device)

    def _load(self, source: str) -> Predictor:
        if source == "random":
            return random_predictor(self.width)
        loaded = Predictor.load(source, None)
        found = loaded.config.width
        require(found == self.width, f"predictor {source}: fitted for width {found}, this drafter has {self.width}")
        return loaded

    def _sum(self, part: Tensor) -> Tensor:
        return part if self.head.gather is None else self.head.gather(part).sum(0)

    def read(self, hidden: Tensor, live: Tensor, initial: Tensor) -> Draft:
        """Drafts and q from the drafter's rows hidden [N, W-1, H]; live, initial [N] bool."""
        rows = hidden.flatten(0, 1)
        top = self.head.top(rows)
        top = TopLogits(*(part.view(*hidden.shape[:2], *part.shape[1:]) for part in vars(top).values()))
        if not self.adaptive:
            return Draft(top.ids[..., 0])
        if self.predictor is None:
            return Draft(top.ids[..., 0], self.confidence.survival(top), top)
        q = predicted_survival(self.predictor, top, hidden, live, initial, self.projections)
        return Draft(top.ids[..., 0], q, top)

    def lengths(self, draft: Draft, live: Tensor, spare: bool = False) -> Tensor:
        """k [N] int64: `rows` for each request, or as many shared out where q promises most; 0 for lanes not live,
        which there are only with spare."""
        if draft.survival is None:
            return live.long() * self.rows
        seeded = self.settings.policy.endswith(":seeded")
        total = live.sum() * self.rows if spare else self.rows * live.shape[0]
        return (allocate_seeded if seeded else allocate_exact)(draft.survival, total, live)
