"""What captured steps of several sizes take in earnest, learned from their replays and from the steps that ran.

    t(s) = replay(s) + unit · (shared + own(s) [+ visit(s)]) + noise        unit: mean of the replays, seconds

`shared` is what all sizes take beyond their replays (longer contexts, sampling), and wanders; `own` sets one size
apart. A size that ran a lot tells nothing of the others but by what they share, so their covariance is kept (a Kalman
filter): the first size that runs shifts all, and each further one is told apart by the first few of its own steps.

`visit` is there in a step among others of another size. Where the chip is short of power, clocks follow the load with a
delay: a single step of 8 slots among steps of 12 runs at their clocks and takes longer than one among its like, one of
12 among steps of 8 is as much too fast, and whatever runs looks better than what does not. So visits, however many,
tell no more of a size than to VISIT; only a row of its steps does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating]

# Standard deviations, as shares of `unit`
SHARED, SHARED_NEAR = 0.3, 0.05  # of `shared` beforehand; the same where it is known of other numbers of requests
OWN = 0.05  # of `own` beforehand
VISIT = 0.02  # of `visit` beforehand, and again whenever another size has settled
NOISE = 0.01  # of one step
WANDER = 0.001  # of `shared` from step to step
MOVED = 0.03  # of `shared` for a change of the requests by as much as their number
AGING = 0.0003  # of `own` from step to step: what was seen long ago is less certain
LEAST = 0.2  # of its replay: less no size is believed to take, whatever the others taught
SURPRISE = 0.02  # miss from which a step may be a hiccup: half of what is beyond counts as noise of its own
INERTIA = 8  # steps over which the clocks forget
SETTLED = 0.8  # share of a size in what they remember from which the clocks are its own: 13 steps in a row


class StepTimes:
    """Seconds by size, for one set of captured steps. replays: timed seconds [S]; shared: a first guess of it."""

    def __init__(self, replays: Numbers, shared: float | None = None) -> None:
        self.replays, self.unit = replays, float(replays.mean())
        sizes = len(replays)
        self._mean = np.zeros(1 + 2 * sizes)  # shared, own by size, visit by size
        self._mean[0] = shared or 0.0
        self._spread = np.diag([SHARED if shared is None else SHARED_NEAR, *[OWN] * sizes, *[VISIT] * sizes]) ** 2
        self._own, self._visits = slice(1, 1 + sizes), slice(1 + sizes, None)
        self._live = 0
        self._ran = np.zeros(sizes)  # share of each size in what the clocks remember
        self._settled = -1  # whose clocks are on

    @property
    def shared(self) -> float:
        """What all sizes take beyond their replays, as a share of `unit`."""
        return float(self._mean[0])

    def seconds(self) -> Numbers:
        """Expected seconds [S] of a step among its like."""
        return np.maximum(self.replays + self.unit * (self._mean[0] + self._mean[self._own]), LEAST * self.replays)

    def doubts(self, size: int) -> Numbers:
        """Standard deviation [S] of each size's time against that of `size`, as a share of the former."""
        own = self._spread[self._own, self._own]
        variance = own.diagonal() + own[size, size] - 2 * own[size]
        return self.unit * np.sqrt(np.maximum(variance, 0.0)) / np.maximum(self.seconds(), 1e-6)

    def observe(self, live: int, size: int, seconds: float) -> None:
        """A step of this size, with `live` requests, took so long."""
        self._age(live)
        parts = [0, 1 + size] if self._settle(size) else [0, 1 + size, 1 + len(self.replays) + size]
        reach = self._spread[parts].sum(0)
        believed = reach[parts].sum() + NOISE**2
        miss = seconds / self.unit - self.replays[size] / self.unit - self._mean[parts].sum()
        beyond = max(abs(miss) - SURPRISE, 0.0) / 2
        gain = reach / (believed + beyond**2)
        self._mean += gain * miss
        self._spread -= np.outer(gain, reach)
        self._spread[0, 0] += min(beyond, 1.0) ** 2  # no hiccup if the next step is as slow: then all have become so

    def _settle(self, size: int) -> bool:
        """Whether the clocks are those of this size by now."""
        self._ran *= 1 - 1 / INERTIA
        self._ran[size] += 1 / INERTIA
        if self._ran[size] < SETTLED:
            return False
        if self._settled != size:
            self._settled = size
            visits = self._visits
            self._mean[visits] = 0.0
            self._spread[visits], self._spread[:, visits] = 0.0, 0.0
            self._spread[visits, visits] = np.diag([VISIT**2] * len(self.replays))
        return True

    def _age(self, live: int) -> None:
        moved = MOVED * abs(live - self._live) / max(live, self._live) if self._live else 0.0
        self._live = live
        self._spread[0, 0] = min(self._spread[0, 0] + WANDER**2 + moved**2, max(self._spread[0, 0], SHARED**2))
        own = self._spread.diagonal()[self._own]
        places = 1 + np.flatnonzero(own < OWN**2)
        self._spread[places, places] += AGING**2
