"""`dscale corpus` on the tiny target: what it leaves, that it goes on where it was killed, and how it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from dscale.cli.corpus import configure
from dscale.models.drafter_checkpoint import target_hashes
from dscale.models.loader import load_target
from dscale.train.artifacts import Stage
from dscale.train.corpus import build_corpus
from dscale.train.rows import answers, load_part
from tests.cli.processes import Running, small_disk
from tests.cli.test_commands import dscale, folders, refused  # noqa: F401

WORDS = [f"w{n}" for n in range(40)]
OPTIONS = ["--preset", "tiny", "--device", "cpu", "--generator", "engine", "--part", 4, "--turn-cap", 6]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """20 rows: single turns, one of them twice, and a conversation."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows: list[dict] = [{"prompt": " ".join(rng.choice(WORDS, 8))} for _ in range(18)]
    talk = [("user", "w1 w2 w3"), ("assistant", "w4"), ("user", "w5 w6 w7")]
    rows += [{"messages": [{"role": role, "content": content} for role, content in talk]}, rows[3]]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def whole(folders, prompts, tmp_path_factory) -> Path:  # noqa: F811
    """A corpus made without interruption."""
    out = tmp_path_factory.mktemp("whole") / "corpus"
    given = {"device": "cpu", "generator": "engine", "part": 4, "turn_cap": 6, "answers": 2, "prompts": [prompts]}
    build_corpus(str(folders["target"]), out, configure("tiny", given))
    return out


def command(folders, out: Path, prompts: Path, *more: object) -> list[str]:  # noqa: F811
    asked = [folders["target"], out, "--prompts", prompts, "--answers", 2, *OPTIONS, *more]
    return ["corpus", *map(str, asked)]


