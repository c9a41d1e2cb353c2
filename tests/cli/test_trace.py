"""`dscale trace` as a user runs it: two ways to the same records, resuming, refusing, and recording live traffic."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.models.drafter_checkpoint import random_drafter, save_drafter, target_hashes
from dscale.models.loader import load_target
from dscale.train.artifacts import Stage
from dscale.train.rows import CORPUS, PackedRows, write_rows
from dscale.train.trace_run import TraceConfig, run
from dscale.train.traces import Traces
from tests.cli.processes import Running, small_disk
from tests.cli.test_commands import dscale, folders, refused  # noqa: F401 (fixtures)
from tests.conftest import tiny_drafter_config

CAP = 14
TEXTS = [f"w{i} w{i + 3}" for i in range(7)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Rows of all three kinds."""
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    rows = [{"prompt": text} for text in TEXTS]
    rows[1] = {"turns": [TEXTS[1], "w9"]}
    rows[2] = {"messages": [{"role": "user", "content": TEXTS[2]}]}
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture(scope="module")
def corpus(folders, tmp_path_factory) -> Path:  # noqa: F811
    """The target's greedy answers to the same prompts, two a row; the last conversation was sampled."""
    folder = tmp_path_factory.mktemp("corpus")
    loaded = load_target(str(folders["target"]), torch.float32)
    asked = [loaded.tokenizer.chat([{"role": "user", "content": text}]) for text in [*TEXTS, "w50"]]
    llm = LLM(loaded, policy="off", dtype="float32", device="cpu")
    said = llm.generate(prompt_token_ids=asked, sampling_params=SamplingParams(temperature=0.0, max_tokens=CAP))
    ids, answer = np.zeros((4, 96), np.int32), np.zeros((4, 96), bool)
    first = np.tile(np.arange(96, dtype=np.int32), (4, 1))
    for number, (prompt, output) in enumerate(zip(asked, said, strict=True)):
        row, at, tokens = number // 2, 48 * (number % 2), [*prompt, *output.outputs[0].token_ids]
        ids[row, at : at + len(tokens)] = tokens
        first[row, at : at + len(tokens)] = at
        answer[row, at + len(prompt) : at + len(tokens)] = True
    rows = PackedRows.plain(ids, first, answer)
    rows.greedy[-1] = False
    stage = Stage.open(folder, CORPUS, {"target": "tiny", "target_hashes": target_hashes(loaded)})
    stage.add(write_rows(folder, "holdout-00000.safetensors", rows, "holdout"))
    stage.finish({})
    return folder


def config(folders, **more) -> TraceConfig:  # noqa: F811
    base = {"shard": 2, "max_tokens": CAP, "max_requests": 2, "rows": 2, "anchors": 2, "dtype": "float32"}
    return TraceConfig(str(folders["target"]), str(folders["drafter"]), **(base | {"device": "cpu"} | more))


def command(folders, out: Path, *more: object) -> list[str]:  # noqa: F811
    fixed = ["--shard", 2, "--max-tokens", CAP, "--max-requests", 2, "--rows", 2, "--anchors", 2]
    given = ["trace", folders["target"], folders["drafter"], out, *fixed, "--dtype", "float32", "--device", "cpu"]
    return [*map(str, [*given, *more])]


