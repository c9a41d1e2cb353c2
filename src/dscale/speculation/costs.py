"""What a step costs: seconds by the number of verified and of drafted rows, measured on this machine, then corrected by
the steps that really ran. `auto` weighs this against expected acceptance (dscale.md §5)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from dscale.speculation.step_times import StepTimes
from dscale.speculation.workspace import StepShape

Measure = Callable[[int], float]  # rows → seconds
Numbers = np.ndarray


class Curve:
    """Seconds by rows: measured at powers of two when first needed, read by linear interpolation."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self._rows = np.array([1.0])
        self._seconds = np.zeros(0)

    def at(self, rows: Numbers | float) -> Numbers:
        """Seconds for these numbers of rows, each at least 1."""
        top = rows if isinstance(rows, float) else np.max(rows)
        if not len(self._seconds) or self._rows[-1] < top:
            self._extend(float(top))
        return np.asarray(np.interp(rows, self._rows, self._seconds))

    def _extend(self, top: float) -> None:
        sizes = 2 ** np.arange(int(np.ceil(np.log2(top))) + 1)
        fresh = [self.measure(int(size)) for size in sizes[len(self._seconds) :]]
        self._rows, self._seconds = sizes.astype(float), np.concatenate([self._seconds, fresh])


class Costs(ABC):
    """Expected seconds of a step."""

    @abstractmethod
    def times(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        """Seconds of a step of `live` requests that drafts blocks of `width` (1: none) and verifies `rows` rows."""

    @abstractmethod
    def observe(self, live: int, shape: StepShape, seconds: float) -> None:
        """Take in the time of a step that ran."""


class StepCosts(Costs):
    """The two curves plus what observed steps took beyond them.

    The rest (attention over the context, sampling, Python) hardly depends on the rows, so it is added, not multiplied;
    it is kept for drafted and for plain steps and for each number of requests.
    """

    SMOOTHING = 0.1  # weight of a new observation

    def __init__(self, verify: Measure, draft: Measure) -> None:
        self.verify, self.draft = Curve(verify), Curve(draft)
        self._rest: dict[tuple[bool, int], float] = {}

    def times(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        return np.maximum(self._curves(live, width, rows) + self.rest(live, width > 1), 1e-6)

    def _curves(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        seconds = self.verify.at(rows)
        return seconds + self.draft.at(float(live * width)) if width > 1 else seconds

    def rest(self, live: int, drafted: bool) -> float:
        """Seconds beyond the curves, by the nearest number of requests seen; of the other kind of step if need be."""
        same = [key for key in self._rest if key[0] == drafted] or list(self._rest)
        return self._rest[min(same, key=lambda key: abs(key[1] - live))] if same else 0.0

    def observe(self, live: int, shape: StepShape, seconds: float) -> None:
        """Take in the time of a step that ran. A step far slower than believed (a hiccup) counts only a little."""
        drafted = shape.width > 1
        curves = float(self._curves(live, shape.width, float(shape.rows)))
        before = self.rest(live, drafted)
        seen = min(seconds, 2.0 * (curves + max(before, 0.0))) - curves
        known = (drafted, live) in self._rest
        self._rest[(drafted, live)] = before + (self.SMOOTHING if known else 0.5) * (seen - before)


class ReplayCosts(Costs):
    """Of captured steps: timed replays, corrected by the steps that ran (step_times.py). Each bucket of
    requests has its own sizes, and costs what it costs however many of its lanes are live.

    replay: (requests, shape) → seconds of the captured step that serves them; shapes: (requests) → those that exist.
    """

    def __init__(
        self, replay: Callable[[int, StepShape], float], shapes: Callable[[int], list[StepShape]] | None = None
    ) -> None:
        self.replay, self.shapes = replay, shapes
        self._sizes: dict[int, tuple[StepTimes, list[tuple[int, float]]]] = {}  # by requests; widths and shares
        self._known: dict[tuple[float, ...], StepTimes] = {}  # by replays: requests of one bucket share them
        self._latest: StepTimes | None = None  # that a step was observed of

    def times(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        times, sizes = self._of(live)
        same = [place for place, (wide, _) in enumerate(sizes) if wide == width]
        shares = [sizes[place][1] for place in same]
        return np.maximum(np.interp(np.asarray(rows) / live, shares, times.seconds()[same]), 1e-6)

    def alike(self, live: int, other: int) -> bool:
        """Whether the same captured steps serve so many requests."""
        return self._of(live)[0] is self._of(other)[0]

    def doubts(self, live: int, shape: StepShape) -> Numbers:
        """Standard deviation of the time of each size against that of `shape`, as a share of it: [S], by width and
        share."""
        times, sizes = self._of(live)
        return times.doubts(_nearest(sizes, shape))

    def observe(self, live: int, shape: StepShape, seconds: float) -> None:
        times, sizes = self._of(live)
        times.observe(live, _nearest(sizes, shape), seconds)
        self._latest = times

    def _of(self, live: int) -> tuple[StepTimes, list[tuple[int, float]]]:
        if live not in self._sizes:
            assert self.shapes is not None, "the policy that uses these costs says which shapes there are"
            shapes = sorted(self.shapes(live), key=lambda shape: (shape.width, shape.share))
            replays = tuple(self.replay(live, shape) for shape in shapes)
            if replays not in self._known:
                shared = None if self._latest is None else self._latest.shared
                slots = np.array([shape.share for shape in shapes])
                self._known[replays] = StepTimes(np.array(replays), slots, shared)
            self._sizes[live] = self._known[replays], [(shape.width, shape.share) for shape in shapes]
        return self._sizes[live]


def _nearest(sizes: list[tuple[int, float]], shape: StepShape) -> int:
    """The place of a shape among (width, share)."""
    return min(range(len(sizes)), key=lambda at: (sizes[at][0] != shape.width, abs(sizes[at][1] - shape.share)))