def hashes(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("timing"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_the_corpus_holds_every_prompt_once_in_one_part(folders, whole):  # noqa: F811
    manifest = json.loads((whole / "manifest.json").read_text())
    own = target_hashes(load_target(str(folders["target"]), torch.float32))
    assert manifest["inputs"]["target_hashes"] == own
    assert manifest["inputs"]["target"] == "target"
    assert str(whole) not in json.dumps(manifest)
    assert str(folders["target"]) not in json.dumps(manifest)
    counts = manifest["summary"]["sources"]["p.jsonl"]
    assert counts["asked"] == counts["made"] == 40
    assert counts["kept"] == 38
    assert counts["exact duplicate"] == 2
    parts = {name: load_part(whole, name, own) for name in ("train", "validation", "holdout")}
    ids = [set(rows.prompt.tolist()) for rows in parts.values()]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 19
    assert all(ids)
    for rows in parts.values():
        assert sum(len(answers(row)) for row in rows.answer) == len(rows.prompt)
        assert (np.unique(rows.prompt, return_counts=True)[1] == 2).all()
    assert not (whole / "raw").exists()
    assert json.loads((whole / "timing.json").read_text())["answer_tokens"] > 0


def test_answers_are_the_targets_own(folders, whole):  # noqa: F811
    """Greedy answers equal a dense loop over the conversation up to there."""
    from dscale.layers.attention import DenseAttention
    from dscale.layers.rotary import rotary_table

    target = load_target(str(folders["target"]), torch.float32).model
    decoder, rows, checked = target.config.decoder, load_part(whole, "train"), 0
    table, number = rotary_table(decoder.rope, decoder.head_dim, 128, torch.device("cpu")), 0
    for row in range(len(rows)):
        for start, end in answers(rows.answer[row]):
            greedy, number = rows.greedy[number], number + 1
            first = rows.first[row, start]
            ids = torch.tensor(rows.ids[row, first:end]).long()
            hidden, _ = target(ids, DenseAttention(decoder, table, 1, len(ids)))
            best = target.logits(hidden).argmax(-1)[start - first - 1 : -1]
            if greedy:
                checked += 1
                assert torch.equal(best, ids[start - first :])
    assert checked >= 5


def test_killed_while_answering_it_goes_on_and_ends_with_the_same_bytes(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    out = tmp_path / "corpus"
    Running(*command(folders, out, prompts), OMP_NUM_THREADS="1").kill_once(lambda: list(out.glob("raw/*.json")))
    assert json.loads((out / "manifest.json").read_text())["summary"] is None
    assert 1 <= len(list(out.glob("raw/*.json"))) < 5
    assert dscale(*command(folders, out, prompts))[0] == 0
    assert json.loads((out / "timing.json").read_text())["parts"] < 5
    assert hashes(out) == hashes(whole)


def test_stopped_while_packing_it_ends_with_the_same_bytes(dscale, folders, prompts, whole, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "corpus"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Stage, "finish", stop)
        assert dscale(*command(folders, out, prompts))[0] == 130
    assert (out / "train-000.safetensors").exists()
    assert len(list(out.glob("raw/*.json"))) == 5
    assert dscale(*command(folders, out, prompts))[0] == 0
    assert hashes(out) == hashes(whole)


def test_several_processes_make_the_same_corpus(folders, prompts, whole, tmp_path):  # noqa: F811
    out = tmp_path / "corpus"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    runs = [Running(*command(folders, out, prompts, "--json"), **base, RANK=rank) for rank in ("0", "1")]
    first, second = (run.ended() for run in runs)
    assert (first[0], second[:2]) == (0, (0, "")), first[2] + second[2]
    assert json.loads(first[1])["parts"]["train"]["conversations"] > 0
    assert hashes(out) == hashes(whole)


def test_run_again_it_changes_nothing_and_other_options_are_refused(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    before = hashes(whole)
    arguments = command(folders, whole, prompts)
    code, out, _ = dscale(*arguments)
    assert code == 0
    assert "complete" in out
    refused(dscale(*arguments, "--seed", 1), "was made with seed 0, now it is 1")
    refused(dscale(*arguments, "--temperature", 0.5), "temperature 0.7", "0.5")
    other = tmp_path / "p.jsonl"
    other.write_text(prompts.read_text() + '\n{"prompt": "w1 w9"}')
    changed = command(folders, whole, other)
    refused(dscale(*changed), "was made with sources")
    assert hashes(whole) == before


def test_another_target_and_a_damaged_shard_are_refused(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    from safetensors.torch import load_file, save_file

    stranger = tmp_path / "target"
    shutil.copytree(folders["target"], stranger)
    tensors = load_file(stranger / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, stranger / "model.safetensors", metadata={"format": "pt"})
    arguments = command({"target": stranger}, whole, prompts)
    refused(dscale(*arguments), "was made with target_hashes")
    with pytest.raises(ValueError, match="written by another target"):
        load_part(whole, "train", target_hashes(load_target(str(stranger), torch.float32)))
    broken = tmp_path / "corpus"
    shutil.copytree(whole, broken)
    path = broken / "train-000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    arguments = command(folders, broken, prompts)
    refused(dscale(*arguments), "train-000.safetensors: corrupt")
    path.unlink()
    assert dscale(*arguments)[0] == 0
    assert hashes(broken) == hashes(whole)


def test_a_full_disk_is_one_line_and_loses_nothing(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    out = tmp_path / "corpus"
    with small_disk(3000):
        full = dscale(*command(folders, out, prompts))
    refused(full, "cannot be written")
    assert dscale(*command(folders, out, prompts))[0] == 0
    assert hashes(out) == hashes(whole)


def test_the_tiny_preset_on_a_real_target(dscale, smollm2_folder, tmp_path):  # noqa: F811
    code, printed, _ = dscale(
        "corpus", "smollm2-135m", tmp_path / "corpus", "--preset", "tiny", "--device", "cpu", "--json"
    )
    assert code == 0
    summary = json.loads(printed)
    kept = sum(one["kept"] for one in summary["sources"].values())
    assert 20 <= kept <= 24
    assert sum(part["conversations"] for part in summary["parts"].values()) == kept
    assert all(part["rows"] > 0 for part in summary["parts"].values())
    assert 0.5 < summary["greedy"] < 0.95
    inputs = json.loads((tmp_path / "corpus" / "manifest.json").read_text())["inputs"]
    assert (inputs["target"], inputs["generator"], inputs["dtype"]) == ("smollm2-135m", "engine", "float32")


@pytest.mark.filterwarnings("ignore:only .* tokens a step")  # a random drafter guesses nothing
def test_a_drafter_changes_no_byte_of_the_rows(dscale, folders, prompts, whole, tmp_path):  # noqa: F811
    out = tmp_path / "corpus"
    assert dscale(*command(folders, out, prompts, "--drafter", folders["drafter"]))[0] == 0
    drafted, plain = hashes(out), hashes(whole)
    assert drafted.pop("manifest.json") != plain.pop("manifest.json")
    assert drafted == plain


def test_made_up_sources_and_lanes(dscale, folders, tmp_path):  # noqa: F811
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "corpus"
    made = ["--synthesise", 6, "--templates", 3, "--gym", 2, "--near", 1, "--seed", 2, "--generator", "lanes"]
    options = ["--preset", "tiny", "--device", "cpu", "--lanes", 4, "--turn-cap", 6, "--shortest-turn", 1]
    code, printed, _ = dscale("corpus", folders["target"], out, *options, *made, "--json")
    assert code == 0
    summary = json.loads(printed)
    assert sum(one["asked"] for one in summary["sources"].values()) == 11
    assert summary["sources"]["gym"]["asked"] == 2
    for one in summary["sources"].values():
        assert one["asked"] == one["kept"] + sum(v for k, v in one.items() if k not in ("asked", "made", "kept"))
    kinds = [one["kind"] for one in json.loads((out / "manifest.json").read_text())["inputs"]["sources"]]
    assert kinds == ["synthesise", "templates", "gym"]


def test_evaluation_prompts_are_kept_out(dscale, folders, prompts, tmp_path):  # noqa: F811
    bench = tmp_path / "bench.jsonl"
    first = json.loads(prompts.read_text().splitlines()[0])["prompt"]
    bench.write_text(json.dumps({"turns": ["w9 w9", first]}))
    arguments = command(folders, tmp_path / "corpus", prompts, "--exclude", bench, "--json")
    code, printed, _ = dscale(*arguments)
    assert code == 0
    assert json.loads(printed)["sources"]["p.jsonl"]["evaluation prompt"] == 2


def test_the_command_refuses_what_it_cannot_use(dscale, folders, prompts, tmp_path):  # noqa: F811
    target, out = folders["target"], tmp_path / "corpus"
    refused(dscale("corpus", target, out, "--preset", "huge"), "--preset: 'huge'", "tiny, full")
    refused(dscale("corpus", target, out, "--prompts", tmp_path / "no.jsonl"), "no.jsonl: cannot be read")
    refused(dscale("corpus", target, out, "--preset", "tiny", "--answer-cap", 200), "corpus.row: 256 is under")
    refused(
        dscale("corpus", target, out, "--preset", "tiny", "--drafter", "x", "--generator", "lanes"), "corpus.drafter"
    )
    assert not out.exists()
