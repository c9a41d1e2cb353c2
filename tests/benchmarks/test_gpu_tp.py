"""The benchmark of tensor parallel in miniature: two processes on a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dscale.evaluate.record_file import rounded

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def test_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_tp

    monkeypatch.setattr(gpu_tp, "cached_alias", lambda name: None)
    monkeypatch.setattr("gpu_throughput.LEAST_STEPS", 10)
    monkeypatch.setattr(gpu_tp, "GREEDY", replace(gpu_tp.GREEDY, max_tokens=12))
    monkeypatch.setattr(gpu_tp, "SEEDED", replace(gpu_tp.SEEDED, max_tokens=12))
    out = tmp_path / "record.json"
    record = gpu_tp.main([
        "--model", "random:tiny", "--device", "cpu", "--dtype", "float32", "--concurrency", "2,3", "--seconds", "0",
        "--warm-steps", "3", "--prompt-tokens", "20", "--output-tokens", "40", "--arms", "off,control,dvl@6,auto",
        "--limit", "1000", "--out", str(out),
    ])  # fmt: skip
    assert json.loads(out.read_text()) == rounded(record)
    assert record["ranks"] == 2
    assert [(row["policy"], row["sampling"]) for row in record["correctness"]] == [
        (policy, sampling) for policy in ("full", "dvl") for sampling in ("greedy", "seeded")
    ]
    for row in record["correctness"]:
        assert (row["different"], row["ranks_differed"], row["texts"]) == (0, 0, 12)
        assert row["steps_compared"] > 0
    assert [one["concurrency"] for one in record["cells"]] == [2, 3]
    for cell in record["cells"]:
        assert cell["skipped"] == []
        for name, slots in (("off", 1), ("control", 16), ("dvl@6", 6)):
            (run,) = cell["arms"][name]["runs"]
            assert run["slots_per_request"] == pytest.approx(slots)
        assert cell["arms"]["control"]["runs"][0]["mean_progress"] > 2.5
    assert set(record["build_seconds"]) == {"off", "control", "dvl@6", "auto"}
    assert "simulated acceptance" in capsys.readouterr().out
