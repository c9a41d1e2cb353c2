"""Times of captured sizes: what all share, what is a size's own, and how sure of it one may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dscale.speculation.step_times import INERTIA, LAGGED, LASTS, NOISE, OWN, PULL, SPELL, StepTimes

REPLAYS = np.array([5.0, 8.0, 10.0, 17.0])  # unit: 10
SLOTS = np.array([4, 8, 12, 16])
ROW = 2 * INERTIA  # steps after which a size runs at its own clocks, but for an eighth


def run(times: StepTimes, size: int, seconds: float, steps: int) -> None:
    for _ in range(steps):
        times.observe(4, size, seconds)


class Chip:
    """Steps of the four sizes that take seconds [S] among their like, on clocks that lag by `pull`."""

    def __init__(self, seconds: Sequence[float], pull: float, inertia: int = INERTIA) -> None:
        self.seconds, self.pull, self.inertia = seconds, pull, inertia
        self.warmth: float | None = None

    def run(self, times: StepTimes, size: int, steps: int) -> None:
        for _ in range(steps):
            load = float(np.log(SLOTS[size]))
            lag = 0.0 if self.warmth is None else self.warmth - load
            self.warmth = load + lag * (1 - 1 / self.inertia)
            times.observe(4, size, self.seconds[size] * (1 + self.pull * lag))

    def take_turns(self, times: StepTimes, row: int) -> None:
        """A row of 12 slots, then looks at 8 slots among them; the same the other way round."""
        for size, other in ((2, 1), (1, 2)):
            self.run(times, size, row)
            for _ in range(8):
                self.run(times, other, 1)
                self.run(times, size, 7)


def test_the_first_size_that_runs_shifts_all() -> None:
    times = StepTimes(REPLAYS, SLOTS)
    run(times, 2, 12.0, 50)
    assert times.seconds() == pytest.approx(REPLAYS + 2, abs=0.1)
    assert times.seconds()[2] == pytest.approx(12.0, abs=0.01)
    assert times.shared == pytest.approx(0.2, abs=0.01)


def test_the_others_stay_in_doubt_until_they_run() -> None:
    times = StepTimes(REPLAYS, SLOTS)
    run(times, 2, 10.0, 200)
    doubts = times.doubts(2)
    assert doubts[2] == 0.0
    assert doubts[[0, 1, 3]] == pytest.approx(np.sqrt(2) * OWN * 10 / REPLAYS[[0, 1, 3]], rel=0.05)
    times.observe(4, 1, 8.0)
    lag, changed = np.log(12 / 8), SPELL * np.sqrt(1 - LASTS**2)
    parts = (NOISE, LAGGED * lag, PULL[1] * lag * 0.8, changed)
    assert times.doubts(2)[1] == pytest.approx(np.linalg.norm(parts) * 10 / 8, rel=0.1)


def test_a_wrong_belief_about_a_size_is_corrected_within_a_few_of_its_steps() -> None:
    """8 seconds by its replay are 8.8 in earnest, 10 are 10: four looks among steps of the latter, then a row. Either
    replay may have been wrong, so what never ran is met half way."""
    times, chip = StepTimes(REPLAYS, SLOTS), Chip((5.0, 8.8, 10.0, 17.0), PULL[0])
    chip.run(times, 2, 20)
    for _ in range(4):
        chip.run(times, 1, 1)
        chip.run(times, 2, 3)
    assert times.seconds()[[1, 2]] == pytest.approx([8.8, 10.0], rel=0.01)
    assert times.seconds()[3] == pytest.approx(17.4, rel=0.005)
    chip.run(times, 1, ROW + 4)
    assert times.seconds()[[1, 2]] == pytest.approx([8.8, 10.0], rel=0.003)


@pytest.mark.parametrize("pull", [0.0, 0.03, 0.08])
@pytest.mark.parametrize("inertia", [4, 8, 12])
def test_clocks_that_lag_are_told_from_a_size_that_is_slow(pull: float, inertia: int) -> None:
    """Steps of 8 slots among 12 take up to 3% longer than among their like, and 12 among 8 as much less: 6% apart.
    Sizes are judged by their like, without knowing how much the clocks lag, nor quite how long."""
    times, chip = StepTimes(REPLAYS, SLOTS), Chip((5.0, 8.0, 10.0, 17.0), pull, inertia)
    for _ in range(3):
        chip.take_turns(times, 2 * ROW)
    assert times.seconds()[1] / times.seconds()[2] == pytest.approx(0.8, rel=0.008)
    assert times.pull == pytest.approx(pull, abs=0.02)


def test_steps_among_others_alone_do_not_settle_a_time() -> None:
    """However many looks there are, what the clocks add to them is not known before a row ran."""
    times, chip = StepTimes(REPLAYS, SLOTS), Chip((5.0, 8.0, 10.0, 17.0), 0.02)
    chip.run(times, 2, 20)
    for _ in range(100):
        chip.run(times, 1, 1)
        chip.run(times, 2, 7)
    looks = times.doubts(2)[1]
    assert looks > 0.8 * PULL[1] * np.log(12 / 8)
    assert times.seconds()[1] == pytest.approx(8.0, rel=2 * looks)
    chip.run(times, 1, 2 * ROW)
    chip.run(times, 2, 2 * ROW)
    assert times.seconds()[1] == pytest.approx(8.0, rel=0.01)


def test_a_row_of_steps_tells_less_than_as_many_at_random() -> None:
    """Steps that follow one another share a spell: twenty are worth less than four."""
    times = StepTimes(REPLAYS, SLOTS)
    run(times, 2, 10.0, 2000)
    run(times, 1, 8.0, 20)
    share = times.doubts(2)[1] * 8 / 10
    assert share > 2.5 * np.hypot(NOISE, SPELL) / np.sqrt(20)


def test_one_slow_step_is_not_believed_and_many_are() -> None:
    times = StepTimes(REPLAYS, SLOTS)
    run(times, 2, 10.0, 50)
    times.observe(4, 1, 16.0)  # a hiccup at the first look: twice its time
    run(times, 2, 10.0, 3)
    assert times.seconds()[[1, 2]] == pytest.approx([8.0, 10.0], rel=0.035)
    assert times.doubts(2)[1] > 0.05  # worth another look
    run(times, 2, 15.0, 8)  # longer contexts: all have become slower
    assert times.seconds()[[1, 2]] == pytest.approx([13.0, 15.0], rel=0.03)


def test_a_hiccup_at_the_very_first_step_is_soon_forgotten() -> None:
    times = StepTimes(REPLAYS, SLOTS)
    times.observe(4, 2, 30.0)
    run(times, 2, 10.0, 4)
    assert times.seconds() == pytest.approx(REPLAYS, abs=0.6)


def test_what_was_seen_long_ago_is_doubted_again() -> None:
    times = StepTimes(REPLAYS, SLOTS)
    for size, seconds in ((1, 8.0), (2, 10.0)) * 2:
        run(times, size, seconds, 20)
    soon = times.doubts(2)[1]
    run(times, 2, 10.0, 2000)
    assert soon < 0.01 < times.doubts(2)[1] < 0.05


def test_a_short_step_stays_believable_when_long_ones_are_far_below_their_replays() -> None:
    times = StepTimes(np.array([0.2, 2.0]), np.array([1, 8]))
    for _ in range(4):
        times.observe(1, 1, 0.7)
    assert times.seconds()[1] == pytest.approx(0.7, rel=0.05)
    assert times.seconds()[0] == pytest.approx(0.04)


def test_a_look_now_and_then_does_not_unsettle() -> None:
    times = StepTimes(REPLAYS, SLOTS)
    for _ in range(20):
        run(times, 2, 10.0, 10)
        times.observe(4, 1, 8.3)
    for _ in range(20):
        run(times, 2, 10.5, 10)
        times.observe(4, 1, 8.3)
    assert times.seconds()[2] == pytest.approx(10.5, rel=0.003)


def test_a_spell_of_a_few_steps_moves_a_time_by_less_than_half() -> None:
    times = StepTimes(REPLAYS, SLOTS)
    run(times, 2, 10.0, 200)
    run(times, 2, 10.12, 5)
    assert 10.0 < times.seconds()[2] < 10.06


def test_where_nothing_is_drafted_the_load_is_that_of_the_fewest_rows() -> None:
    assert StepTimes(REPLAYS, np.array([1, 4, 8, 16])).loads == pytest.approx(np.log([4, 4, 8, 16]))
    assert StepTimes(np.array([5.0]), np.array([1])).loads == pytest.approx([0.0])


def test_when_one_size_alone_becomes_slower_the_others_are_doubted_and_soon_known_again() -> None:
    """12 slots take 8% longer from now on; 8 slots, which ran as much, do not."""
    times = StepTimes(REPLAYS, SLOTS)
    for size in (1, 2) * 4:
        run(times, size, (8.0, 10.0)[size - 1], 100)
    run(times, 2, 10.8, 2 * ROW)
    assert times.seconds()[2] == pytest.approx(10.8, rel=0.005)
    assert times.doubts(2)[1] > 0.02
    for _ in range(3):
        times.observe(4, 1, 8.0)
        run(times, 2, 10.8, 3)
    assert times.seconds()[[1, 2]] == pytest.approx([8.0, 10.8], rel=0.015)


def test_clocks_may_change_in_a_long_life() -> None:
    """After hours at which they did not lag they do."""
    times, chip = StepTimes(REPLAYS, SLOTS), Chip((5.0, 8.0, 10.0, 17.0), 0.0)
    for pull in (0.0, 0.08):
        chip.pull = pull
        for _ in range(40):
            chip.take_turns(times, 4 * ROW)
        assert times.pull == pytest.approx(pull, abs=0.02)
        assert times.seconds()[1] / times.seconds()[2] == pytest.approx(0.8, rel=0.008)
