"""The closed loop of `auto` over made-up step times: its pieces by hand, and a few short cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dscale.evaluate.record_file import rounded

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import auto_choice


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_choice, "REQUESTS", 48)
    for cached in (auto_choice.text, auto_choice.long_run):
        cached.cache_clear()


def test_requests_share_a_budget_and_follow_one_another() -> None:
    requests = auto_choice.Requests(4)
    assert requests.position.tolist() == [0, 128, 256, 384]
    verified, accepted, scores = requests.step(8)
    assert verified.sum() == 32
    assert (accepted < verified).all()
    granted = np.arange(16) < verified[:, None]
    assert scores[granted].min() >= scores[~granted].max()
    assert requests.position.tolist() == (np.array([0, 128, 256, 384]) + accepted + 1).tolist()
    requests.position[3] = 511
    requests.step(1)
    assert (requests.number[3], requests.position[3], requests.live) == (4, 0, 3)
    assert len(requests.step(16)[0]) == 3
    assert requests.live == 4


def test_wider_budgets_give_more_tokens() -> None:
    tokens = [auto_choice.long_run(8, slots) for slots in (1, 4, 8, 12, 16)]
    assert tokens[0] == 1.0
    assert tokens == sorted(tokens)
    assert 5.5 < tokens[-1] < 7.0


def test_a_few_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_choice, "BUDGETS", (8, 16))
    monkeypatch.setattr(auto_choice, "TIMES", {"m": {8: (5.0, 6.0, 9.0)}})
    out = tmp_path / "record.json"
    record = auto_choice.main(["--models", "m", "--concurrency", "8", "--steps", "60", "--out", str(out)])
    assert json.loads(out.read_text()) == rounded(json.loads(json.dumps(record)))
    assert len(record["cases"]) == 4
    assert record["worst"] == record["cases"][0]["over_8_and_16"] <= 1.0 + 1e-9
    for case in record["cases"]:
        assert sum(case["steps"].values()) == 60
        assert case["steps"]["8"] > 50
    assert capsys.readouterr().out.count("| m | 8 |") == 1
