"""What a step costs: seconds by the number of verified and of drafted rows, measured on this machine, then corrected by
the steps that really ran. `auto` weighs this against expected acceptance (dscale.md §5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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


class StepCosts:
    """Expected seconds of a step: the two curves plus what observed steps took beyond them.

    The rest (attention over the context, sampling, Python) hardly depends on the rows, so it is added, not multiplied;
    it is kept for drafted and for plain steps and for each number of requests.
    """

    SMOOTHING = 0.1  # weight of a new observation

    def __init__(self, verify: Measure, draft: Measure) -> None:
        self.verify, self.draft = Curve(verify), Curve(draft)
        self._rest: dict[tuple[bool, int], float] = {}

    def times(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        """Seconds of a step of `live` requests that drafts blocks of `width` (1: none) and verifies `rows` rows."""
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


class ReplayCosts(StepCosts):
    """StepCosts whose curves are timed replays of captured steps: each bucket of requests has its own, and costs what
    it costs however many of its lanes are live. Besides the rest that all sizes share, each size keeps what its steps
    took beyond its replay, for contexts are longer in earnest and lie apart.

    replay: (requests, shape) → seconds of the captured step that serves them; shapes: (requests) → those that exist.
    """

    SETTLED = 32  # observed steps after which what is left is a size's own
    OWN = 0.02  # least weight of a new observation in it

    def __init__(
        self, replay: Callable[[int, StepShape], float], shapes: Callable[[int], list[StepShape]] | None = None
    ) -> None:
        super().__init__(_unknown, _unknown)
        self.replay, self.shapes = replay, shapes
        self._tables: dict[tuple[int, int], Numbers] = {}  # by requests and width: shares ascending, seconds
        self._own: dict[tuple[int, int], Numbers] = {}  # by magnitude of requests and width: seconds, steps by share
        self._observed = 0

    def _curves(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        shares, seconds = self._table(live, width)
        own, _ = self._own_of(live, width)
        return np.asarray(np.interp(np.asarray(rows) / live, shares, seconds + own))

    def _table(self, live: int, width: int) -> Numbers:
        if (live, width) not in self._tables:
            assert self.shapes is not None, "the policy that uses these costs says which shapes there are"
            timed = [(shape.share, self.replay(live, shape)) for shape in self.shapes(live) if shape.width == width]
            self._tables[live, width] = np.array(sorted(timed)).T
        return self._tables[live, width]

    def _own_of(self, live: int, width: int) -> Numbers:
        key = live.bit_length(), width
        if key not in self._own:
            self._own[key] = np.zeros_like(self._table(live, width))
        return self._own[key]

    def observe(self, live: int, shape: StepShape, seconds: float) -> None:
        believed = float(self.times(live, shape.width, float(shape.rows)))
        super().observe(live, shape, seconds)
        self._observed += 1
        if self._observed > self.SETTLED:
            own, steps = self._own_of(live, shape.width)
            size = int(np.abs(self._table(live, shape.width)[0] - shape.share).argmin())
            steps[size] += 1
            own[size] += max(1 / (steps[size] + 3), self.OWN) * (min(seconds, 2 * believed) - believed)


def _unknown(rows: int) -> float:
    raise AssertionError("captured steps are timed whole")
