"""`dscale tune` in miniature: every stage, a bundle that serves, a card from the records, and a kill in between."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dscale.cli.tune import Tuning
from dscale.engine.llm import LLM
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.predictor import read_config
from tests.cli.processes import Running
from tests.cli.test_commands import call, folders

__all__ = ["folders"]
MADE = ("features.json", "corpus", "training", "traces", "predictor", "drafter", "policies", "tuned")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    rows = [{"prompt": " ".join(f"w{(n * k) % 50}" for k in range(1, 7))} for n in range(3, 9)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def arguments(target: Path, out: Path, prompts: Path) -> list[str]:
    return ["tune", str(target), str(out), "--preset", "tiny", "--prompts", f"{prompts}=words", "--answer-cap", "16"]


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of all that a tuning leaves, less what carries times, plots and the measured costs of steps."""
    left = ("timing", "tensorboard", ".png", ".svg", "policies/", "tuned/README", "state.pt")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = {str(path.relative_to(folder)): path for path in files}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in named.items()
        if not any(word in name for word in left)
    }


def start(arguments: list[str]) -> Running:
    return Running(*arguments, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def tuned(folders: dict[str, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "run"
    code, _, error = start(arguments(folders["target"], out, prompts)).ended()
    assert code == 0, error
    return out


def test_every_stage_leaves_its_folder_and_the_bundle_serves(tuned: Path) -> None:
    assert all((tuned / name).exists() for name in MADE)
    bundle = tuned / "tuned"
    made = drafter_hash(bundle / "drafter")
    assert made == drafter_hash(tuned / "training" / "drafter") == read_config(bundle / "predictor").drafter_hash
    llm = LLM(str(bundle), policy="dvl", max_model_len=96, dtype="float32")
    off = LLM(str(bundle), policy="off", max_model_len=96, dtype="float32")
    ids = [[5, 9, 11, 7]]
    assert llm.generate(prompt_token_ids=ids)[0].outputs[0].token_ids == (
        off.generate(prompt_token_ids=ids)[0].outputs[0].token_ids
    )


def test_the_card_quotes_the_records(tuned: Path) -> None:
    card = (tuned / "tuned" / "README.md").read_text()
    record = json.loads((tuned / "drafter" / "record.json").read_text())
    words = record["workloads"]["words"]
    served = words["ways"]["served"]["progress"]["value"]
    assert f"| words | {words['conversations']} | {served:.2f} (" in card
    metrics = json.loads((tuned / "predictor" / "metrics.json").read_text())
    assert f"R² of accepted length {metrics['holdout']['r2']:.3f}" in card
    assert "words.jsonl" in card.split("Prompts kept out of it:")[1].splitlines()[0]
    assert "Any GPU." in card.split("## Not measured")[1]
    assert "ALIGNED" in card


def test_killed_in_the_middle_it_goes_on_and_ends_with_the_same_bytes(
    tuned: Path, folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for stage in ("corpus/manifest.json", "training/manifest.json", "traces/manifest.json"):
        start(arguments(folders["target"], out, prompts)).kill_once((out / stage).exists)
    code, _, error = start(arguments(folders["target"], out, prompts)).ended()
    assert code == 0, error
    assert hashes(out) == hashes(tuned)


def test_other_arguments_are_refused_by_name(tuned: Path, folders, prompts, monkeypatch, capsys) -> None:
    code, _, err = call(monkeypatch, capsys, *arguments(folders["target"], tuned, prompts), "--seed", "5")
    assert code == 2
    assert "was made with corpus dscale corpus" in err
    code, _, err = call(monkeypatch, capsys, "tune", "x", tuned, "--drafter", "d", "--steps", "3")
    assert (code, err) == (2, "dscale: --steps: go with training, but --drafter gives a drafter\n")


def test_a_given_drafter_is_not_trained_again(tmp_path: Path) -> None:
    names = [command.name for command in Tuning("t", tmp_path, "d", "full").commands()]
    assert names == ["features", "corpus", "traces", "predictor", "drafter", "policies"]
    several = Tuning("t", tmp_path, None, "full", gpus=2).commands()
    assert [command.text.startswith("torchrun --nproc-per-node 2 -m dscale corpus") for command in several][1]
