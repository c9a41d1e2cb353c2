"""The benchmark of the host's share in miniature: a tiny model with a tokenizer of bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dscale.evaluate.record_file import rounded
from tests.models.test_tokenizer import BYTES

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def test_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import host_share

    monkeypatch.setattr(host_share, "long_text", lambda loaded, path: BYTES.encode("Wörter und Sätze. " * 20))
    out = tmp_path / "record.json"
    record = host_share.main([
        "--model", "random:tiny", "--dtype", "float32", "--predictor", "random", "--policies", "off,full,dvl,auto",
        "--requests", "2,3", "--steps", "12", "--warm", "3", "--answer", "20", "--out", str(out),
    ])  # fmt: skip
    assert json.loads(out.read_text()) == rounded(record)
    assert [(one["policy"], one["requests"]) for one in record["cells"]] == [
        (policy, requests) for policy in ("off", "full", "dvl", "auto") for requests in (2, 3)
    ]
    for one in record["cells"]:
        assert one["least_ms"] <= one["median_ms"]
        assert sum(one["parts_ms"].values()) > 0
        if one["policy"] == "off":
            assert 0.9 < one["tokens_a_step"] <= 1
        elif one["policy"] == "full":
            assert one["tokens_a_step"] > 2
            assert one["answers"] >= 2
            assert one["parts_ms"]["prefill"] > 0
    assert "full        3 requests" in capsys.readouterr().out
