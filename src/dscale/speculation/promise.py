"""What each of a few budgets promises: tokens a request and step, from the scores of the last four thousand drafts and
from what became of them. For `auto` where steps are captured (captured_choice.py).

    tokens(b) = drift(b) · (1 + Σ over groups g up to b of  factor(g) · gain(g))
    gain(g)     mean of Σ q a request over the slots that budget g grants and the one before it does not
    factor(g)   accepted over predicted drafts in such slots where they were verified, drawn to that of the group before
    drift(b)    1 + LASTING · (harmonic(b) / mean(b) - 1)

The same drafts speak of all budgets, so their differences are known far better than any budget's level. But a budget
also changes which anchors are met: a narrow one takes more of its steps where the text is hard. Were a text equally
easy for long, the stretch that drafts now cross with a tokens a step would take a / τ(b) steps of budget b, τ its
expected tokens by q; b would emit harmonic(b) = Σ a / Σ (a / τ(b)) a step, not the mean(b) of τ(b). In part it does.

A level that stops fitting what is accepted shows in the sum of the misses; then all this is forgotten and learned anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating]
Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]

PRIOR_SURVIVAL = 0.7  # per position, before anything was drafted
LASTING = 0.2  # see above; 0.1 to 0.4 between neighbouring budgets on simulated texts
KEPT = 4096  # survival rows that stand for the text being served
FRESH = 32  # rows after which a promise is more than a guess
REFRESH = 32  # steps for which a promise stands
ENOUGH = 16  # rows a step to learn from: of steps of one budget with k times as many every k-th is learned from
FACTOR_MEMORY = 0.998  # share of a group's past drafts that one step with such slots keeps, learned from or not
FIRST_PRIOR, FACTOR_PRIOR = 20.0, 100.0  # drafts of a group accepted as predicted or as in the group before
MISS_MEMORY = 128  # requests' steps over which misses are summed
ALARM = 3.0  # standard deviations, of geometric lengths, by which that sum may be off
LEAST_SPREAD = 4.0  # variance added to it: one lucky draft is no sign


class Promise:
    """Expected tokens by budget. budgets: rows a request, ascending, each at least 2; width: of the blocks."""

    def __init__(self, width: int, budgets: Sequence[int]) -> None:
        self.budgets = np.array(budgets)
        self._places = list(budgets)
        self._scores = np.zeros((KEPT, width - 1), np.float32)
        self._scores[0] = PRIOR_SURVIVAL ** np.arange(1, width)
        self._emitted = np.ones(KEPT, np.float32)  # expected tokens of these drafts as they were verified
        self._steps = 0
        self._learned: dict[int, int] = {}  # by budget: the step that was learned from last
        self._passed = np.zeros(len(budgets))  # scored steps by group since one was learned from, this one included
        self._known: dict[int, tuple[int, Numbers]] = {}  # by requests: since which step, tokens
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._lasting, self._latest = np.zeros((2, 2, len(self.budgets)))  # accepted, predicted by group
        self._begin_again()

    def _begin_again(self) -> None:
        self._lasting = self._latest.copy()
        self._next, self._filled = 0, 0
        self._miss, self._spread = 0.0, 0.0

    @property
    def unsure(self) -> bool:
        """Whether too few drafts were scored to choose by."""
        return self._filled < FRESH

    def tokens(self, live: int) -> Numbers:
        """Tokens a request by budget [B], for `live` requests that share them (as of the nearest round number)."""
        live = round_number(live)
        since, known = self._known.get(live, (-REFRESH, None))
        if known is None or self._steps >= since + REFRESH:
            gains, drift = self._expected(live)
            known = drift * (1 + (self._factors() * gains).cumsum())
            self._known[live] = self._steps, known
        return known

    def _expected(self, live: int) -> tuple[Numbers, Numbers]:
        """By the scores alone: drafts accepted a request in the slots of each group [B], and drift [B]."""
        filled = max(self._filled, 1)
        pool = min(live, filled)
        used = filled // pool * pool
        scores, emitted = self._scores[:used].reshape(used // pool, -1), self._emitted[:used]
        falling = np.sort(scores, axis=1)[:, ::-1]
        gains = _by_group(falling, pool, self.budgets).mean(0) / pool
        drift, ones = np.ones(len(gains)), np.ones(self._scores.shape[1], np.float32)
        for group, least in enumerate(falling[:, (self.budgets - 1) * pool - 1].T):  # the scores of the last slots
            granted = scores * (scores >= least[:, None])
            tokens = 1 + granted.reshape(used, -1) @ ones  # a product: sums of short rows take four times as long
            harmonic = emitted.sum() / (emitted / tokens).sum()
            drift[group] += LASTING * (harmonic / tokens.mean() - 1)
        return gains, drift

    def _factors(self) -> Numbers:
        factors, last, prior = np.empty(len(self.budgets)), 1.0, FIRST_PRIOR
        for group, (accepted, predicted) in enumerate(self._lasting.T):
            last = factors[group] = (accepted + prior * last) / (predicted + prior)
            prior = FACTOR_PRIOR
        return factors

    def observe(self, budget: int, survival: Numbers | None, verified: Ints, accepted: Ints, clean: Bools) -> bool:
        """A step at this budget: survival [N, W-1] (None: not scored); verified rows, accepted drafts, clean [N].

        Returns whether there is news: acceptance is no longer what it was and all but the latest was forgotten, or
        enough is known again.
        """
        self._steps += 1
        guessed = self.unsure
        alarmed = not guessed and self._misses(budget, accepted[clean], len(clean))
        if survival is not None:
            self._passed[: self._place(budget) + 1] += 1
            if guessed or alarmed or self._due(budget, len(clean)):
                self._keep(survival, verified)
                self._learn(budget, survival, verified, accepted, clean)
        if alarmed:
            self._begin_again()
        elif guessed and not self.unsure:
            self._known.clear()
            return True
        return alarmed

    def _place(self, budget: int) -> int:
        return bisect_left(self._places, budget)

    def _due(self, budget: int, lanes: int) -> bool:
        return self._steps - self._learned.get(budget, 0) >= lanes // ENOUGH

    def _keep(self, survival: Numbers, verified: Ints) -> None:
        rows = survival[-KEPT:]
        places = np.arange(self._next, self._next + len(rows)) % KEPT
        self._scores[places] = rows
        granted = np.arange(1, rows.shape[1] + 1) < verified[-KEPT:, None]
        self._emitted[places] = 1 + (granted * rows).sum(1)
        self._next = int(places[-1] + 1) % KEPT
        self._filled = min(self._filled + len(rows), KEPT)

    def _learn(self, budget: int, survival: Numbers, verified: Ints, accepted: Ints, clean: Bools) -> None:
        """Slots were granted in order of falling q; what was not verified or is not clean does not count."""
        lanes, drafts = survival.shape
        groups = self._place(budget) + 1
        order = np.argsort(-survival.reshape(-1))
        seen = np.where(clean, verified - 1, 0)[:, None]
        position = np.arange(drafts)
        told = np.empty((2, lanes, drafts), np.float32)
        np.less(position, np.minimum(seen, accepted[:, None]), out=told[0])
        np.multiply(position < seen, survival, out=told[1])
        new = _by_group(told.reshape(2, -1)[:, order], lanes, self.budgets[:groups])
        for past, kept in ((self._lasting, FACTOR_MEMORY), (self._latest, MISS_MEMORY / (MISS_MEMORY + lanes))):
            past[:, :groups] = kept ** self._passed[:groups] * past[:, :groups] + new
        self._passed[:groups] = 0
        self._learned[budget] = self._steps

    def _misses(self, budget: int, accepted: Ints, lanes: int) -> bool:
        """Whether acceptance is no longer what is promised."""
        expected = float(self.tokens(lanes)[self._place(budget)]) - 1
        count = len(accepted)
        kept = MISS_MEMORY / (MISS_MEMORY + count)
        self._miss = kept * self._miss + float(accepted.sum()) - count * expected
        self._spread = kept * self._spread + count * expected * (1 + expected)
        return self._miss**2 > ALARM**2 * (self._spread + LEAST_SPREAD)


def round_number(live: int) -> int:
    """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: so many requests share a budget about as `live` do."""
    step = 1 << max(live.bit_length() - 2, 0)
    return (live + step // 2) // step * step


def _by_group(values: Numbers, lanes: int, budgets: Ints) -> Numbers:
    """Sums of values [R, S], in the order in which slots are granted, over the slots of each budget's group: [R, B]."""
    ends = (budgets - 1) * lanes
    return np.add.reduceat(values[:, : ends[-1]], np.append(0, ends[:-1]), axis=1)
