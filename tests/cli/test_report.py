"""`dscale report`: files written, JSON told, refusals in one line with exit code 2 and nothing written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dscale.cli.main import run
from tests.evaluate import bench_records, figure_records


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dscale", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0)


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench, figures = tmp_path / "bench.json", tmp_path / "figures.json"
    bench.write_text(json.dumps(bench_records.record(speed={"auto": 80.0}, levels=(1,)).as_json()))
    figures.write_text(json.dumps(figure_records.figures()))
    out, text = tmp_path / "deep" / "report.html", tmp_path / "report.md"
    assert call(monkeypatch, figures, bench, "--out", out, "--markdown", text, "--title", "Ours", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == out.stat().st_size
    assert told["sections"][:2] == ["Headline", "Throughput"]  # benchmarks first, whatever the order given
    assert "One concurrency only (1)." in told["not_measured"]
    assert "<title>Ours</title>" in out.read_text()
    assert text.read_text().startswith("# Ours\n")
    assert call(monkeypatch, bench, "--out", out) == 0
    assert "not measured:" in capsys.readouterr().out


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(bench_records.record(levels=(1,), boots=1).as_json()))
    bad.write_text('{"kind": "bench", "schema": 1}')
    out = tmp_path / "report.html"
    assert call(monkeypatch, good, bad, "--out", out) == 2
    error = capsys.readouterr().err
    assert error == "dscale: bad.json: damaged record of dscale bench: it has no 'row_fields'\n"
    assert not out.exists()
    assert call(monkeypatch, good, tmp_path / "no.json", "--out", out) == 2
    assert capsys.readouterr().err.count("\n") == 1
