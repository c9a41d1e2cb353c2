"""What a step costs: seconds by the number of verified rows and drafted blocks, measured on this machine, then refined
from the steps that really ran. `auto` weighs this curve against expected acceptance (dscale.md §5)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from dscale.speculation.workspace import StepShape

Measure = Callable[[int], float]  # rows (or blocks) → seconds


@dataclass
class Curve:
    """Seconds by size, measured lazily at powers of two and read by linear interpolation."""

    measure: Measure
    points: dict[int, float] = field(default_factory=dict)

    def at(self, size: int) -> float:
        """Seconds for this size; measures the neighbouring powers of two the first time they are needed."""
        upper = 1
        while upper < size:
            upper *= 2
        if size == upper:
            return self._point(size)
        lower = upper // 2
        share = (size - lower) / (upper - lower)
        return self._point(lower) * (1 - share) + self._point(upper) * share

    def _point(self, size: int) -> float:
        if size not in self.points:
            self.points[size] = self.measure(size)
        return self.points[size]


class StepCosts:
    """Expected seconds of a step. The curves give the first guess; observed steps of the same shape replace it."""

    SMOOTHING = 0.2  # weight of a new observation

    def __init__(self, verify: Measure, draft: Measure) -> None:
        self.verify, self.draft = Curve(verify), Curve(draft)
        self._seen: dict[tuple[int, StepShape], tuple[float, int]] = {}
        self._ratio = 1.0  # observed over predicted by the curves, over all shapes

    def predict(self, live: int, shape: StepShape) -> float:
        """Seconds of a step of this shape for `live` requests."""
        seen = self._seen.get((live, shape))
        if seen is not None and seen[1] >= 3:
            return seen[0]
        return self._curves(live, shape) * self._ratio

    def _curves(self, live: int, shape: StepShape) -> float:
        return self.verify.at(shape.rows) + (self.draft.at(live) if shape.width > 1 else 0.0)

    def observe(self, live: int, shape: StepShape, seconds: float) -> None:
        """Take in the time of a step that ran. A step far slower than believed (a hiccup) counts only a little."""
        expected = self.predict(live, shape)
        seconds = min(seconds, 2.0 * expected)
        before, count = self._seen.get((live, shape), (seconds, 0))
        weight = max(self.SMOOTHING, 1.0 / (count + 1))
        self._seen[(live, shape)] = (before + weight * (seconds - before), count + 1)
        self._ratio += 0.05 * (seconds / self._curves(live, shape) - self._ratio)

    def table(self) -> list[tuple[int, float]]:
        """Measured (rows, seconds) of verification, ascending."""
        return sorted(self.verify.points.items())


def interpolate(sizes: list[float], values: list[float], at: float) -> float:
    """Piecewise linear value; flat beyond the ends. sizes ascending."""
    index = bisect_left(sizes, at)
    if index == 0:
        return values[0]
    if index == len(sizes):
        return values[-1]
    share = (at - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
    return values[index - 1] * (1 - share) + values[index] * share
