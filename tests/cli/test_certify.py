"""`dscale certify` and `dscale reproduce` on SmolLM2, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dscale.cli.main import run
from dscale.evaluate.certificate_record import read_certificates
from dscale.evaluate.reproducibility import read_reproducibility


def dscale(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["dscale", *words])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Count to five.", "Name two fruits.")))
    return path


def test_certify_writes_a_record_and_says_certified(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    smollm2_folder: Path,
    prompts: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "certificate.json"
    words = ["certify", "smollm2-135m", "--policy", "full", "--prompts", str(prompts), "--max-tokens", "12"]
    assert dscale(monkeypatch, *words, "--dtype", "float32", "--seeded", "--out", str(out)) == 0
    record = read_certificates(out)
    assert record.certified
    assert record.exact
    assert [one.scope.temperature for one in record.certificates] == [0.0, 0.8]
    assert all(one.text.equal == 2 for one in record.certificates)
    assert all(one.drafter.differing == 0 for one in record.certificates)
    assert str(tmp_path) not in out.read_text()
    assert record.prompts["workloads"]["asked"]["prompts"] == 2
    assert "CERTIFIED: policy full, blocks of 16, float32 on cpu, greedy, 2 prompts" in capsys.readouterr().out


def test_reproduce_writes_a_record(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    smollm2_folder: Path,
    prompts: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "repeat.json"
    words = ["reproduce", "smollm2-135m", "--policy", "off", "--policy", "full", "--prompts", str(prompts)]
    assert dscale(monkeypatch, *words, "--max-tokens", "8", "--dtype", "float32", "--out", str(out), "--json") == 0
    assert [(arm.arm, arm.diverged) for arm in read_reproducibility(out).arms] == [("off", 0), ("full", 0)]
    assert json.loads(capsys.readouterr().out)["kind"] == "reproducibility"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["certify", "smollm2-135m", "--policy", "quick"], "policy: 'quick' is not known"),
        (["certify", "smollm2-135m", "--base-url", "http://127.0.0.1:9"], "--base-url and --reference-url go together"),
        (["certify", "smollm2-135m", "--seeded", "--temperature", "0"], "--temperature: 0.0 must be positive"),
        (["reproduce", "smollm2-135m", "--base-url", "http://127.0.0.1:9"], "no answer"),
        (["reproduce", "smollm2-135m", "--policy", "quick"], "policy: 'quick' is not known"),
        (["certify", "smollm2-135m", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    smollm2_folder: Path,
    words: list[str],
    message: str,
) -> None:
    assert dscale(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
