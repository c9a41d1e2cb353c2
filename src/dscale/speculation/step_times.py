"""What captured steps of several sizes take in earnest, learned from their replays and from the steps that ran.

    t(s) = replay(s) · (1 + pull · lag(s)) + unit · (shared + spell + own(s)) + noise     unit: mean replay, seconds

`shared` is what all sizes take beyond their replays (longer contexts, sampling), and wanders; `own` sets one size
apart. A size that ran a lot tells nothing of the others but by what they share, so their covariance is kept (a Kalman
filter): the first size that runs shifts all, and each further one is told apart by the first few of its own steps.

Two things make what runs look other than it is. A `spell` lasts a few steps (after a prefill, say), so twenty steps in
a row tell less than twenty at random: on an H200 times are off by 1.3% in all, and by four fifths of that still a step
later. And `pull` is of the clocks. Where the chip is short of power they follow the load with a delay: a step of 8
slots among steps of 12 runs at their clocks and takes longer than one among its like, one of 12 among steps of 8 is too
fast, by 3% at 16 requests of 8B, and after 4 to 16 of its like no longer (docs/log.md, benchmarks/gpu_clocks.py).
lag(s) = warmth - load(s), load the logarithm of the rows verified a request, warmth its mean over the last steps. Where
nothing is drafted it is taken to be that of the fewest rows; only 8 and 12 were measured. In the long run a size takes
its time without spell and lag.

One step far off is a hiccup and counts little. After two of them in a row something has changed: for all sizes, as with
longer contexts, or for this one, so both are doubted again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating]

# Standard deviations, as shares of `unit`
SHARED, SHARED_NEAR = 0.3, 0.05  # of `shared` beforehand; the same where it is known of other numbers of requests
OWN = 0.05  # of `own` beforehand
NOISE = 0.006  # of one step
LAGGED = 0.025  # the same by lag: clocks do not follow quite as is said here
SPELL, LASTS = 0.0125, 0.8  # of `spell`, and its share that is left one step later
WANDER = 0.001  # of `shared` from step to step
MOVED = 0.03  # of `shared` for a change of the requests by as much as their number
AGING = 0.0003  # of `own` from step to step: what was seen long ago is less certain
PULL = 0.055, 0.02  # beforehand: its mean, and its standard deviation; 0 to 0.08 on H200s
PULL_AGING = 0.0002  # of `pull` from step to step: chips get warm
LEAST = 0.2  # of its replay: less no size is believed to take, whatever the others taught
SURPRISE = 0.02  # miss from which a step may be a hiccup: half of what is beyond counts as noise of its own
INERTIA = 8  # steps over which the clocks forget

# Places in what is estimated; `own` follows, by size
_SHARED, _SPELL, _PULL, _FIRST = range(4)


class StepTimes:
    """Seconds by size, for one set of captured steps. replays: timed seconds [S]; slots: rows verified a request [S];
    shared: a first guess of it."""

    def __init__(self, replays: Numbers, slots: Numbers, shared: float | None = None) -> None:
        self.replays, self.unit = replays, float(replays.mean())
        self.loads = np.log(np.maximum(slots, slots[slots > 1].min(initial=np.max(slots))))
        sizes = len(replays)
        self._mean = np.array([shared or 0.0, 0.0, PULL[0], *[0.0] * sizes])
        self._spread = np.diag([SHARED if shared is None else SHARED_NEAR, SPELL, PULL[1], *[OWN] * sizes]) ** 2
        self._variance = np.einsum("ii->i", self._spread)  # a view
        self._own = slice(_FIRST, _FIRST + sizes)
        self._live = 0
        self._warmth: float | None = None  # the load of the steps before, the latest most
        self._off = 0.0  # how far beyond SURPRISE the step before was, with its sign

    @property
    def shared(self) -> float:
        """What all sizes take beyond their replays, as a share of `unit`."""
        return float(self._mean[_SHARED])

    @property
    def pull(self) -> float:
        """By which share a step takes longer for each e-fold of rows that the steps before it had more than it."""
        return float(self._mean[_PULL])

    def seconds(self) -> Numbers:
        """Expected seconds [S] of a step among its like."""
        beyond = self.unit * (self._mean[_SHARED] + self._mean[self._own])
        return np.maximum(self.replays + beyond, LEAST * self.replays)

    def doubts(self, size: int) -> Numbers:
        """Standard deviation [S] of each size's time against that of `size`, as a share of the former."""
        own = self._spread[self._own, self._own]
        variance = own.diagonal() + own[size, size] - 2 * own[size]
        return self.unit * np.sqrt(np.maximum(variance, 0.0)) / np.maximum(self.seconds(), 1e-6)

    def observe(self, live: int, size: int, seconds: float) -> None:
        """A step of this size, with `live` requests, took so long."""
        self._age(live)
        lag, replay = self._lag(size), float(self.replays[size]) / self.unit
        parts = [_SHARED, _SPELL, _PULL, _FIRST + size]
        weights = np.array([1.0, 1.0, lag * replay, 1.0])
        reach = weights @ self._spread[parts]
        believed = weights @ reach[parts] + NOISE**2 + (LAGGED * lag) ** 2
        miss = seconds / self.unit - replay - weights @ self._mean[parts]
        beyond = max(abs(miss) - SURPRISE, 0.0) / 2
        gain = reach / (believed + beyond**2)
        self._mean += gain * miss
        self._spread -= np.outer(gain, reach)
        self._doubt_again(size, beyond, miss)

    def _doubt_again(self, size: int, beyond: float, miss: float) -> None:
        """After a step that was off by `beyond` more than a surprise."""
        again = beyond * miss * self._off > 0
        self._off = miss if beyond else 0.0
        variance, own = self._variance, _FIRST + size
        variance[_SHARED] += min(beyond, 1.0) ** 2
        if again:
            variance[own] = max(variance[own], min(variance[own] + beyond**2, OWN**2))

    def _lag(self, size: int) -> float:
        """By how much the steps before were larger, as the logarithm of their rows; this one counts from now on."""
        load = float(self.loads[size])
        lag = 0.0 if self._warmth is None else self._warmth - load
        self._warmth = load + lag * (1 - 1 / INERTIA)
        return lag

    def _age(self, live: int) -> None:
        moved = MOVED * abs(live - self._live) / max(live, self._live) if self._live else 0.0
        self._live = live
        spread, variance = self._spread, self._variance
        self._mean[_SPELL] *= LASTS
        spread[_SPELL] *= LASTS
        spread[:, _SPELL] *= LASTS
        variance[_SPELL] += (1 - LASTS**2) * SPELL**2
        variance[_SHARED] = min(variance[_SHARED] + WANDER**2 + moved**2, max(variance[_SHARED], SHARED**2))
        own = variance[self._own]
        own[own < OWN**2] += AGING**2
        if variance[_PULL] < PULL[1] ** 2:
            variance[_PULL] += PULL_AGING**2
