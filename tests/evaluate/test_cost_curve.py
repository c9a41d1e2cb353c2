"""The cost table: read, written, interpolated, and measured on a tiny engine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dscale.config import InputError
from dscale.evaluate.cost_curve import CostConfig, MeasuredCosts, TimedStep, measure, read_costs, to_record
from dscale.speculation.workspace import StepShape
from tests.engine.pairs import tiny_drafter, tiny_target

STEPS = [TimedStep(2, 1, 2, 1.0), TimedStep(2, 4, 4, 2.0, 0.25), TimedStep(2, 4, 8, 3.0), TimedStep(4, 1, 4, 1.5)]


def test_times_go_straight_between_and_beyond_the_timed_rows() -> None:
    costs = MeasuredCosts(STEPS)
    assert costs.times(2, 4, np.array([2, 4, 6, 8, 12])).tolist() == [1.5, 2.0, 2.5, 3.0, 4.0]
    assert float(costs.times(2, 1, 2.0)) == 1.0
    assert costs.decide(2) == 0.25
    costs.observe(2, StepShape(4, 3, 8), 99.0)
    assert float(costs.times(2, 4, 8)) == 3.0
    with pytest.raises(InputError, match=r"no drafted steps of 4 requests were timed; timed are \[2, 4\]"):
        costs.times(4, 4, 8)


def test_a_table_survives_its_file(tmp_path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(to_record(STEPS, device="cpu")))
    costs, record = read_costs(file)
    assert costs.steps == STEPS
    assert record["device"] == "cpu"
    for broken, text in (({"schema": "x"}, "schema"), ({"steps": [{"live": 1}]}, "damaged")):
        file.write_text(json.dumps(to_record(STEPS) | broken))
        with pytest.raises(InputError, match=text):
            read_costs(file)


def test_every_shape_of_a_real_engine_is_timed() -> None:
    target = tiny_target("llama")
    steps = measure(target, tiny_drafter(target), (1, 3), "cpu", CostConfig((2, 5), context=20, warm=1, repeats=2))
    shapes = [(one.live, one.width, one.rows) for one in steps]
    assert shapes == [(n, *shape) for n in (1, 3) for shape in ((1, n), (8, 2 * n), (8, 5 * n), (8, 8 * n))]
    assert all(0 < one.seconds < 5 for one in steps)
    assert all(one.decide >= 0 for one in steps)


def test_steps_that_do_not_fit_the_context_are_refused() -> None:
    target = tiny_target("llama")
    with pytest.raises(InputError, match="do not fit the context length 512"):
        measure(target, tiny_drafter(target), (1,), "cpu", CostConfig(repeats=100))
