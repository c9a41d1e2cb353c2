"""`auto`: at each step the block width and the budget that promise the most committed tokens per second, or no
speculation at all (dscale.md §5).

    speed(w, M) = (N + Σ top-(M-N) of q) / t(N, w, M)        w: rows drafted a request, M: rows verified in all
    speed(off)  = N / t(N, 1, N)

Before the draft, width and budget are chosen by the survival rows q of recent drafts, so no step waits for its own
draft to be sized. Where nothing is gained by fixed sizes (on a CPU), the budget is chosen again once q is known: a slot
is verified while it promises more tokens a second than the step as a whole, the rule that maximises the long-run rate.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dscale.models.decoder import Target
from dscale.speculation.budget import allocate_exact
from dscale.speculation.costs import StepCosts
from dscale.speculation.policies import Draft, Policy, Scorer, StepOutcome
from dscale.speculation.workspace import StepShape

WIDTHS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32)
PRIOR_SURVIVAL = 0.7  # per position, before anything was drafted
RECENT = 48  # survival rows that stand for the text being served
CALIBRATION_MEMORY = 0.99  # share of past drafts that one step keeps
PRIOR_DRAFTS = 20.0  # drafts accepted as predicted, before any were
REVIEW_EVERY = 8  # steps between choices of width and budget
PROBE_EVERY = 128  # steps after which a wider block is drafted, to learn whether the text became easier


class RecentDrafts:
    """The latest survival rows, each as long as its block was; what lies beyond a narrow block is extrapolated by the
    pass rate that was last seen at that position."""

    def __init__(self, width: int) -> None:
        prior = np.cumprod(np.full((1, width - 1), PRIOR_SURVIVAL))
        self._rows = prior[None, :]
        self._rates = np.full(width - 1, PRIOR_SURVIVAL)
        self._known = 0  # positions whose rate was seen at least once

    def add(self, survival: np.ndarray) -> None:
        """Rows [N, D] of one step."""
        depth = survival.shape[1]
        before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
        seen = survival.sum(0) / np.maximum(before.sum(0), 1e-9)
        weight = np.where(np.arange(depth) < self._known, 0.1, 1.0)
        self._rates[:depth] += weight * (seen - self._rates[:depth])
        self._known = max(self._known, depth)
        self._rates[self._known :] = self._rates[self._known - 1]
        padded = np.full((len(survival), len(self._rates)), np.nan)
        padded[:, :depth] = survival
        self._rows = np.concatenate([self._rows, padded])[-RECENT:]

    def table(self) -> np.ndarray:
        """Survival rows [P, W-1], P at most RECENT."""
        rows = self._rows.copy()
        for j in range(1, rows.shape[1]):
            missing = np.isnan(rows[:, j])
            rows[missing, j] = rows[missing, j - 1] * self._rates[j]
        return rows


class Auto(Policy):
    """Chooses width and budget by measured step times and recent acceptance.

    full scores blocks of the drafter's whole width, narrow the others. resizes: the budget may follow each draft.
    """

    name = "auto"

    def __init__(self, full: Scorer, narrow: Scorer, width: int, costs: StepCosts, resizes: bool) -> None:
        self.full, self.narrow, self.width, self.costs, self.resizes = full, narrow, width, costs, resizes
        self.widths = [one for one in WIDTHS if one < width] + [width]
        self._recent = RecentDrafts(width)
        self._trust = {one: np.array([PRIOR_DRAFTS, PRIOR_DRAFTS]) for one in (full, narrow)}  # accepted, predicted
        self._choice = StepShape(width=1, head=0, rows=1)
        self._speed = 0.0  # tokens a second that the choice promises
        self._live, self._age, self._unprobed = 0, 0, 0

    def shape(self, live: int) -> StepShape:
        if live != self._live or self._age >= REVIEW_EVERY:
            self._review(live)
        self._age += 1
        if self._unprobed < PROBE_EVERY or self._choice.width == self.width:
            return self._choice
        wider = 4 if self._choice.width == 1 else self.width  # a cheap look first
        width = min(wider, self.width)
        return StepShape(width=width, head=width - 1, rows=live * min(width, 3))

    def _review(self, live: int) -> None:
        """Choose width and budget for `live` requests from recent drafts."""
        self._live, self._age = live, 0
        survival = self._recent.table()
        best = StepShape(width=1, head=0, rows=live)
        best_speed = live / float(self.costs.times(live, 1, float(live)))
        for width in self.widths:
            slots, tokens = self._expected(width, survival[:, : width - 1])
            rows = np.round(slots * live)
            speeds = live * tokens / self.costs.times(live, width, rows)
            top = int(speeds.argmax())
            if speeds[top] > best_speed:
                best, best_speed = StepShape(width=width, head=width - 1, rows=int(rows[top])), float(speeds[top])
        self._choice, self._speed = best, best_speed

    def _expected(self, width: int, survival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots a request (1 … width) and the tokens a request emits with them, from survival rows [P, width-1]."""
        gains = np.sort(survival, axis=None)[::-1].cumsum()
        taken = np.unique(np.linspace(0, len(gains), 61).astype(int))
        gained = np.concatenate([[0.0], gains])[taken] * self._calibration(width)
        return 1 + taken / len(survival), 1 + gained / len(survival)

    def _scorer(self, width: int) -> Scorer:
        return self.full if width == self.width else self.narrow

    def _calibration(self, width: int) -> float:
        """Accepted over predicted drafts, lately."""
        accepted, predicted = self._trust[self._scorer(width)]
        return float(accepted / predicted)

    def read_draft(self, hidden: Tensor, target: Target, live: Tensor, initial: Tensor) -> Draft:
        return self._scorer(hidden.shape[1] + 1).read(hidden, target, live, initial)

    def resize(self, draft: Draft, shape: StepShape, live: Tensor) -> StepShape:
        if not self.resizes or draft.survival is None:
            return shape
        lanes = draft.survival.shape[0]
        scores = np.sort(draft.survival[:, 1:].numpy(), axis=None)[::-1]
        tokens = np.concatenate([[0.0], scores.cumsum()]) * self._calibration(shape.width)
        rows = lanes + np.arange(len(tokens))
        seconds = self.costs.times(lanes, shape.width, rows)
        return replace(shape, rows=int(rows[(tokens - self._speed * seconds).argmax()]))

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        if draft.survival is None:
            return live.long()
        return allocate_exact(draft.survival, shape.rows, live)

    def observe(self, outcome: StepOutcome) -> None:
        shape = outcome.shape
        self.costs.observe(len(outcome.slots), shape, outcome.seconds)
        looked = shape.width > self._choice.width or shape.width == self.width
        self._unprobed = 0 if looked else self._unprobed + 1
        if outcome.draft.survival is None:
            return
        survival = outcome.draft.survival.cpu()
        self._recent.add(survival[:, 1:].numpy())
        self._calibrate(survival, outcome)
        self._scorer(shape.width).observe(outcome)

    def _calibrate(self, survival: Tensor, outcome: StepOutcome) -> None:
        column = torch.arange(survival.shape[1])
        verified = (column[None, :] >= 1) & (column[None, :] < torch.tensor(outcome.slots)[:, None])
        trust = self._trust[self._scorer(outcome.shape.width)]
        trust *= CALIBRATION_MEMORY
        trust += (float(sum(outcome.accepted)), float((survival * verified).sum()))
