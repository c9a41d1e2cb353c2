"""What a step costs: seconds by the number of verified and of drafted rows, measured on this machine, then corrected by
the steps that really ran. `auto` weighs this against expected acceptance (dscale.md §5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dscale.speculation.workspace import StepShape

Measure = Callable[[int], float]  # rows → seconds
Numbers = np.ndarray


@dataclass
class Curve:
    """Seconds by rows: measured at powers of two when first needed, read by linear interpolation."""

    measure: Measure
    points: dict[int, float] = field(default_factory=dict)

    def at(self, rows: Numbers | float) -> Numbers:
        """Seconds for these numbers of rows, each at least 1."""
        size = 1
        while True:
            if size not in self.points:
                self.points[size] = self.measure(size)
            if size >= np.max(rows):
                break
            size *= 2
        sizes = sorted(self.points)
        return np.asarray(np.interp(rows, sizes, [self.points[one] for one in sizes]))


class StepCosts:
    """Expected seconds of a step: the two curves, scaled by observed over expected of drafted and of plain steps."""

    SMOOTHING = 0.05  # weight of a new observation

    def __init__(self, verify: Measure, draft: Measure) -> None:
        self.verify, self.draft = Curve(verify), Curve(draft)
        self._ratio = {True: 1.0, False: 1.0}  # drafted or not → observed over expected

    def times(self, live: int, width: int, rows: Numbers | float) -> Numbers:
        """Seconds of a step of `live` requests that drafts blocks of `width` (1: none) and verifies `rows` rows."""
        seconds = self.verify.at(rows)
        if width > 1:
            seconds = seconds + self.draft.at(live * width)
        return seconds * self._ratio[width > 1]

    def observe(self, live: int, shape: StepShape, seconds: float) -> None:
        """Take in the time of a step that ran. A step far slower than believed (a hiccup) counts only a little."""
        drafted = shape.width > 1
        expected = float(self.times(live, shape.width, float(shape.rows)))
        seen = min(max(seconds / expected, 0.5), 2.0) * self._ratio[drafted]
        self._ratio[drafted] += self.SMOOTHING * (seen - self._ratio[drafted])
