"""The common-prefix estimator by hand and on an engine, and its record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dscale.config import InputError
from dscale.evaluate.continuations import sampling_of
from dscale.evaluate.repeats import repeat_engine
from dscale.evaluate.reproducibility import ArmHazard, ReproducibilityRecord, read_reproducibility, wilson
from tests.engine.pairs import make_llm, tiny_drafter, tiny_target


def test_hazard_by_hand() -> None:
    first = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
    second = [[1, 2, 9, 4], [5, 6, 7], [8, 9, 1]]
    ended = [[False, True, True], [False, True, False]]
    found = ArmHazard.of("off", 0.0, [first, second], ended)
    assert found.first == {0: 2, 2: 2}  # one text ended where the other went on
    assert found.at_risk == 3 + 4 + 3  # an end counts as a token
    assert found.hazard == 2 / 10
    assert found.share == 2 / 3
    assert found.hazard_interval == pytest.approx((0.0567, 0.5098), abs=1e-4)


def test_nothing_seen_still_has_an_upper_end() -> None:
    assert wilson(0, 100) == (0.0, pytest.approx(0.037, abs=1e-3))
    assert wilson(5, 5)[1] == 1.0
    with pytest.raises(InputError, match="no tokens to compare"):
        ArmHazard.of("off", 0.0, [[[]], [[]]], [[False], [False]])


def test_the_estimator_finds_the_hazard_it_was_drawn_with() -> None:
    rng = np.random.default_rng(0)
    one = [[0] * 100 for _ in range(2000)]
    flips = rng.random((2000, 100)) < 0.01
    other = [(np.maximum.accumulate(row) * 1).tolist() for row in flips]  # after a flip everything differs
    found = ArmHazard.of("x", 0.0, [one, other], [[False] * 2000] * 2)
    assert found.hazard_interval[0] < 0.01 < found.hazard_interval[1]
    assert found.share == pytest.approx(1 - 0.99**100, abs=0.03)


def test_this_engine_repeats_itself(tmp_path: Path) -> None:
    target = tiny_target("llama")
    llm = make_llm(target, "full", tiny_drafter(target))
    prompts = [[i % 5, 1, 2, 3] * 5 for i in range(6)]
    arms = tuple(repeat_engine(llm, policy, prompts, sampling_of(0.7, 30, 3)) for policy in ("off", "full"))
    assert [(arm.arm, arm.sequences, arm.diverged, arm.at_risk) for arm in arms] == [
        ("off", 6, 0, 180),
        ("full", 6, 0, 180),
    ]
    assert str(arms[0]).startswith("off: 0 of 6 sequences diverge; hazard 0.00e+00 a token (0.0e+00 … 2.1e-02)")
    record = ReproducibilityRecord({"dscale": "0"}, {}, "dscale reproduce", "tiny", "float32", {}, arms)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record.as_json()))
    assert read_reproducibility(path) == record
    for change, message in (({"kind": "bench"}, "no record"), ({"schema": 2}, "schema 2"), ({"arms": [{}]}, "damaged")):
        path.write_text(json.dumps(record.as_json() | change))
        with pytest.raises(InputError, match=message):
            read_reproducibility(path)
