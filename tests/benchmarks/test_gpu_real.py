"""The benchmark with real weights in miniature: a tiny random model on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dscale.evaluate.record_file import rounded

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
MINIATURE = [
    "--model", "random:tiny", "--device", "cpu", "--dtype", "float32", "--count", "3", "--reference-tokens", "8",
    "--exact-tokens", "12", "--output-tokens", "24", "--max-model-len", "120", "--window", "0", "--warm-steps", "2",
    "--repeats", "2", "--concurrency", "2,1", "--cost-concurrency", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def real() -> ModuleType:
    import gpu_real

    return gpu_real


def test_miniature(
    real: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_throughput.LEAST_STEPS", 5)
    monkeypatch.setattr(real, "release", lambda: None)  # nothing to give back, but a search of all that tests hold
    out = tmp_path / "record.json"
    record = real.main([*MINIATURE, "--out", str(out)])
    assert json.loads(out.read_text()) == rounded(json.loads(json.dumps(record)))
    for policy in real.POLICIES:
        found = record["a"]["policies"][policy]
        assert (found["texts"], found["tokens"], found["different"]) == (3, 24, 0)
    exact = record["b"]
    assert (exact["differences"], exact["compared"], exact["skipped"]) == (0, 16, [])
    assert {row["tokens"] for row in exact["rows"]} == {36}
    assert list(record["c"]["cost"]) == ["off", "full", "dvl"]
    cells = record["d"]["cells"]
    assert [(one["concurrency"], one["temperature"]) for one in cells] == [(2, 0), (2, 1), (1, 0), (1, 1)]
    for one in cells:
        assert list(one["arms"]) == list(real.POLICIES)
        assert all(len(arm["runs"]) == 2 for arm in one["arms"].values())
        off, full = one["arms"]["off"]["runs"][0], one["arms"]["full"]["runs"][0]
        assert off["tokens_per_s"] == pytest.approx(off["tokens"] / off["seconds"])
        assert (off["slots_per_request"], full["slots_per_request"] > 8) == (1, True)
        assert 0 < off["running"] <= one["concurrency"]
        assert "note" not in off
    assert "| 2 | 1 |" in capsys.readouterr().out


def test_where_texts_part(real: ModuleType) -> None:
    assert real.first_difference([1, 2], [1, 2]) is None
    assert real.first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert real.first_difference([1, 2], [1, 2, 3]) == 2
    found = real.differences([[1, 2], [3, 3]], [[1, 2], [3, 4]])
    assert found == {"texts": 2, "tokens": 4, "different": 1, "parted_at": {1: 1}}


def test_past_the_time_parts_are_left_out_and_named(real: ModuleType) -> None:
    record = real.main([*MINIATURE, "--parts", "b,c,d", "--seconds", "0"])
    assert record["b"]["compared"] == 0
    assert len(record["b"]["skipped"]) == 10
    assert "c" not in record
    assert "d" not in record
