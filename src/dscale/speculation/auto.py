"""`auto`: at each step the block width and the budget that promise the most committed tokens per second, or no
speculation at all (dscale.md §5).

    speed(w, M) = (N + Σ top-(M-N) of q) / t(N, w, M)        w: rows drafted a request, M: rows verified in all
    speed(off)  = N / t(N, 1, N)

Before the draft, width and budget are chosen by the survival rows q of recent drafts, so no step waits for its own
draft to be sized. Where steps are captured as graphs, blocks are whole and the budget is one of a few, each timed by
its own replays (captured_choice.py). Where nothing is gained by fixed sizes (on a CPU), the budget is chosen again once
q is known: a slot is verified while it promises more tokens a second than the step as a whole, the rule that maximises
the long-run rate.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from dscale.models.decoder import Target
from dscale.speculation.budget import allocate_exact
from dscale.speculation.captured_choice import CapturedChoice
from dscale.speculation.costs import Costs, ReplayCosts
from dscale.speculation.policies import Draft, Policy, Scorer, StepOutcome
from dscale.speculation.workspace import StepShape

WIDTHS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32)
PRIOR_SURVIVAL = 0.7  # per position, before anything was drafted
RECENT = 48  # survival rows that stand for the text being served
CALIBRATION_MEMORY = 0.99  # share of past drafts that one step keeps
PRIOR_DRAFTS = 20.0  # drafts accepted as predicted, before any were
REVIEW_EVERY = 8  # steps between choices of width and budget
PROBE_EVERY = 128  # steps at most until a wider block is drafted, to learn whether the text became easier
PROBE_SHARE = 0.01  # of the time that such looks may cost, where they are dear
TIE = 0.98  # the widest block that promises this share of the best speed is taken: it shows more


class RecentDrafts:
    """The latest survival rows, each as long as its block was. What lies beyond a narrow block is extrapolated: each
    position passes as often as the row's own did on average, times a factor learned whenever a wider block was drafted.
    """

    def __init__(self, width: int) -> None:
        self._rows = np.cumprod(np.full(width - 1, PRIOR_SURVIVAL))[None, :]
        self._depth = np.array([width - 1])
        self._tail = np.ones(width)  # by depth: what survived beyond it over what was extrapolated

    def add(self, survival: np.ndarray) -> None:
        """Rows [N, D] of one step."""
        count, depth = survival.shape
        for shallow in set(self._depth[self._depth < depth].tolist()):
            guess, seen = _extrapolate(survival[:, :shallow], depth).sum(), survival[:, shallow:].sum()
            self._tail[shallow] += 0.2 * (seen / max(guess, 1e-6) - self._tail[shallow])
        padded = np.zeros((count, self._rows.shape[1]))
        padded[:, :depth] = survival
        self._rows = np.concatenate([self._rows, padded])[-RECENT:]
        self._depth = np.concatenate([self._depth, np.full(count, depth)])[-RECENT:]

    def table(self) -> np.ndarray:
        """Survival rows [P, W-1], P at most RECENT."""
        rows = self._rows.copy()
        width = rows.shape[1]
        for depth in set(self._depth[self._depth < width].tolist()):
            short = self._depth == depth
            tail = _extrapolate(rows[short, :depth], width) * self._tail[depth]
            rows[short, depth:] = np.minimum(tail, rows[short, depth - 1 : depth])
        return rows


def _extrapolate(survival: np.ndarray, depth: int) -> np.ndarray:
    """Positions D … depth-1 of survival rows [N, D], at each row's own mean pass rate: [N, depth - D]."""
    last, known = survival[:, -1:], survival.shape[1]
    return last * np.maximum(last, 1e-6) ** (np.arange(1, depth - known + 1) / known)


