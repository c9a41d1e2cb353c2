"""Survival of drafts from the draft's own top-1 logit, learned while serving (dscale.md §6, policy `confidence`).

    P(draft j passes | all before it passed) = σ(b_j + a · log(p_j / (1 - p_j)) + c · (x_j - 16) / 16)
    q_j = Π_{t ≤ j} P(draft t passes | …)

x_j is the draft's highest logit and p_j its probability. On day one b = 0, a = 1, c = 0: a draft passes as often as
the drafter believes in it. Each step refits by one Newton step on what was observed, the curvature of past steps
standing for their data and fading slowly, so the fit follows the text that is served.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.kernels.top_logits import TopLogits

MEMORY = 0.999  # share of the past's weight that one step keeps
LOGIT_SCALE = 16.0
MAX_ODDS = 8.0  # bound of the log-odds
PRIOR = 10.0  # curvature of the day-one parameters, in units of the features squared
FIT_STEPS, FIT_ROWS = 12, 8192  # Newton steps of a fit to records, and records at once


@dataclass
class ConfidenceModel:
    """weight [W+1] float32: biases b_1 … b_{W-1}, then a, c. curvature [W+1, W+1] float32: what past data weighs."""

    weight: Tensor
    curvature: Tensor

    @classmethod
    def day_one(cls, width: int, device: torch.device | str = "cpu") -> ConfidenceModel:
        """Parameters before anything was observed, for blocks of `width` rows."""
        weight = torch.zeros(width + 1, device=device)
        weight[-2] = 1.0
        return cls(weight, PRIOR * torch.eye(width + 1, device=device))

    @property
    def width(self) -> int:
        """W, rows of a block."""
        return self.weight.shape[0] - 1

    def survival(self, top: TopLogits) -> Tensor:
        """q [N, D+1] float32 of draft blocks, 1 first and nonincreasing; top.values [N, D, 16], D < W. Reads nothing
        back."""
        passes = torch.sigmoid(self._logits(*signals(top)))
        return torch.cat([torch.ones_like(passes[:, :1]), passes.cumprod(-1)], dim=-1)

    @torch.no_grad()
    def observe(self, top: TopLogits, accepted: Tensor, slots: Tensor) -> None:
        """Learn from a step, in place: accepted [N] drafts of slots [N] verified rows of the blocks in `top`.

        Of a request only drafts that the walk reached say something: those accepted and, if rows were left, the next.
        """
        curvature, slope = self._evidence(top, accepted, slots)
        self.curvature.mul_(MEMORY).add_(curvature)
        self.curvature.diagonal().add_((1 - MEMORY) * PRIOR)  # the prior does not fade
        self.weight.add_(torch.linalg.solve(self.curvature, slope).clamp_(-1.0, 1.0))

    @classmethod
    @torch.no_grad()
    def fitted(cls, width: int, top: TopLogits, accepted: Tensor, slots: Tensor) -> ConfidenceModel:
        """Fitted to records that all weigh the same, by Newton steps from day one; arguments as of `observe`."""
        model = cls.day_one(width, top.values.device)
        prior, start = model.curvature.clone(), model.weight.clone()
        rows = torch.arange(len(accepted), device=accepted.device).split(FIT_ROWS)
        for _ in range(FIT_STEPS):
            model.curvature = prior.clone()
            slope = prior @ (start - model.weight)
            for part in rows:
                curvature, piece = model._evidence(top.select(part), accepted[part], slots[part])
                model.curvature += curvature
                slope += piece
            model.weight += torch.linalg.solve(model.curvature, slope).clamp_(-1.0, 1.0)
        return model

    def _evidence(self, top: TopLogits, accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Curvature [W+1, W+1] and slope [W+1] of the log-likelihood of what was observed."""
        position = torch.arange(1, top.values.shape[1] + 1, device=self.weight.device)
        passed = position <= accepted[:, None]
        seen = (position <= accepted[:, None] + 1) & (position < slots[:, None])
        odds, logit = signals(top)
        chance = torch.sigmoid(self._logits(odds, logit))
        error = (passed.float() - chance) * seen
        rows = self._design(odds, logit)
        gain = (chance * (1 - chance)).clamp_min(1e-3) * seen
        return torch.einsum("njf,nj,njg->fg", rows, gain, rows), torch.einsum("njf,nj->f", rows, error)

    def _logits(self, odds: Tensor, logit: Tensor) -> Tensor:
        return self.weight[: odds.shape[1]] + self.weight[-2] * odds + self.weight[-1] * logit

    def _design(self, odds: Tensor, logit: Tensor) -> Tensor:
        """What multiplies the weights: [N, D, W+1] for blocks of D drafts."""
        positions = torch.eye(self.width - 1, device=odds.device)[: odds.shape[1]].expand(odds.shape[0], -1, -1)
        return torch.cat([positions, odds[..., None], logit[..., None]], dim=-1)


def signals(top: TopLogits) -> tuple[Tensor, Tensor]:
    """Log-odds and scaled logit of the top token of each position, both [N, W-1]."""
    log_p = top.log_probability.clamp(max=-1e-6)
    odds = (log_p - torch.log(-torch.expm1(log_p))).clamp(-MAX_ODDS, MAX_ODDS)
    return odds, top.values[..., 0] / LOGIT_SCALE - 1.0
