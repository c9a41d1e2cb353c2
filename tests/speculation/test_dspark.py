"""`dspark`: budgets of two steps before on made-up machines, temperatures learned while serving."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dscale.kernels.top_logits import TopLogits
from dscale.speculation.confidence import signals
from dscale.speculation.costs import StepCosts
from dscale.speculation.dspark import FIRST_FIT, DSpark, TemperedScorer, best_bucket, tempered, token_buckets
from dscale.speculation.policies import Draft, Scorer, StepOutcome
from dscale.speculation.workspace import StepShape

WIDTH = 6


class NoScorer(Scorer):
    name = "none"

    def read(self, hidden, target, live, initial):
        raise AssertionError("the drafter is not run in these tests")


def machine(row: float) -> StepCosts:
    """row seconds a verified row beyond one second a step."""
    return StepCosts(lambda rows: 1.0 + row * rows, lambda rows: 0.0)


def outcome(q: Tensor, shape: StepShape, seconds: float) -> StepOutcome:
    lanes = q.shape[0]
    draft = Draft(torch.zeros(lanes, WIDTH - 1, dtype=torch.int64), q)
    return StepOutcome(shape, draft, [2] * lanes, [1] * lanes, [True] * lanes, seconds)


def survival(chance: float, lanes: int) -> Tensor:
    return torch.cumprod(torch.tensor([1.0] + [chance] * (WIDTH - 1)), 0).expand(lanes, WIDTH)


def test_buckets() -> None:
    assert token_buckets(4, 6).tolist() == [4, 8, 16, 24]
    assert token_buckets(3, 2).tolist() == [3, 6]


def test_best_bucket_by_hand() -> None:
    q = np.array([[[1, 0.9, 0.5, 0.1], [1, 0.8, 0.2, 0.2]]])
    buckets = np.array([2, 3, 4, 8])
    # tokens: 2, 2.9, 3.7, 4.7
    assert best_bucket(q, buckets, 1 / np.array([1, 1, 1, 1.0])).tolist() == [8]
    assert best_bucket(q, buckets, 1 / np.array([1, 1.2, 1.7, 4.0])).tolist() == [3]
    assert best_bucket(q, buckets, 1 / np.array([1, 2, 4, 8.0])).tolist() == [2]


def test_budget_is_of_two_steps_before() -> None:
    policy, lanes = DSpark(NoScorer(), WIDTH, machine(row=0.2)), 4
    sure, doubtful, rows = survival(0.99, lanes), survival(0.05, lanes), []
    for q in (sure, doubtful, sure, sure, doubtful):
        shape = policy.shape(lanes)
        rows.append(shape.rows)
        policy.observe(outcome(q, shape, float(policy.costs.times(lanes, WIDTH, float(shape.rows)))))
    assert rows == [24, 24, 24, 4, 24]  # the first two know nothing; then sure, doubtful, sure
    assert policy.shape(lanes).rows == 24
    assert policy.shape(8).rows == 48  # twice the requests, as many slots each
    assert policy.shape(1).rows == 6


def test_lengths_take_the_best_slots_within_the_budget() -> None:
    policy = DSpark(NoScorer(), WIDTH, machine(0.2))
    q = torch.stack([survival(0.9, 1)[0], survival(0.2, 1)[0]])
    shape = StepShape(WIDTH, WIDTH - 1, rows=7)
    k = policy.lengths(Draft(torch.zeros(2, 5).long(), q), shape, torch.ones(2, dtype=torch.bool))
    assert k.tolist() == [6, 1]


def test_temperatures_are_fitted_to_what_is_served_in_place() -> None:
    """Confidences whose log-odds are twice the true ones: the temperature found is about 2, and q then calibrated."""
    scorer, generator = TemperedScorer(WIDTH), torch.Generator().manual_seed(0)
    held = scorer.temperatures
    shape = StepShape(WIDTH, WIDTH - 1, rows=1)
    true_sum, believed_sum = 0.0, 0.0
    for step in range(2 * FIRST_FIT):
        odds = torch.randn(32, WIDTH - 1, generator=generator)
        passed = torch.rand(odds.shape, generator=generator) < torch.sigmoid(odds)
        accepted = passed.long().cumprod(-1).sum(-1)
        log_p = torch.nn.functional.logsigmoid(2 * odds)
        values = torch.zeros(*odds.shape, 16)
        top = TopLogits(values, values.long(), -log_p, log_p)
        if step >= FIRST_FIT:
            q = tempered(signals(top)[0], scorer.temperatures)
            believed_sum += float(q[:, 1:].sum())
            true_sum += float(accepted.sum())
        draft = Draft(torch.zeros(32, WIDTH - 1).long(), None, top)
        scorer.observe(StepOutcome(shape, draft, [WIDTH] * 32, accepted.tolist(), [True] * 31 + [False], 1.0))
    assert scorer.temperatures is held
    assert scorer.temperatures[:3].tolist() == pytest.approx([2.0] * 3, abs=0.4)
    assert believed_sum == pytest.approx(true_sum, rel=0.06)


def test_narrow_blocks_teach_nothing() -> None:
    scorer = TemperedScorer(WIDTH)
    values = torch.zeros(2, 3, 16)
    draft = Draft(torch.zeros(2, 3).long(), None, TopLogits(values, values.long(), values[..., 0], values[..., 0]))
    for _ in range(FIRST_FIT + 1):
        scorer.observe(StepOutcome(StepShape(4, 3, 8), draft, [4, 4], [3, 3], [True, True], 1.0))
    assert scorer.temperatures.tolist() == [1.0] * 5
