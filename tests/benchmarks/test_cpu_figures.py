"""The figure experiments: their arithmetic on made-up traces, the whole script in miniature, and its times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from dscale.evaluate.report.build import build_report
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.predictor import Predictor, PredictorConfig, read_config
from dscale.train.quality import spearman
from tests.cli.test_commands import folders  # noqa: F401 (fixture)
from tests.evaluate.traces import made_up

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    import cpu_figures

    return cpu_figures


def test_retention_by_hand(bench: ModuleType) -> None:
    traces = made_up(40, width=6)
    torch.manual_seed(0)
    predictor = Predictor(PredictorConfig(6, "x", features=("confidence",), hidden_units=8))
    arms = bench.retention(traces, predictor, 4, 50, 0)
    found = {(arm["arm"], arm["slots"]): arm for arm in arms}
    rows = bench.lane_steps(traces, 4, 0)
    y = traces.accepted[rows].astype(int)
    kept = np.minimum(y, 2).sum() / y.sum()
    assert found["fixed", 3]["figures"]["all"][0] == pytest.approx(kept, abs=1e-4)
    assert all(found[arm, 6]["figures"]["all"][0] == 1.0 for arm in ("fixed", "seeded", "exact", "oracle"))
    for slots in range(2, 7):
        best = found["oracle", slots]["figures"]
        for arm in ("fixed", "seeded", "exact"):
            assert found[arm, slots]["used"] == pytest.approx(slots)
            assert found[arm, slots]["figures"]["all"][0] <= best["all"][0] + 1e-9
    low, high = found["fixed", 3]["figures"]["a"][1:]
    assert low < found["fixed", 3]["figures"]["a"][0] < high
    assert found["raw", None]["used"] >= 1


def test_correlations_are_spearmans_with_intervals_over_prompts(bench: ModuleType) -> None:
    traces = made_up(60, width=6)
    signals = {"mean_gap": traces.accepted.astype(float), "mean_entropy": -traces.accepted.astype(float)}
    signals["expected"] = np.random.default_rng(0).normal(size=len(traces))
    found = bench.correlations(traces, signals, 100, 0)
    assert found["all"]["mean_gap"] == [1.0, 1.0, 1.0]
    assert found["a"]["mean_entropy"] == [-1.0, -1.0, -1.0]
    value, low, high = found["all"]["expected"]
    assert value == pytest.approx(spearman(signals["expected"], traces.accepted), abs=1e-4)
    assert low < 0 < high


def test_distribution_counts_the_bonus_token(bench: ModuleType) -> None:
    assert bench.distribution(np.array([0, 0, 2, 3])) == {"counts": [2, 0, 1, 1], "mean": 2.25, "steps": 4}


def test_the_script_in_miniature(
    bench: ModuleType,
    folders: dict[str, Path],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tiny pair with its predictor: the record makes a report, and --speeds adds to it."""
    bound = drafter_hash(folders["drafter"])
    torch.manual_seed(0)
    width = read_config(folders["predictor"]).width
    Predictor(PredictorConfig(width, bound, features=("confidence",), hidden_units=8)).save(tmp_path / "predictor")
    for name in ("a", "b"):
        rows = [json.dumps({"prompt": f"{name} {number}"}) for number in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    out = tmp_path / "record.json"
    pair = ["--model", folders["target"], "--drafter", folders["drafter"], "--predictor", tmp_path / "predictor"]
    sizes = ["--dtype", "float32", "--limit", "6", "--max-tokens", "8", "--context", "100", "--out", out]
    common = ["cpu_figures", *map(str, (tmp_path / "a.jsonl", tmp_path / "b.jsonl", *pair, *sizes))]
    monkeypatch.setattr(sys, "argv", [*common, "--lanes", "2", "--resamples", "20"])
    bench.main()
    record = json.loads(out.read_text())
    assert record["recorded"] == len(record["steps"]["rows"]) + record["cut"]
    assert {row[0] for row in record["steps"]["rows"]} <= {0, 1}
    for rows in record["widths"]["policies"].values():
        assert len(rows) == 12
        assert all(tokens <= 8 and steps <= tokens for _, _, tokens, steps in rows)
    monkeypatch.setattr(sys, "argv", [*common, "--speeds", "--concurrency", "2", "--runs", "2"])
    bench.main()
    both = json.loads(out.read_text())
    assert both["steps"] == record["steps"]
    order = [run["arm"] for run in both["speeds"]["runs"]]
    assert order == [*order[: len(order) // 2], *order[: len(order) // 2][::-1]]
    titles = [section.title for section in build_report([out], resamples=50).sections]
    assert "Retention before and after allocation" in titles
