"""`auto`: at each step the budget that promises the most committed tokens per second, or no speculation at all.

    speed(s) = N · (1 + G(s)) / t(N, s·N rows)          G(s): accepted drafts a request expects at s slots a request
    speed(off) = N / t(N, N rows, nothing drafted)

G is a running average of Σ top-M q over past drafts, scaled by accepted over predicted; t is StepCosts. Both are known
before the step starts, so no step waits for its own draft to be sized (dscale.md §5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.models.decoder import Target
from dscale.speculation.budget import allocate_exact
from dscale.speculation.costs import StepCosts, interpolate
from dscale.speculation.policies import Draft, Policy, Scorer, StepOutcome
from dscale.speculation.workspace import StepShape

BUDGETS = (1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # slots a request
PRIOR_SURVIVAL = 0.7  # per position, before anything was drafted
PROBE_EVERY = 128  # steps without speculation before one is drafted, to learn whether the text became easier


class Auto(Policy):
    """Chooses among budgets and `off` by measured step times and running acceptance."""

    name = "auto"

    def __init__(self, scorer: Scorer, width: int, costs: StepCosts) -> None:
        self.scorer, self.width, self.costs = scorer, width, costs
        self.budgets = [s for s in BUDGETS if s < width] + [float(width)]
        prior, total = [], 0.0
        survival = [PRIOR_SURVIVAL**j for j in range(1, width)]
        for s in self.budgets:
            total = sum(survival[: int(s) - 1])
            prior.append(total)
        self.gain = prior  # expected accepted drafts per request at each budget
        self.calibration = 1.0  # accepted over predicted
        self._undrafted = 0

    def shape(self, live: int) -> StepShape:
        off = StepShape(width=1, head=0, rows=live)
        best, best_speed = off, 1.0 / self.costs.predict(live, off)
        if self._undrafted >= PROBE_EVERY:
            best_speed = 0.0
        for budget, gain in zip(self.budgets, self.gain, strict=True):
            rows = min(max(round(budget * live), live), live * self.width)
            shape = StepShape(width=self.width, head=self.width - 1, rows=rows)
            speed = (1.0 + gain * self.calibration) / self.costs.predict(live, shape)
            if speed > best_speed:
                best, best_speed = shape, speed
        return best

    def read_draft(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        return self.scorer.read(hidden, target, live, initial)

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        if shape.width == 1:
            return live.long()
        assert draft.survival is not None
        return allocate_exact(draft.survival, shape.rows, live)

    def observe(self, outcome: StepOutcome) -> None:
        live = len(outcome.slots)
        self.costs.observe(live, outcome.shape, outcome.seconds)
        self._undrafted = self._undrafted + 1 if outcome.shape.width == 1 else 0
        survival = outcome.draft.survival
        if survival is None:
            return
        self._learn_gain(survival, live)
        self._learn_calibration(survival, outcome)
        self.scorer.observe(outcome)

    def _learn_gain(self, survival: Tensor, live: int) -> None:
        """Move G towards this draft's Σ top-M q per request."""
        best = survival[:, 1:].flatten().sort(descending=True).values.cumsum(0).tolist()
        sizes = [0.0, *(float(i + 1) / live for i in range(len(best)))]
        values = [0.0, *(total / live for total in best)]
        weight = 0.1 * min(live, 4) ** 0.5
        for index, budget in enumerate(self.budgets):
            seen = interpolate(sizes, values, budget - 1)
            self.gain[index] += weight * (seen - self.gain[index])

    def _learn_calibration(self, survival: Tensor, outcome: StepOutcome) -> None:
        slots = torch.tensor(outcome.slots, device=survival.device)
        column = torch.arange(survival.shape[1], device=survival.device)
        verified = (column[None, :] >= 1) & (column[None, :] < slots[:, None])
        predicted = float((survival * verified).sum())
        if predicted > 0.1:
            ratio = min(max(sum(outcome.accepted) / predicted, 0.25), 4.0)
            self.calibration += 0.02 * min(predicted, 8.0) ** 0.5 * (ratio - self.calibration)
