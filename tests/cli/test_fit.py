"""`dscale fit` as a user runs it: the folder it leaves, killed and resumed, refused input, warm starts."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dscale.cli.main import run
from dscale.models.drafter_checkpoint import drafter_hash, random_drafter, save_drafter
from dscale.speculation.predictor import Predictor
from tests.cli.processes import Running, small_disk
from tests.conftest import tiny_config, tiny_drafter_config
from tests.train.made_up_traces import made_up, write_folder

EVERY = ("confidence", "hidden", "logits", "context")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(random_drafter(tiny_drafter_config(tiny_config("llama")), seed=1), folder)
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory, drafter) -> Path:
    return write_folder(tmp_path_factory.mktemp("traces"), made_up(1200), drafter_hash(drafter))


@pytest.fixture
def fit(monkeypatch, capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dscale", "fit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the times."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "timing.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_leaves_a_predictor_folder_with_its_figures(fit, traces, drafter, tmp_path):
    out = tmp_path / "out"
    code, text, _ = fit(traces, out, "-d", drafter, "--preset", "tiny", "--rate", 0.02)
    assert code == 0
    assert "held-out prompts" in text
    predictor = Predictor.load(out, drafter_hash(drafter))
    assert predictor.config.hidden_units == 16
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["schema"] == "dscale.fit/1"
    assert metrics["holdout"]["r2"] > 0.8
    assert predictor.config.metrics["r2"] == metrics["holdout"]["r2"]
    assert sum(metrics["records"].values()) == 1200
    assert set(metrics["by_workload"]) == {"even", "odd"}
    assert [row["position"] for row in metrics["positions"]] == [1, 2, 3]
    assert metrics["required"]["slots"] == 4
    assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["schema"] == "dscale.predictor/1"
    assert manifest["inputs"]["drafter_hash"] == drafter_hash(drafter)
    before = hashes(out)
    code, text, _ = fit(traces, out, "-d", drafter, "--preset", "tiny", "--rate", 0.02)
    assert code == 0
    assert "complete already" in text
    assert hashes(out) == before
    code, _, error = fit(traces, out, "-d", drafter, "--preset", "tiny", "--rate", 0.03)
    assert code == 2
    assert "rate 0.02, now it is 0.03" in error
    assert error.count("\n") == 1


def test_several_folders_are_joined_and_need_not_be_in_order(fit, drafter, tmp_path):
    bound = drafter_hash(drafter)
    one, two = (write_folder(tmp_path / f"t{seed}", made_up(500, seed=seed), bound) for seed in (1, 2))
    code, text, _ = fit(one, two, tmp_path / "out", "-d", drafter, "--preset", "tiny", "--json")
    assert code == 0
    assert sum(json.loads(text)["records"].values()) == 1000


def test_killed_and_started_again_ends_with_the_same_bytes(fit, drafter, tmp_path):
    traces = write_folder(tmp_path / "traces", made_up(800, groups=EVERY), drafter_hash(drafter))
    command = [str(traces), "-d", str(drafter), "--preset", "tiny", "--device", "cpu", "--compare"]
    command += ["--epochs", "6", "--hidden-units", "4"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    Running("fit", command[0], cut, *command[1:]).kill_once((cut / "compare-full.safetensors").exists)
    assert not (cut / "metrics.json").exists()
    for out in (cut, whole):
        code, text, error = fit(command[0], out, *command[1:])
        assert code == 0, error
    assert hashes(cut) == hashes(whole)
    assert "hazard path history (offline)" in text
    table = json.loads((whole / "metrics.json").read_text())["comparison"]["variants"]
    assert table["base"]["r2"]["difference"]["value"] == 0
    assert table["full"]["inputs"] == 114 * 3 + 25


def test_start_and_never_worse(fit, traces, drafter, tmp_path):
    code, *_ = fit(traces, tmp_path / "good", "-d", drafter, "--rate", 0.02, "--epochs", 12, "--hidden-units", 8)
    assert code == 0
    # Traffic of the same kind, half of its blocks cut: whichever predicts the held-out prompts better is kept.
    live = made_up(900, seed=5)
    slots = np.where(np.arange(900) % 2 == 0, 4, 3).astype(np.int16)
    live = replace(live, slots=slots, accepted=np.minimum(live.accepted, slots - 1).astype(np.int16))
    folder = write_folder(tmp_path / "live", live, drafter_hash(drafter))
    options = ("-d", drafter, "--start", tmp_path / "good", "--never-worse", "--json")
    code, text, error = fit(folder, tmp_path / "refit", *options)
    assert code == 0, error
    record = json.loads(text)
    better = record["new"]["log_loss"] < record["old"]["log_loss"]
    assert record["kept"] == ("new" if better else "old")
    assert record["holdout"] == record[record["kept"]]
    assert Predictor.load(tmp_path / "refit", drafter_hash(drafter)).config.hidden_units == 8
    # A fit that does not move is not better: the old weights stay, to the bit.
    code, text, _ = fit(folder, tmp_path / "still", *options, "--rate", 1e-12, "--epochs", 1)
    assert code == 0
    assert json.loads(text)["kept"] == "old"
    old = Predictor.load(tmp_path / "good", None).state_dict()
    kept = Predictor.load(tmp_path / "still", None).state_dict()
    assert all((old[name] == kept[name]).all() for name in old)


def test_input_is_refused_in_one_line(fit, traces, drafter, tmp_path):
    stranger = write_folder(tmp_path / "stranger", made_up(100), "0" * 64)
    wider = write_folder(tmp_path / "wider", made_up(100, width=6), drafter_hash(drafter))
    corrupt = write_folder(tmp_path / "corrupt", made_up(100), drafter_hash(drafter))
    shard = corrupt / "traces-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    out = tmp_path / "out"
    for arguments, message in (
        ((stranger, out), "traces of drafter 0000"),
        ((traces, wider, out), "width 6"),
        ((corrupt, out), "corrupt"),
        ((tmp_path / "nowhere", out), "nowhere"),
        ((traces,), "output folder"),
        ((traces, out, "--preset", "huge"), "allowed are tiny, full"),
        ((traces, out, "--features", "colour"), "colour"),
        ((traces, out, "--features", "hidden"), "hidden wanted"),
        ((traces, out, "--never-worse"), "--start"),
        ((traces, out, "--head", "tail"), "survival, hazard"),
        ((traces, out, "--device", "abacus"), "allowed are auto, cpu"),
    ):
        code, _, error = fit(*arguments, "-d", drafter)
        assert code == 2, arguments
        assert message in error
        assert error.count("\n") == 1
    assert not (out / "predictor.safetensors").exists()


def test_a_full_disk_is_one_line(fit, traces, drafter, tmp_path):
    out = tmp_path / "out"
    with small_disk(3000):
        code, _, error = fit(traces, out, "-d", drafter, "--preset", "tiny")
    assert code == 2
    assert "cannot be written" in error
    assert error.count("\n") == 1
    assert not list(out.rglob("*.partial"))


def test_a_damaged_result_is_told_and_made_again(fit, traces, drafter, tmp_path):
    out = tmp_path / "out"
    arguments = (traces, out, "-d", drafter, "--preset", "tiny")
    fit(*arguments)
    before, weights = hashes(out), out / "predictor.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, _, error = fit(*arguments)
    assert code == 2
    assert "corrupt" in error
    weights.unlink()
    assert fit(*arguments)[0] == 0
    assert hashes(out) == before
