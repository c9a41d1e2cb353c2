"""`auto` on made-up machines: wide where rows are free, narrow where they cost, nothing where nothing pays."""

from __future__ import annotations

import pytest
import torch

from dscale.speculation.auto import PROBE_EVERY, Auto
from dscale.speculation.costs import Curve, StepCosts, interpolate
from dscale.speculation.policies import Draft, Scorer, StepOutcome
from dscale.speculation.workspace import StepShape

WIDTH = 16


class NoScorer(Scorer):
    name = "none"

    def read(self, hidden, target, live, initial):
        raise AssertionError("the drafter is not run in these tests")


def machine(row_ms: float, base_ms: float, draft_ms: float) -> StepCosts:
    return StepCosts(lambda rows: (base_ms + row_ms * rows) / 1e3, lambda lanes: draft_ms * lanes / 1e3)


def play(
    auto: Auto, live: int, accept: float, steps: int, row_ms: float, base_ms: float, draft_ms: float
) -> list[float]:
    """Steps on that machine with drafts that each pass with probability `accept`; slots per request of each step."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    survival = torch.cumprod(torch.tensor([1.0] + [accept] * (WIDTH - 1)), 0).expand(live, WIDTH)
    for _ in range(steps):
        shape = auto.shape(live)
        chosen.append(shape.rows / live if shape.width > 1 else 0.0)
        drafted = shape.width > 1
        slots = auto.lengths(Draft(torch.zeros(live, WIDTH - 1), survival), shape, torch.ones(live, dtype=torch.bool))
        passed = torch.rand(live, WIDTH - 1, generator=generator) < accept
        accepted = torch.minimum(passed.long().cumprod(-1).sum(-1), slots - 1).tolist()
        seconds = (base_ms + row_ms * shape.rows + draft_ms * live * drafted) / 1e3
        draft = Draft(torch.zeros(live, WIDTH - 1), survival if drafted else None)
        auto.observe(StepOutcome(shape, draft, slots.tolist(), accepted, [True] * live, seconds))
    return chosen


def test_curve_measures_powers_of_two_once_and_interpolates():
    asked = []
    curve = Curve(lambda size: asked.append(size) or float(size))
    assert [curve.at(size) for size in (1, 8, 6, 5, 8)] == [1.0, 8.0, 6.0, 5.0, 8.0]
    assert asked == [1, 8, 4]


def test_interpolation_is_flat_beyond_its_ends():
    assert [interpolate([1.0, 3.0], [10.0, 30.0], x) for x in (0.0, 1.0, 2.0, 3.0, 9.0)] == [10, 10, 20, 30, 30]


def test_observed_times_replace_the_curve_and_a_hiccup_counts_little():
    costs = machine(row_ms=1.0, base_ms=10.0, draft_ms=0.0)
    shape = StepShape(width=WIDTH, head=WIDTH - 1, rows=8)
    assert costs.predict(1, shape) == pytest.approx(0.018)
    for _ in range(50):
        costs.observe(1, shape, 0.030)
    assert costs.predict(1, shape) == pytest.approx(0.030, rel=0.02)
    costs.observe(1, shape, 10.0)
    assert costs.predict(1, shape) < 0.045
    other = StepShape(width=WIDTH, head=WIDTH - 1, rows=4)
    assert costs.predict(1, other) > 0.014 * 1.3  # the whole curve moved up


def test_free_rows_are_verified_and_dear_rows_are_not():
    free = play(Auto(NoScorer(), WIDTH, machine(0.01, 20.0, 2.0)), 2, 0.8, 200, 0.01, 20.0, 2.0)
    assert free[-1] >= 12
    dear = play(Auto(NoScorer(), WIDTH, machine(2.0, 20.0, 2.0)), 2, 0.8, 200, 2.0, 20.0, 2.0)
    assert 2 <= dear[-1] <= 6


def test_nothing_is_drafted_where_nothing_pays_but_it_looks_again():
    chosen = play(Auto(NoScorer(), WIDTH, machine(1.0, 1.0, 20.0)), 8, 0.3, 400, 1.0, 1.0, 20.0)
    assert chosen[-1] == 0.0 or chosen[-2] == 0.0
    probes = sum(one > 0 for one in chosen[50:])
    assert 1 <= probes <= 350 // PROBE_EVERY + 1


@pytest.mark.parametrize("live", [1, 4, 16])
@pytest.mark.parametrize("accept", [0.4, 0.7, 0.9])
@pytest.mark.parametrize(("row_ms", "base_ms", "draft_ms"), [(0.1, 20.0, 8.0), (1.0, 20.0, 8.0), (0.8, 4.0, 3.0)])
def test_choice_is_close_to_the_best_budget_in_hindsight(live, accept, row_ms, base_ms, draft_ms):
    auto = Auto(NoScorer(), WIDTH, machine(row_ms, base_ms, draft_ms))
    chosen = play(auto, live, accept, 150, row_ms, base_ms, draft_ms)[-20:]

    def speed(slots: float) -> float:
        if slots == 0.0:
            return 1.0 / (base_ms + row_ms * live)
        gains = sorted([accept**j for j in range(1, WIDTH)] * live, reverse=True)
        gain = sum(gains[: round((slots - 1) * live)]) / live
        return (1 + gain) / (base_ms + row_ms * round(slots * live) + draft_ms * live)

    best = max(speed(slots) for slots in [0.0, *auto.budgets])
    typical = sorted(speed(slots) for slots in chosen)[len(chosen) // 2]
    assert typical >= 0.95 * best
