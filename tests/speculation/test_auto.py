"""`auto` on made-up machines: wide where rows are free, narrow where they cost, nothing where nothing pays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dscale.speculation.auto import PROBE_EVERY, Auto
from dscale.speculation.costs import Curve, StepCosts
from dscale.speculation.policies import Draft, Scorer, StepOutcome
from dscale.speculation.workspace import StepShape

WIDTH = 16


class NoScorer(Scorer):
    name = "none"

    def read(self, hidden, target, live, initial):
        raise AssertionError("the drafter is not run in these tests")


def machine(row_ms: float, base_ms: float, draft_ms: float) -> StepCosts:
    """row_ms a verified row, base_ms a step, draft_ms a drafted row."""
    return StepCosts(lambda rows: (base_ms + row_ms * rows) / 1e3, lambda rows: draft_ms * rows / 1e3)


def play(costs: StepCosts, live: int, accept: float, steps: int, resizes: bool = False) -> list[StepShape]:
    """Steps on that machine with drafts that each pass with probability `accept`; the shapes of the steps."""
    scorer = NoScorer()
    auto = Auto(scorer, scorer, WIDTH, costs, resizes)
    generator = torch.Generator().manual_seed(0)
    alive = torch.ones(live, dtype=torch.bool)
    shapes = []
    for _ in range(steps):
        shape = auto.shape(live)
        drafted = shape.width > 1
        survival = torch.cumprod(torch.tensor([1.0] + [accept] * (shape.width - 1)), 0).expand(live, shape.width)
        draft = Draft(torch.zeros(live, shape.width - 1), survival if drafted else None)
        shape = auto.resize(draft, shape, alive)
        shapes.append(shape)
        slots = auto.lengths(draft, shape, alive)
        assert int(slots.sum()) == shape.rows
        passed = torch.rand(live, shape.width - 1, generator=generator) < accept
        accepted = torch.minimum(passed.long().cumprod(-1).sum(-1), slots - 1).tolist()
        seconds = float(costs.verify.at(shape.rows) + (costs.draft.at(live * shape.width) if drafted else 0.0))
        auto.observe(StepOutcome(shape, draft, slots.tolist(), accepted, [True] * live, seconds))
    return shapes


def test_curve_measures_powers_of_two_once_and_interpolates():
    asked = []
    curve = Curve(lambda size: asked.append(size) or float(size) ** 2)
    assert [float(curve.at(size)) for size in (1, 8, 6, 5, 8)] == [1.0, 64.0, 40.0, 28.0, 64.0]
    assert asked == [1, 2, 4, 8]
    assert curve.at(np.array([2, 3])).tolist() == [4.0, 10.0]


def test_observed_times_correct_the_curves_and_a_hiccup_counts_little():
    costs = machine(row_ms=1.0, base_ms=10.0, draft_ms=0.0)
    shape = StepShape(width=WIDTH, head=WIDTH - 1, rows=8)
    assert float(costs.times(1, WIDTH, 8)) == pytest.approx(0.018)
    for _ in range(200):
        costs.observe(1, shape, 0.027)
    assert float(costs.times(1, WIDTH, 8)) == pytest.approx(0.027, rel=0.02)
    assert float(costs.times(1, WIDTH, 4)) == pytest.approx(0.023, rel=0.02)
    assert float(costs.times(3, WIDTH, 4)) == pytest.approx(0.023, rel=0.02)  # the nearest number of requests
    for _ in range(200):
        costs.observe(1, StepShape(width=1, head=0, rows=1), 0.012)
    assert float(costs.times(1, 1, 1)) == pytest.approx(0.012, rel=0.02)  # plain steps have their own
    costs.observe(1, shape, 10.0)
    assert float(costs.times(1, WIDTH, 8)) < 0.031


def test_free_rows_are_verified_and_dear_rows_are_not():
    free = play(machine(0.01, 20.0, 0.01), 2, 0.8, 200)[-1]
    assert free.width == WIDTH
    assert free.rows >= 2 * 14
    dear = play(machine(2.0, 20.0, 0.1), 2, 0.8, 200)[-1]
    assert 2 * 2 <= dear.rows <= 2 * 7


def test_narrow_blocks_are_drafted_where_drafting_is_dear():
    wide = play(machine(0.05, 20.0, 0.05), 4, 0.6, 200)[-1]
    narrow = play(machine(0.05, 20.0, 1.0), 4, 0.6, 200)[-1]
    assert 1 < narrow.width <= 4 < wide.width


def test_nothing_is_drafted_where_nothing_pays_but_it_looks_again():
    shapes = play(machine(1.0, 1.0, 2.0), 8, 0.3, 600)
    drafted = [index for index, shape in enumerate(shapes) if shape.width > 1 and index > 20]
    assert 2 <= len(drafted) <= 580 // PROBE_EVERY + 1
    assert all(shapes[index].width == 4 for index in drafted)


def test_budget_follows_the_draft_where_sizes_are_free():
    auto = Auto(NoScorer(), NoScorer(), WIDTH, machine(1.0, 20.0, 0.1), resizes=True)
    shape = auto.shape(1)
    sure = torch.cumprod(torch.tensor([[1.0] + [0.98] * (shape.width - 1)]), 1)
    unsure = torch.cumprod(torch.tensor([[1.0] + [0.3] * (shape.width - 1)]), 1)
    alive = torch.ones(1, dtype=torch.bool)
    rows = [auto.resize(Draft(torch.zeros(1, shape.width - 1), q), shape, alive).rows for q in (sure, unsure)]
    assert rows[0] >= shape.width - 2
    assert rows[1] <= 3
    fixed = Auto(NoScorer(), NoScorer(), WIDTH, machine(1.0, 20.0, 0.1), resizes=False)
    assert fixed.resize(Draft(torch.zeros(1, WIDTH - 1), sure), shape, alive) == shape


@pytest.mark.parametrize("resizes", [False, True])
@pytest.mark.parametrize("live", [1, 4, 16])
@pytest.mark.parametrize("accept", [0.4, 0.7, 0.9])
@pytest.mark.parametrize(("row_ms", "base_ms", "draft_ms"), [(0.1, 20.0, 0.5), (1.0, 20.0, 0.5), (0.4, 5.0, 0.1)])
def test_choice_is_close_to_the_best_in_hindsight(resizes, live, accept, row_ms, base_ms, draft_ms):
    shapes = play(machine(row_ms, base_ms, draft_ms), live, accept, 150, resizes)[-20:]

    def speed(width: int, rows: int) -> float:
        if width == 1:
            return live / (base_ms + row_ms * live)
        gains = sorted([accept**j for j in range(1, width)] * live, reverse=True)
        return (live + sum(gains[: rows - live])) / (base_ms + row_ms * rows + draft_ms * live * width)

    best = max(speed(width, live * slots) for width in range(1, WIDTH + 1) for slots in range(1, width + 1))
    typical = sorted(speed(shape.width, shape.rows) for shape in shapes)[len(shapes) // 2]
    assert typical >= 0.95 * best


def test_trust_begins_anew_once_a_scorer_was_refitted():
    auto = Auto(NoScorer(), NoScorer(), WIDTH, machine(1.0, 20.0, 0.1), resizes=False)
    draft = Draft(torch.zeros(2, WIDTH - 1, dtype=torch.int64), torch.ones(2, WIDTH))
    shape = StepShape(width=WIDTH, head=WIDTH - 1, rows=2 * WIDTH)
    assert auto.scorers() == (auto.full, auto.narrow)
    for _ in range(200):
        auto.observe(StepOutcome(shape, draft, [WIDTH, WIDTH], [0, 0], [True, True], 0.02))
    assert auto._calibration(WIDTH) < 0.05
    auto.rescored()
    assert auto._calibration(WIDTH) == 1.0
