"""`dscale train drafter` as a user runs it: killed, full disk, other arguments, two processes."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dscale.config import AnchorLayout
from dscale.models.drafter_checkpoint import load_drafter, target_hashes
from dscale.models.loader import load_target
from dscale.train.artifacts import Stage
from dscale.train.rows import CORPUS, PackedRows, write_rows
from tests.cli.processes import Running, small_disk
from tests.cli.test_commands import dscale, folders  # noqa: F401 (fixtures)

SIZES = ("--preset", "tiny", "--no-tensorboard", "--width", "6", "--layers", "2")


def made_up_rows(count: int, seed: int, length: int = 64) -> PackedRows:
    """Two conversations a row whose answers count upwards."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((count, length), np.int32)
    first = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    answer = np.zeros((count, length), bool)
    for row in range(count):
        for at in (0, 30):
            ids[row, at : at + 28] = 5 + (np.arange(28) + rng.integers(0, 50)) % 50
            first[row, at : at + 28] = at
            answer[row, at + 4 : at + 28] = True
    return PackedRows.plain(ids, first, answer)


def write_corpus(target: Path, folder: Path, parts: tuple[str, ...] = ("train", "validation", "holdout")) -> Path:
    loaded = load_target(str(target), torch.float32)
    stage = Stage.open(folder, CORPUS, {"target": str(target), "target_hashes": target_hashes(loaded)})
    for number, part in enumerate(parts):
        stage.add(write_rows(folder, f"{part}-00000.safetensors", made_up_rows(8, number), part))
    stage.finish({})
    return folder


@pytest.fixture(scope="module")
def corpus(folders, tmp_path_factory) -> Path:  # noqa: F811
    return write_corpus(folders["target"], tmp_path_factory.mktemp("made") / "corpus")


def started(*arguments: object) -> Running:
    """The command in a process of its own, on one core."""
    return Running(*arguments, OMP_NUM_THREADS="1")


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "timing.json"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_tiny_preset_trains_a_drafter_that_loads(folders, corpus, tmp_path, dscale):  # noqa: F811
    out = tmp_path / "out"
    code, said, _ = dscale("train", "drafter", folders["target"], corpus, out, *SIZES, "--evaluate-every", 5, "--json")
    assert code == 0
    summary = json.loads(said)
    assert (summary["steps"], summary["width"], summary["layout"]) == (10, 6, "1+N")
    records = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "validation_progress" in r] == [5, 10]
    assert summary["best_progress"] == max(r.get("validation_progress", 0) for r in records)
    target = load_target(str(folders["target"]), torch.float32)
    drafter = load_drafter(out / "drafter", target, torch.float32)
    assert drafter.config.target_hashes == target_hashes(target)
    assert not any("embed" in name or "head" in name for name in drafter.state_dict())
    before = contents(out)
    assert dscale("train", "drafter", folders["target"], corpus, out, *SIZES, "--evaluate-every", 5)[0] == 0
    assert contents(out) == before


def test_other_dialect_layout_and_start(folders, corpus, tmp_path, dscale):  # noqa: F811
    arguments = ("train", "drafter", folders["target"], corpus)
    flags = ("--dialect", "deepspec", "--layout", "anchor-first", "--init", "target", "--distil", "0.9", "--steps", "4")
    assert dscale(*arguments, tmp_path / "one", *SIZES, *flags)[0] == 0
    target = load_target(str(folders["target"]), torch.float32)
    drafter = load_drafter(tmp_path / "one" / "drafter", target, torch.float32)
    assert (drafter.config.dialect, drafter.config.layout) == ("deepspec", AnchorLayout.ANCHOR_FIRST)
    assert drafter.config.width == 6
    again = ("--init", tmp_path / "one" / "drafter", "--steps", "2", "--preset", "tiny", "--no-tensorboard")
    assert dscale(*arguments, tmp_path / "two", *again)[0] == 0
    assert Stage.load(tmp_path / "two", "dscale.drafter/1").summary["layout"] == "anchor-first"


def test_a_tap_cache_changes_nothing_but_the_time(folders, corpus, tmp_path, dscale):  # noqa: F811
    arguments = ("train", "drafter", folders["target"], corpus)
    flags = (*SIZES, "--steps", "4", "--distil", "0.5")
    assert dscale(*arguments, tmp_path / "online", *flags)[0] == 0
    code, _, error = dscale(*arguments, tmp_path / "cached", *flags, "--cache", tmp_path / "cache")
    assert code == 0
    assert "GB more, the disk has" in error
    assert contents(tmp_path / "cached") == contents(tmp_path / "online")
    (damaged,) = (tmp_path / "cache").glob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    code, _, error = dscale(*arguments, tmp_path / "third", *flags, "--cache", tmp_path / "cache")
    assert (code, error.count("\n")) == (2, 1)
    assert "delete it and run again" in error


