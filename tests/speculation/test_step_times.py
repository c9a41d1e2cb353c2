"""Times of captured sizes: what all share, what is a size's own, and how sure of it one may be."""

from __future__ import annotations

import numpy as np
import pytest

from dscale.speculation.step_times import INERTIA, NOISE, OWN, SETTLED, VISIT, StepTimes

REPLAYS = np.array([5.0, 8.0, 10.0, 17.0])  # unit: 10
ROW = int(np.ceil(np.log(1 - SETTLED) / np.log(1 - 1 / INERTIA)))  # steps after which a size has settled


def run(times: StepTimes, size: int, seconds: float, steps: int) -> None:
    for _ in range(steps):
        times.observe(4, size, seconds)


def test_the_first_size_that_runs_shifts_all() -> None:
    times = StepTimes(REPLAYS)
    run(times, 2, 12.0, 50)
    assert times.seconds() == pytest.approx(REPLAYS + 2, abs=0.1)
    assert times.seconds()[2] == pytest.approx(12.0, abs=0.01)
    assert times.shared == pytest.approx(0.2, abs=0.01)


def test_the_others_stay_in_doubt_until_they_run() -> None:
    times = StepTimes(REPLAYS)
    run(times, 2, 10.0, 200)
    doubts = times.doubts(2)
    assert doubts[2] == 0.0
    assert doubts[[0, 1, 3]] == pytest.approx(np.sqrt(2) * OWN * 10 / REPLAYS[[0, 1, 3]], rel=0.05)
    times.observe(4, 1, 8.0)
    assert times.doubts(2)[1] == pytest.approx(np.hypot(NOISE, VISIT) * 10 / 8, rel=0.2)


def test_a_wrong_belief_about_a_size_is_corrected_within_a_few_of_its_steps() -> None:
    """8 seconds by its replay are 8.8 in earnest, 10 are 10: four looks among steps of the latter, then a row. Either
    replay may have been wrong, so what never ran is met half way."""
    times = StepTimes(REPLAYS)
    run(times, 2, 10.0, 20)
    for _ in range(4):
        times.observe(4, 1, 8.8)
        run(times, 2, 10.0, 3)
    assert times.seconds()[[1, 2]] == pytest.approx([8.8, 10.0], rel=0.01)
    assert times.seconds()[3] == pytest.approx(17.4, rel=0.005)
    run(times, 1, 8.8, ROW + 4)
    assert times.seconds()[[1, 2]] == pytest.approx([8.8, 10.0], rel=0.003)


def test_steps_among_others_tell_a_time_to_two_percent_however_many_they_are() -> None:
    """8 seconds take 8.3 at the clocks of the others, and 8 after a row of their own."""
    times = StepTimes(REPLAYS)
    run(times, 2, 10.0, 20)
    for _ in range(100):
        times.observe(4, 1, 8.3)
        run(times, 2, 10.0, 7)
    assert times.doubts(2)[1] > 0.9 * VISIT * 10 / 8
    run(times, 1, 8.3, ROW - 1)  # while the clocks change
    run(times, 1, 8.0, 12)
    assert times.seconds()[[1, 2]] == pytest.approx([8.0, 10.0], rel=0.01)
    assert times.doubts(2)[1] < 0.012
    run(times, 2, 10.0, ROW)
    for _ in range(100):
        times.observe(4, 1, 8.3)
        run(times, 2, 10.0, 7)
    assert times.seconds()[1] == pytest.approx(8.0, rel=0.02)


def test_one_slow_step_is_not_believed_and_many_are() -> None:
    times = StepTimes(REPLAYS)
    run(times, 2, 10.0, 50)
    times.observe(4, 1, 16.0)  # a hiccup at the first look: twice its time
    run(times, 2, 10.0, 3)
    assert times.seconds()[[1, 2]] == pytest.approx([8.0, 10.0], rel=0.035)
    assert times.doubts(2)[1] > 0.05  # worth another look
    run(times, 2, 15.0, 8)  # longer contexts: all have become slower
    assert times.seconds()[[1, 2]] == pytest.approx([13.0, 15.0], rel=0.03)


def test_a_hiccup_at_the_very_first_step_is_soon_forgotten() -> None:
    times = StepTimes(REPLAYS)
    times.observe(4, 2, 30.0)
    run(times, 2, 10.0, 4)
    assert times.seconds() == pytest.approx(REPLAYS, abs=0.6)


def test_what_was_seen_long_ago_is_doubted_again() -> None:
    times = StepTimes(REPLAYS)
    for size, seconds in ((1, 8.0), (2, 10.0)) * 2:
        run(times, size, seconds, 20)
    soon = times.doubts(2)[1]
    run(times, 2, 10.0, 2000)
    assert soon < 0.01 < times.doubts(2)[1] < 0.05


def test_a_short_step_stays_believable_when_long_ones_are_far_below_their_replays() -> None:
    times = StepTimes(np.array([0.2, 2.0]))
    for _ in range(4):
        times.observe(1, 1, 0.7)
    assert times.seconds()[1] == pytest.approx(0.7, rel=0.05)
    assert times.seconds()[0] == pytest.approx(0.04)


def test_a_look_now_and_then_does_not_unsettle() -> None:
    times = StepTimes(REPLAYS)
    for _ in range(20):
        run(times, 2, 10.0, 10)
        times.observe(4, 1, 8.3)
    for _ in range(20):
        run(times, 2, 10.5, 10)
        times.observe(4, 1, 8.3)
    assert times.seconds()[2] == pytest.approx(10.5, rel=0.003)
