"""`dscale evaluate drafter` as a user runs it: the folder it leaves, resuming, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dscale.evaluate.conversations import Answered, one_per_row
from dscale.evaluate.drafter import EvaluateConfig, evaluate_drafter
from dscale.models.drafter_checkpoint import random_drafter, save_drafter, target_hashes
from dscale.models.loader import load_target
from dscale.train.artifacts import Stage
from dscale.train.rows import CORPUS, write_rows
from tests.cli.processes import Running, small_disk
from tests.cli.test_commands import dscale, folders, refused  # noqa: F401 (fixtures)
from tests.conftest import tiny_drafter_config


def command(folders: dict[str, Path], out: Path, prompts: Path, *more: object) -> list[str]:  # noqa: F811
    fixed = ["--dtype", "float32", "--device", "cpu", "--prompts", prompts, "--max-tokens", 20, "--batch", 2]
    return [*map(str, ["evaluate", "drafter", folders["target"], folders["drafter"], out, *fixed, *more])]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"w{i} w{i + 3}"}) for i in range(12)))
    return path


@pytest.fixture(scope="module")
def whole(folders, prompts, tmp_path_factory) -> Path:  # noqa: F811
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    config = EvaluateConfig((str(prompts),), max_tokens=20, batch=2, dtype="float32", device="cpu")
    evaluate_drafter(str(folders["target"]), str(folders["drafter"]), out, config)
    return out


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != "timing.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_record_holds_the_three_ways_and_the_rows_they_are_made_of(whole):
    record = json.loads((whole / "record.json").read_text())
    assert record["schema"] == "dscale.evaluate_drafter/1"
    assert {"dscale", "torch", "transformers", "python"} <= set(record["versions"])
    one = record["workloads"]["words"]
    assert set(one["ways"]) == {"uniform", "re-anchored", "served"}
    assert one["agreement"]["differing_steps"] == 0
    served = [row["served"] for row in record["conversations"]]
    assert served == [row["re-anchored"] for row in record["conversations"]]
    assert one["agreement"]["steps"] == sum(map(len, served)) == one["ways"]["served"]["progress"]["steps"]
    whole_blocks = sum(row["uniform"]["full"] for row in record["conversations"])
    assert one["ways"]["uniform"]["full_depth"]["blocks"][0] == whole_blocks
    assert "| words | 12 |" in (whole / "table.md").read_text()


def test_killed_and_run_again_ends_with_the_same_bytes(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    arguments = command(folders, out, prompts)
    Running(*arguments).kill_once(lambda: list(out.glob("matches-*.safetensors")))
    assert not (out / "record.json").exists()
    assert dscale(*arguments)[0] == 0
    assert hashes(out) == hashes(whole)


def test_run_again_changes_nothing(dscale, folders, prompts, whole):  # noqa: F811
    before = hashes(whole)
    code, out, _ = dscale(*command(folders, whole, prompts))
    assert code == 0
    assert "already complete" in out
    assert hashes(whole) == before


def test_other_arguments_are_refused(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    refused(dscale(*command(folders, whole, prompts, "--limit", 3)), "limit 200, now it is 3")
    refused(dscale(*command(folders, whole, prompts, "--width", 4)), "width 6, now it is 4")
    target = load_target(str(folders["target"]), torch.float32)
    other = save_drafter(random_drafter(tiny_drafter_config(target.config), seed=2), tmp_path / "other")
    refused(dscale(*command(folders | {"drafter": other}, whole, prompts)), "was made with drafter_hash")


def test_a_lost_record_is_made_again_and_a_damaged_shard_named(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in whole.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "record.json").unlink()
    assert dscale(*command(folders, copy, prompts))[0] == 0
    assert hashes(copy) == hashes(whole)
    (copy / "record.json").unlink()
    shard = copy / "matches-words-0001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    refused(dscale(*command(folders, copy, prompts)), "matches-words-0001.safetensors", "corrupt")
    shard.unlink()
    assert dscale(*command(folders, copy, prompts))[0] == 0
    assert hashes(copy) == hashes(whole)


def test_full_disk_is_one_line_and_the_run_goes_on_later(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    arguments = command(folders, out, prompts)
    with small_disk(4096):
        full = dscale(*arguments)
    refused(full, "cannot be written")
    assert not list(out.glob("*.partial"))
    assert dscale(*arguments)[0] == 0
    assert hashes(out) == hashes(whole)


def test_a_corpus_is_matched_without_serving(dscale, folders, tmp_path):  # noqa: F811
    rng = np.random.default_rng(0)
    talks = [Answered(rng.integers(5, 60, 4).tolist(), rng.integers(5, 60, 9).tolist(), None) for _ in range(5)]
    rows = replace(one_per_row(talks, 16), greedy=np.array([True, True, False, True, True]))
    target = load_target(str(folders["target"]), torch.float32)
    stage = Stage.open(tmp_path / "corpus", CORPUS, {"target": "tiny", "target_hashes": target_hashes(target)})
    stage.add(write_rows(stage.folder, "holdout-0.safetensors", rows, "holdout"))
    stage.finish({})
    arguments = ["--corpus", stage.folder, "--batch", 2, "--dtype", "float32", "--device", "cpu", "--json"]
    pair = [folders["target"], folders["drafter"]]
    code, out, _ = dscale("evaluate", "drafter", *pair, tmp_path / "out", *arguments)
    record = json.loads(out)
    assert code == 0
    one = record["workloads"]["holdout"]
    assert one["conversations"] == 4
    assert one["tokens"] == 36
    assert set(one["ways"]) == {"uniform", "re-anchored"}
    assert one["ways"]["uniform"]["full_depth"]["blocks"] == [20] * 5  # 9 tokens hold 5 whole blocks of 5
    assert record["config"]["corpus"]["name"] == "corpus"


def test_tiny_preset_needs_no_prompts(dscale, folders, tmp_path):  # noqa: F811
    pair = [folders["target"], folders["drafter"]]
    code, out, _ = dscale("evaluate", "drafter", *pair, tmp_path / "out", "--preset", "tiny", "--json")
    record = json.loads(out)
    assert code == 0
    assert record["config"]["max_tokens"] == 24
    assert record["workloads"]["built-in"]["conversations"] == 4


def test_bad_options(dscale, folders, prompts, tmp_path):  # noqa: F811
    refused(dscale(*command(folders, tmp_path, prompts, "--preset", "huge")), "'huge'", "tiny, full")
    refused(dscale(*command(folders, tmp_path, prompts, "--width", 9)), "width: 9", "at most 6")
    refused(dscale(*command(folders, tmp_path, prompts, "--prompts", tmp_path / "no.jsonl")), "no.jsonl")
    refused(dscale(*command(folders, tmp_path, prompts, "--corpus", tmp_path / "no")), str(tmp_path / "no"))
    assert not os.listdir(tmp_path)
    code, out, _ = dscale("evaluate", "drafter", "--help")
    assert code == 0
    assert "Example: dscale evaluate drafter" in out