class Auto(Policy):
    """Chooses width and budget by measured step times and recent acceptance.

    full scores blocks of the drafter's whole width, narrow the others. resizes: the budget may follow each draft.
    budgets: rows a request to choose from, in whole blocks (captured steps); (): any, in blocks of any width.
    The rest of this class is about the latter.
    """

    name = "auto"

    def __init__(
        self,
        full: Scorer,
        narrow: Scorer,
        width: int,
        costs: Costs,
        resizes: bool,
        budgets: tuple[int, ...] = (),
    ) -> None:
        self.full, self.narrow, self.width, self.costs, self.resizes = full, narrow, width, costs, resizes
        slots = sorted({min(budget, width) for budget in budgets})
        self.captured: CapturedChoice | None = None
        if budgets:
            assert isinstance(costs, ReplayCosts), "few budgets are chosen by timed replays"
            self.captured = CapturedChoice(width, slots, costs)
        self.widths = [one for one in WIDTHS if one < width] + [width]
        self._recent = RecentDrafts(width)
        self.rescored()
        self._choice = self._shape(1, 1, 1)
        self._speed = 0.0  # tokens a second that the choice promises
        self._live, self._age, self._unprobed, self._probe_after = 0, 0, 0, float(PROBE_EVERY)

    def scorers(self) -> tuple[Scorer, ...]:
        return (self.full,) if self.full is self.narrow else (self.full, self.narrow)

    def rescored(self) -> None:
        self._trust = {one: np.array([PRIOR_DRAFTS, PRIOR_DRAFTS]) for one in self.scorers()}  # accepted, predicted
        if self.captured is not None:
            self.captured.promise.forget()

    def shape(self, live: int) -> StepShape:
        if self.captured is not None:
            return self.captured.shape(live)
        if live != self._live or self._age >= REVIEW_EVERY:
            self._review(live)
        self._age += 1
        if self._choice.width == self.width or self._unprobed < self._probe_after:
            return self._choice
        return self._probe(live)

    def shapes(self, live: int) -> list[StepShape]:
        return [self._shape(live, 1, 1)] if self.captured is None else self.captured.shapes(live)

    def _shape(self, live: int, width: int, slots: float) -> StepShape:
        return StepShape(width=width, head=width - 1, rows=round(slots * live), share=slots)

    def _probe(self, live: int) -> StepShape:
        """A wider block than the choice, to see what lies beyond it; a cheap one where nothing is drafted."""
        width = min(4, self.width) if self._choice.width == 1 else self.width
        return StepShape(width=width, head=width - 1, rows=max(live * min(width, 3), self._choice.rows))

    def _review(self, live: int) -> None:
        """Choose width and budget for `live` requests from recent drafts."""
        self._live, self._age = live, 0
        survival = self._recent.table()
        options = [(live / float(self.costs.times(live, 1, float(live))), self._shape(live, 1, 1))]
        for width in self.widths:
            slots, tokens = self._expected(width, survival[:, : width - 1])
            rows = np.round(slots * live)
            speeds = live * tokens / self.costs.times(live, width, rows)
            top = int(speeds.argmax())
            options.append((float(speeds[top]), self._shape(live, width, float(slots[top]))))
        self._speed = max(speed for speed, _ in options)
        self._choice = [shape for speed, shape in options if speed >= TIE * self._speed][-1]
        probe = self._probe(live)
        chosen, probed = (float(self.costs.times(live, one.width, float(one.rows))) for one in (self._choice, probe))
        self._probe_after = min(max((probed / chosen - 1) / PROBE_SHARE, REVIEW_EVERY), PROBE_EVERY)

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
        scores = draft.survival[:, 1:].numpy().ravel()
        scores = scores if lanes == 1 else np.sort(scores)[::-1]  # one request's survival only falls
        tokens = np.concatenate([[0.0], scores.cumsum()]) * self._calibration(shape.width)
        rows = lanes + np.arange(len(tokens))
        seconds = self.costs.times(lanes, shape.width, rows)
        return replace(shape, rows=int(rows[(tokens - self._speed * seconds).argmax()]))

    def lengths(self, draft: Draft, shape: StepShape, live: Tensor) -> Tensor:
        if draft.survival is None:  # nothing drafted, or whole blocks that need no scores
            return live.long() * shape.width
        if live.shape[0] == 1:  # nothing to share
            return live.long() * shape.rows
        return allocate_exact(draft.survival, shape.budget(live), live)

    def observe(self, outcome: StepOutcome) -> None:
        shape = outcome.shape
        if self.captured is not None:
            self.captured.observe(outcome)
            self.full.observe(outcome)
            return
        self.costs.observe(len(outcome.slots), shape, outcome.seconds)
        looked = shape.width > self._choice.width or shape.width == self.width
        self._unprobed = 0 if looked else self._unprobed + 1
        if outcome.draft.survival is None:
            return
        survival = outcome.draft.survival[:, 1:].cpu().numpy()
        self._recent.add(survival)
        self._calibrate(survival, outcome)
        self._scorer(shape.width).observe(outcome)

    def _calibrate(self, survival: np.ndarray, outcome: StepOutcome) -> None:
        """survival [N, D] of the drafts; drafts past a request's slots were not verified and do not count."""
        verified = np.arange(1, survival.shape[1] + 1) < np.array(outcome.slots)[:, None]
        trust = self._trust[self._scorer(outcome.shape.width)]
        trust *= CALIBRATION_MEMORY
        trust += (sum(outcome.accepted), (survival * verified).sum())
