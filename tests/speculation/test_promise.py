"""What budgets promise, from scores and from what became of the drafts."""

from __future__ import annotations

import numpy as np
import pytest

from dscale.speculation.promise import (
    ENOUGH,
    FACTOR_MEMORY,
    FACTOR_PRIOR,
    FRESH,
    LASTING,
    REFRESH,
    Promise,
    round_number,
)

HIGH, LOW = [0.9, 0.8, 0.2], [0.5, 0.4, 0.3]  # two requests: slots are granted 0.9 0.8 | 0.5 0.4 | 0.3 0.2
SCORES = np.array([HIGH, LOW], np.float32)
CLEAN = np.ones(2, bool)


def seen(promise: Promise, budget: int, verified: list[int], accepted: list[int], steps: int) -> None:
    for _ in range(steps):
        promise.observe(budget, SCORES, np.array(verified), np.array(accepted), CLEAN)


def test_requests_share_each_budget() -> None:
    promise = Promise(4, (2, 3, 4))
    seen(promise, 2, [3, 1], [2, 0], 1)
    assert promise._expected(2)[0].cumsum() == pytest.approx([1.7 / 2, 2.6 / 2, 3.1 / 2])
    assert promise._expected(1)[0].cumsum() == pytest.approx([1.4 / 2, 2.6 / 2, 3.1 / 2])  # alone: each its first ones


def test_hard_text_takes_more_steps_of_a_narrow_budget() -> None:
    """Two steps of 2.7 and of 1 token, as verified; 3 slots a request would have made it 2.7 and 1.9."""
    promise = Promise(4, (2, 3, 4))
    seen(promise, 2, [3, 1], [2, 0], 1)
    harmonic = 3.7 / (2.7 / 2.7 + 1.0 / 1.9)
    drift = promise._expected(2)[1]
    assert drift[:2] == pytest.approx([1.0, 1 + LASTING * (harmonic / 2.3 - 1)])
    promise._lasting[:] = 0
    assert promise.tokens(2)[:2] == pytest.approx([1.85, 2.3 * drift[1]])


def test_a_group_is_trusted_as_far_as_it_was_verified() -> None:
    promise = Promise(4, (2, 3, 4))
    seen(promise, 3, [3, 3], [2, 0], 50)  # both of the first group pass, none of the second
    first, second = 1 / 0.85, FACTOR_PRIOR
    accepted, predicted = promise._lasting
    assert predicted[2] == 0
    assert predicted[1] / predicted[0] == pytest.approx(0.9 / 1.7)
    assert accepted[0] / predicted[0] == pytest.approx(first)
    assert accepted[1] == 0
    factors = promise._factors()
    assert 1.0 < factors[0] < first
    assert factors[1] == pytest.approx(factors[0] * second / (predicted[1] + second))
    assert factors[2] == pytest.approx(factors[1])  # never verified: as the one before


def test_drafts_not_verified_or_not_clean_do_not_count() -> None:
    promise = Promise(4, (2, 3, 4))
    promise.observe(4, SCORES, np.array([2, 4]), np.array([1, 0]), np.array([True, False]))
    accepted, predicted = promise._lasting.tolist()
    assert predicted == pytest.approx([0.9, 0.0, 0.0])
    assert accepted == [1.0, 0.0, 0.0]


def test_a_promise_that_is_not_kept_is_forgotten() -> None:
    rng = np.random.default_rng(0)
    promise = Promise(4, (2, 3, 4))
    verified = np.array([4, 4])
    for _ in range(400):  # as promised
        accepted = (rng.random((2, 1)) < SCORES).sum(1)
        promise.observe(4, SCORES, verified, accepted, CLEAN)
    assert not promise.unsure
    steps = 0
    while not promise.unsure:
        promise.observe(4, None, verified, np.zeros(2, int), CLEAN)
        steps += 1
    assert steps < FRESH
    news = [promise.observe(4, SCORES, verified, np.zeros(2, int), CLEAN) for _ in range(FRESH // 2)]
    assert news == [False] * (FRESH // 2 - 1) + [True]
    assert not promise.unsure


def test_a_promise_stands_for_some_steps() -> None:
    promise = Promise(4, (2, 3, 4))
    seen(promise, 2, [3, 1], [2, 0], FRESH // 2)
    before = promise.tokens(2).tolist()
    seen(promise, 2, [3, 1], [1, 0], REFRESH - 1)
    assert promise.tokens(2).tolist() == before
    seen(promise, 2, [3, 1], [1, 0], 1)
    assert promise.tokens(2)[0] < before[0]


def test_of_many_rows_every_other_step_is_learned_from_and_every_look() -> None:
    lanes = 2 * ENOUGH
    many, clean = np.tile(SCORES, (lanes // 2, 1)), np.ones(lanes, bool)
    promise = Promise(4, (2, 3, 4))

    def step(budget: int, accepted: int) -> float:
        rows = np.full(lanes, budget), np.full(lanes, accepted)
        promise.observe(budget, many, *rows, clean)
        return float(promise._lasting[0, 0])

    first = step(2, 1)
    assert step(2, 1) == first
    second = step(2, 1)
    assert second == pytest.approx(first * (1 + FACTOR_MEMORY**2))
    assert step(3, 1) == pytest.approx(first + FACTOR_MEMORY * second)  # another budget
    assert promise._filled == 3 * lanes


def test_round_numbers() -> None:
    assert [round_number(live) for live in (1, 2, 3, 4, 5, 7, 10, 13, 15, 16, 19, 27, 28, 31, 63)] == [
        1, 2, 3, 4, 6, 8, 12, 12, 16, 16, 16, 24, 32, 32, 64,
    ]  # fmt: skip