@pytest.fixture(scope="module")
def whole(folders, corpus, prompts, tmp_path_factory) -> Path:  # noqa: F811
    """The folder of an uninterrupted run over both sources."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(config(folders, corpus=str(corpus), prompts=(f"{prompts}=words",)), out)
    return out


@pytest.fixture
def sources(corpus, prompts) -> list[object]:
    return ["--corpus", corpus, "--prompts", f"{prompts}=words"]


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != "timing.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_both_ways_record_the_same_and_name_where_it_was(whole):
    traces = Traces.open(whole)
    assert traces.workloads == ("corpus", "words")
    walked, served = traces.select(traces.workload == 0), traces.select(traces.workload == 1)
    assert sorted(set(walked.request.tolist())) == list(range(7))  # the sampled eighth was not walked
    assert sorted(set(served.request.tolist())) == list(range(7, 14))
    assert walked.prompt.max() < 8 < served.prompt.min()
    assert len(np.unique(served.prompt)) == 7
    for name in ("drafts", "accepted", "slots", "position"):
        assert np.array_equal(getattr(walked, name), getattr(served, name)), name
    ours, theirs = walked.features.astype(np.float32), served.features.astype(np.float32)
    assert (ours[:, -25] == 8).all()
    assert set(theirs[:, -25]) == {1, 2}
    ours[:, -25] = theirs[:, -25]
    assert np.allclose(ours, theirs, atol=2e-3, rtol=2e-3)
    manifest = json.loads((whole / "manifest.json").read_text())
    assert len(manifest["shards"]) == 8
    assert [one["kind"] for one in manifest["inputs"]["sources"]] == ["corpus", "prompts"]
    assert "/" not in manifest["inputs"]["sources"][0]["name"]


def test_killed_and_run_again_ends_with_the_same_bytes(dscale, folders, sources, whole, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    Running(*command(folders, out, *sources)).kill_once(lambda: list(out.glob("traces-*5.safetensors")))
    assert json.loads((out / "manifest.json").read_text())["summary"] is None
    code, printed, error = dscale(*command(folders, out, *sources, "--json"))
    assert code == 0, error
    assert 4 <= json.loads(printed)["resumed"] <= 7
    assert hashes(out) == hashes(whole)


def test_run_again_changes_nothing_and_says_so(dscale, folders, sources, whole):  # noqa: F811
    before = hashes(whole)
    code, out, _ = dscale(*command(folders, whole, *sources))
    assert code == 0
    assert "complete already" in out
    assert "words" in out
    assert hashes(whole) == before


def test_other_arguments_and_another_drafter_are_refused(dscale, folders, sources, whole, tmp_path):  # noqa: F811
    refused(dscale(*command(folders, whole, *sources, "--lanes", 9)), "lanes 8, now it is 9")
    refused(dscale(*command(folders, whole, *sources, "--groups", "all")), "groups", "hidden")
    target = load_target(str(folders["target"]), torch.float32)
    save_drafter(random_drafter(tiny_drafter_config(target.config), seed=2), tmp_path / "other")
    refused(
        dscale(*command(folders | {"drafter": tmp_path / "other"}, whole, *sources)), "drafter_hash", "another folder"
    )


def test_a_damaged_shard_is_named_and_a_lost_one_made_again(dscale, folders, sources, whole, tmp_path):  # noqa: F811
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    shard = copy / "traces-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    refused(dscale(*command(folders, copy, *sources)), "traces-00004.safetensors", "corrupt", "run again")
    shard.unlink()
    assert dscale(*command(folders, copy, *sources))[0] == 0
    assert hashes(copy) == hashes(whole)


def test_full_disk_is_one_line_and_the_run_goes_on_later(dscale, folders, sources, whole, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    arguments = command(folders, out, *sources)
    with small_disk(5000):
        full = dscale(*arguments)
    refused(full, "cannot be written")
    assert dscale(*arguments)[0] == 0
    assert hashes(out) == hashes(whole)


def test_corpus_of_another_target_is_refused(dscale, folders, corpus, tmp_path):  # noqa: F811
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["inputs"]["target_hashes"]["model.norm.weight"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    refused(dscale(*command(folders, tmp_path / "out", "--corpus", copy)), "another target")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("--corpus", "--prompts")),
        (("--prompts", "nowhere.jsonl"), ("nowhere.jsonl", "cannot be read")),
        (("--prompts", "PROMPTS", "--preset", "huge"), ("--preset", "huge", "tiny, full")),
        (("--prompts", "PROMPTS", "--groups", "moon"), ("groups", "moon", "confidence")),
        (("--prompts", "PROMPTS", "--prompts", "PROMPTS"), ("words", "twice")),
        (("--prompts", "PROMPTS", "--part", "rest"), ("part", "rest", "holdout")),
    ],
)
def test_bad_options(dscale, folders, prompts, tmp_path, arguments, parts):  # noqa: F811
    given = [prompts if one == "PROMPTS" else one for one in arguments]
    refused(dscale(*command(folders, tmp_path / "out", *given)), *parts)


def test_sampled_answers_follow_the_seed(folders, prompts, tmp_path):  # noqa: F811
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(config(folders, prompts=(str(prompts),), temperature=1.0, seed=seed, conversations=4), tmp_path / name)
    a, b, c = (hashes(tmp_path / name) for name in "abc")
    assert a == b
    assert a["traces-00000.safetensors"] != c["traces-00000.safetensors"]


def test_tiny_preset(dscale, folders, corpus, prompts, tmp_path):  # noqa: F811
    pair = [folders["target"], folders["drafter"], tmp_path / "out"]
    both = ["--corpus", corpus, "--prompts", prompts, "--groups", "all", "--preset", "tiny", "--json"]
    code, out, _ = dscale("trace", *pair, *both)
    record = json.loads(out)
    assert code == 0
    assert record["requests"] == 14
    assert record["records"] == len(Traces.open(tmp_path / "out"))
    assert set(record["workloads"]) == {"corpus", "words"}


def test_generate_records_what_it_verifies(dscale, folders, prompts, tmp_path):  # noqa: F811
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    asked = ["generate", "-m", folders["target"], "-d", folders["drafter"], "--dtype", "float32", "--device", "cpu"]
    more = ["--policy", "fixed:6", "--prompts", rows, "--max-tokens", CAP, "--json"]
    code, out, _ = dscale(*asked, *more, "--record", tmp_path / "traffic")
    assert code == 0
    traces = Traces.open(tmp_path / "traffic")
    assert traces.workloads == ("live",)
    assert len(np.unique(traces.request)) == json.loads(out)["requests"] == len(TEXTS)
    refused(dscale(*asked, "--policy", "off", "w1", "--record", tmp_path / "none"), "drafts nothing")
