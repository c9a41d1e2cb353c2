"""The choice of `auto` where steps are captured: off or one of a few budgets in whole blocks (dscale.md §5).

    speed(b) = tokens(b) / t(N, b)        tokens: promise.py; t: timed replays, corrected by the steps that ran

The choice stays until another promises visibly more. Two kinds of looks at others, each within a share of the time:
- Whole blocks are verified without scores, as by `full`; a scored step among them now and then, and a wider one among
  narrow ones, tells what the others' drafts are worth.
- The time of a size that does not run is a belief. The rival that would be fastest were its time as far below it as may
  well be runs now and then, often at first, until its time is known well enough (`doubts` of costs.py): a row of steps,
  since the first of them run at the clocks of the choice (step_times.py), given up as soon as there is no hope left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dscale.speculation.costs import ReplayCosts
from dscale.speculation.policies import StepOutcome
from dscale.speculation.promise import Promise, round_number
from dscale.speculation.workspace import StepShape

MARGIN = 0.006  # of its speed by which another budget must be faster to be taken
REVIEW_EVERY = 16  # steps between choices
LOOK_SHARE = 0.001  # of the time that looks at other budgets may cost
LOOK_SHARE_OFF = 0.01  # the same where nothing is drafted: nothing else shows that the text became easier
LOOKS = (16, 128)  # steps between looks: at least, at most
DOUBT = 2.0  # standard deviations by which a rival may well be faster than believed
KNOWN = 0.012  # doubt from which looks at a rival are rarer
RIVAL_EVERY = 4, 16  # steps between looks at rivals, at least: at one in doubt, at one that is known
RIVAL_RUN = 28  # steps of a look at a rival: by half of them its clocks are on
RIVAL_SHARE = 0.001  # of the time that these may cost
RIVAL_CREDIT = (1.0, 3.0)  # steps' worth of them to begin with, and to save up at most


class CapturedChoice:
    """Which captured step comes next. width: of the blocks; budgets: rows a request, ascending, at most `width`."""

    def __init__(self, width: int, budgets: Sequence[int], costs: ReplayCosts) -> None:
        self.width, self.costs = width, costs
        self.slots = [1, *budgets]  # 1: nothing is drafted
        self.promise = Promise(width, budgets)
        self._chosen = 0  # index into slots
        self._live, self._age = 0, 0  # requests of the last review, steps since
        self._unseen, self._look_after = 0, LOOKS[0]  # steps since the last look, and until the next
        self._rival = 0  # index into slots; the choice where no other is worth a look
        self._run = 0  # steps left of a look at it
        self._alone, self._credit = 0, RIVAL_CREDIT[0]  # steps since a rival ran, and steps' worth of looks left
        self._rival_loss, self._rival_every = 0.0, RIVAL_EVERY[0]  # steps lost by a look at it, steps between looks

    def shapes(self, live: int) -> list[StepShape]:
        """Every shape there is, off first."""
        return [self._shape(live, index) for index in range(len(self.slots))]

    def shape(self, live: int) -> StepShape:
        """The step for `live` requests."""
        due = 1 if self._run else REVIEW_EVERY if self._rival == self._chosen else self._rival_every
        if not self._like(live) or (self._age >= due and not self.promise.unsure):
            self._review(live)
        self._age, self._unseen, self._alone = self._age + 1, self._unseen + 1, self._alone + 1
        self._credit = min(self._credit + RIVAL_SHARE, RIVAL_CREDIT[1])
        return self._shape(live, self._next())

    def _like(self, live: int) -> bool:
        """Whether the choice made last holds for so many requests too: same steps, and about as many that share."""
        before = self._live
        return live == before or (
            before > 0 and round_number(live) == round_number(before) and self.costs.alike(live, before)
        )

    def _next(self) -> int:
        if self.promise.unsure:
            self._run = 0
            return min(max(self._chosen, 1), self._widest_scored)
        if not self._run and self._rival != self._chosen and self._alone >= self._rival_every:
            self._run = RIVAL_RUN
        if self._run:
            self._run, self._alone = self._run - 1, 0
            self._credit -= self._rival_loss
            return self._rival
        if self._unseen > self._look_after:
            self._unseen = 0
            return self._look
        return self._chosen

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step that ran: its time, its acceptance, and its scores if there are any."""
        shape, draft = outcome.shape, outcome.draft
        self.costs.observe(outcome.live, shape, outcome.seconds)
        if shape.width == 1:
            return
        survival = None if draft.survival is None else draft.survival[:, 1:].cpu().numpy()
        verified, accepted, clean = np.array(outcome.slots), np.array(outcome.accepted), np.array(outcome.clean, bool)
        if self.promise.observe(int(shape.share), survival, verified, accepted, clean):
            self._age = REVIEW_EVERY

    def _shape(self, live: int, index: int) -> StepShape:
        """Whole blocks are not scored, unless there is nothing else that could be."""
        slots = self.slots[index]
        width = self.width if index else 1
        return StepShape(width, width - 1, slots * live, share=slots, scored=index <= self._widest_scored)

    @property
    def _widest_scored(self) -> int:
        last = len(self.slots) - 1
        return last - 1 if self.slots[last] == self.width and last > 1 else last

    @property
    def _look(self) -> int:
        """What to look at beside the choice: a little more, or beside whole blocks the widest that is scored."""
        return min(self._chosen + 1, self._widest_scored)

    def _review(self, live: int) -> None:
        """Choose for `live` requests."""
        self._live, self._age = live, 0
        speeds = self._speeds(live)
        best = int(speeds.argmax())
        if speeds[best] > (1 + MARGIN) * speeds[self._chosen]:
            self._chosen, self._run, self._alone = best, 0, -RIVAL_RUN // 2
        loss = 1 - float(speeds[self._look] / speeds[self._chosen])
        share = LOOK_SHARE if self._chosen else LOOK_SHARE_OFF
        self._look_after = int(min(max(loss / share, LOOKS[0]), LOOKS[1]))
        self._find_rival(live, speeds)

    def _find_rival(self, live: int, speeds: np.ndarray) -> None:
        """The size that would be fastest, were its time lower than believed by as much as may well be."""
        doubts = self.costs.doubts(live, self._shape(live, self._chosen))
        hoped = speeds * (1 + DOUBT * doubts)
        losses = np.maximum(1 - speeds / speeds[self._chosen], 0.0)
        dear = losses * RIVAL_RUN / 2 > self._credit  # most looks are given up early
        dear[self._rival] &= self._run == 0
        hoped[dear] = 0.0
        hoped[self._chosen] = (1 + MARGIN) * speeds[self._chosen]
        before, self._rival = self._rival, int(hoped.argmax())
        if self._rival != before:
            self._run = 0
        self._rival_loss, self._rival_every = float(losses[self._rival]), RIVAL_EVERY[bool(doubts[self._rival] < KNOWN)]

    def _speeds(self, live: int) -> np.ndarray:
        """Tokens a request and second, by index into slots."""
        rows = live * np.array(self.slots[1:], float)
        off = float(self.costs.times(live, 1, float(live)))
        drafted = self.promise.tokens(live) / self.costs.times(live, self.width, rows)
        return np.array([1 / off, *drafted])