def test_tensorboard_gets_every_record(folders, corpus, tmp_path, dscale):  # noqa: F811
    pytest.importorskip("tensorboard")
    flags = [flag for flag in SIZES if flag != "--no-tensorboard"]
    assert dscale("train", "drafter", folders["target"], corpus, tmp_path / "out", *flags, "--steps", "2")[0] == 0
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))
    assert not (tmp_path / "out" / "state.pt").exists()


def test_killed_and_started_again_ends_in_the_same_bytes(folders, corpus, tmp_path):  # noqa: F811
    def arguments(out: str, *more: str) -> tuple[object, ...]:
        return ("train", "drafter", folders["target"], corpus, tmp_path / out, *SIZES, "--steps", "150", *more)

    whole = started(*arguments("whole"))
    broken = started(*arguments("broken", "--save-seconds", "0"))

    def under_way() -> bool:
        saved = (tmp_path / "broken" / "state.pt").exists()
        time.sleep(0.3 if saved else 0)
        return saved

    broken.kill_once(under_way)
    assert Stage.load(tmp_path / "broken", "dscale.drafter/1").summary is None
    again = started(*arguments("broken"))
    assert (again.ended()[0], whole.ended()[0]) == (0, 0)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_full_disk_is_one_line_and_loses_nothing(folders, corpus, tmp_path, dscale, refused):  # noqa: F811
    arguments = ("train", "drafter", folders["target"], corpus, tmp_path / "out", *SIZES)
    with small_disk(30_000):
        assert "state.pt: cannot be written" in refused(*arguments)
    assert dscale(*arguments)[0] == 0
    assert (tmp_path / "out" / "drafter" / "model.safetensors").exists()


@pytest.fixture
def refused(dscale):  # noqa: F811
    """The one line with which a call ends."""

    def call(*arguments: object) -> str:
        code, _, error = dscale(*arguments)
        line = error.splitlines()[-1]
        assert (code, line.startswith("dscale: "), "Traceback" in error) == (2, True, False)
        return line

    return call


def test_refusals_are_one_line(folders, corpus, tmp_path, refused):  # noqa: F811
    out = tmp_path / "out"
    command = ("train", "drafter", folders["target"], corpus, out, *SIZES)
    assert "train.steps, train.epochs, train.seconds" in refused(*command, "--steps", "2", "--seconds", "3")
    assert "mask_token_id: 900 is outside the vocabulary" in refused(*command, "--mask-token", "900")
    assert "train.rows: 20 rows" in refused(*command, "--rows", "20")
    assert "not a dscale.corpus/1 manifest" in refused(
        "train", "drafter", folders["target"], tmp_path, tmp_path / "x", *SIZES
    )


def test_another_target_other_arguments_and_a_corrupt_state(folders, corpus, tmp_path, dscale, refused):  # noqa: F811
    out = tmp_path / "out"
    command = ("train", "drafter", folders["target"], corpus, out, *SIZES, "--steps", "2")
    assert dscale(*command)[0] == 0
    assert f"{out}: was made with train.rate 0.001, now it is 0.5" in refused(*command, "--rate", "0.5")
    stranger = tmp_path / "stranger"
    Stage.open(stranger, CORPUS, {"target": "another", "target_hashes": {"a": "b"}}).finish({})
    assert "was written by another target (another)" in refused(
        "train", "drafter", folders["target"], stranger, tmp_path / "x", *SIZES
    )
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "state.pt").write_bytes(b"\0" * 100)
    damaged = ("train", "drafter", folders["target"], corpus, fresh, *SIZES, "--steps", "2")
    assert "state.pt: corrupt; delete it" in refused(*damaged)


def test_two_processes_write_one_drafter(folders, corpus, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    run = started(
        "train", "drafter", folders["target"], corpus, out, *SIZES, "--steps", "2", "--gpus", "2", "--device", "cpu"
    )
    code, said, error = run.ended()
    assert code == 0, error
    assert said.count("2 steps, W = 6") == 1
    assert Stage.load(out, "dscale.drafter/1", complete=True).inputs["processes"] == 2
