"""`dscale evaluate policies` as a user runs it, on made-up traces and on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dscale.evaluate.cost_curve import TimedStep, to_record
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.predictor import Predictor, PredictorConfig
from dscale.train.artifacts import MANIFEST, write_json
from tests.cli.processes import Running, small_disk
from tests.cli.test_commands import dscale, folders, refused  # noqa: F401 (fixtures)
from tests.evaluate.traces import made_up, save

SAME = ("record.json", "table.md", "manifest.json", "costs.json", "policies.png", "policies.svg")
FAST = ("--preset", "tiny", "--concurrency", "2,4", "--budgets", "2,3,5")


@pytest.fixture(scope="module")
def made(tmp_path_factory, folders) -> dict[str, Path]:  # noqa: F811
    """Traces that name the tiny pair, a predictor for its drafter, and a cost table."""
    root = tmp_path_factory.mktemp("policies")
    bound = drafter_hash(folders["drafter"])
    traces = save(made_up(40), root / "traces", drafter_hash=bound, target=str(folders["target"]))
    torch.manual_seed(0)
    Predictor(PredictorConfig(6, bound, features=("confidence",), hidden_units=8)).save(root / "predictor")
    steps = [TimedStep(n, 6 if w else 1, n * max(w, 1), 1 + 0.02 * n * w, 0.01) for n in (2, 4) for w in (0, 2, 6)]
    write_json(root / "costs.json", to_record(steps, device="cuda", dtype="bfloat16", model="made up", width=6))
    return {"traces": traces, "predictor": root / "predictor", "costs": root / "costs.json"}


def arguments(made: dict[str, Path], out: Path, *more: object) -> list[object]:
    own = ["--predictor", made["predictor"], "--costs", made["costs"], *FAST]
    return ["evaluate", "policies", made["traces"], out, *own, *more]


def test_record_table_and_plots_and_a_second_run(dscale, made, tmp_path) -> None:  # noqa: F811
    code, out, err = dscale(*arguments(made, tmp_path / "out", "--json"))
    assert code == 0, err
    record = json.loads(out)
    assert record["schema"] == "dscale.evaluate_policies/1"
    assert (record["already"], record["traces"]["part"], record["traces"]["prompts"]) == (False, "all", 20)
    for lanes, one in record["concurrency"].items():
        assert one["records"] == one["steps"] * int(lanes)
        assert all(one["checks"].values())
        names = {arm["policy"] for arm in one["arms"]}
        assert names >= {"off", "full", "fixed:2", "confidence", "dspark", "dvl seeded", "dvl exact", "auto", "oracle"}
        by_name = {(arm["policy"], arm["slots"]): arm["figures"]["all"] for arm in one["arms"]}
        assert by_name[("full", 6)]["retention"] == [1, 1, 1]
        assert by_name[("dvl exact", 3)]["slots"][0] == 3
        assert set(one["arms"][0]["figures"]) == {"all", "a", "b"}
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| dvl exact, 3 | 3.00 |" in table
    assert "Recorded steps stand where" in table
    kept = {name: (tmp_path / "out" / name).read_bytes() for name in SAME}
    code, out, _ = dscale(*arguments(made, tmp_path / "out"))
    assert code == 0
    assert "complete already" in out
    assert {name: (tmp_path / "out" / name).read_bytes() for name in SAME} == kept
    code, _, _ = dscale(*arguments(made, tmp_path / "again"))
    assert {name: (tmp_path / "again" / name).read_bytes() for name in SAME} == kept
    refused(dscale(*arguments(made, tmp_path / "out", "--seed", 5)), "seed 0, now it is 5")
    (tmp_path / "again" / "record.json").write_text("{}")
    refused(dscale(*arguments(made, tmp_path / "again")), "record.json", "delete it and run again")
    (tmp_path / "again" / "record.json").unlink()
    assert dscale(*arguments(made, tmp_path / "again"))[0] == 0
    assert {name: (tmp_path / "again" / name).read_bytes() for name in SAME} == kept


def test_without_a_predictor_costs_are_measured_and_dvl_is_left_out(dscale, made, folders, tmp_path) -> None:  # noqa: F811
    own = ["evaluate", "policies", made["traces"], tmp_path / "out", "-d", folders["drafter"], "--preset", "tiny"]
    own += ["--dtype", "float32"]
    code, out, err = dscale(*own)
    assert code == 0, err
    assert "dvl is left out" in out
    costs = json.loads((tmp_path / "out" / "costs.json").read_text())
    assert (costs["model"], costs["width"], costs["dtype"]) == (str(folders["target"]), 6, "float32")
    assert {one["live"] for one in costs["steps"]} == {2}
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["concurrency"]["2"]["auto_scores"] == "confidence"
    assert not any(arm["policy"].startswith("dvl") for arm in record["concurrency"]["2"]["arms"])


def test_holdout_is_what_the_predictor_did_not_see(dscale, made, tmp_path) -> None:  # noqa: F811
    import hashlib
    import shutil

    fitted = tmp_path / "fitted"
    shutil.copytree(made["predictor"], fitted)
    digest = hashlib.sha256((made["traces"] / MANIFEST).read_bytes()).hexdigest()
    write_json(fitted / MANIFEST, {"inputs": {"traces": [digest], "holdout": 0.5, "validation": 0.1, "seed": 3}})
    base = ["evaluate", "policies", made["traces"], tmp_path / "out", "--costs", made["costs"], *FAST, "--json"]
    code, out, err = dscale(*base, "-p", fitted, "--concurrency", "2")
    assert code == 0, err
    traces = json.loads(out)["traces"]
    assert traces["part"] == "holdout"
    assert 5 <= traces["prompts"] <= 15
    assert traces["used"] < traces["records"]


def test_killed_and_started_again(dscale, made, tmp_path) -> None:  # noqa: F811
    Running(*arguments(made, tmp_path / "out", "--json")).kill_once((tmp_path / "out" / "costs.json").exists)
    for out in ("out", "whole"):
        assert dscale(*arguments(made, tmp_path / out, "--json"))[0] == 0
    for name in SAME:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_full_disk(dscale, made, tmp_path) -> None:  # noqa: F811
    with small_disk(4000):
        full = dscale(*arguments(made, tmp_path / "out"))
    refused(full, "cannot be written")
    assert dscale(*arguments(made, tmp_path / "out"))[0] == 0


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--concurrency", "8,x"), ("--concurrency: '8,x'", "numbers")),
        (("--concurrency", "41"), ("concurrency: 41", "only 40")),
        (("--budgets", "5,3"), ("budgets: [5, 3]", "ascending")),
        (("--part", "train"), ("part: 'train'", "holdout")),
        (("--preset", "big"), ("preset: 'big'", "tiny, full")),
        (("--predictor", "no/such"), ("no/such", "o such file")),
        (("--costs", "no/such"), ("no/such", "o such file")),
        (("--concurrency", "3"), ("no plain steps of 3 requests were timed", "[2, 4]")),
    ],
)
def test_bad_options(dscale, made, tmp_path, more, parts) -> None:  # noqa: F811
    refused(dscale(*arguments(made, tmp_path / "out", *more)), *parts)
    assert not (tmp_path / "out").exists()  # so the corrected command can use the folder


def test_wrong_drafter_and_predictor(dscale, made, folders, tmp_path) -> None:  # noqa: F811
    other = save(made_up(40), tmp_path / "traces", drafter_hash="f" * 64, target=str(folders["target"]))
    own = ["evaluate", "policies", other, tmp_path / "out", *FAST]
    refused(dscale(*own, "-d", folders["drafter"]), "was recorded with " + "f" * 64)
    own[3] = tmp_path / "another"
    refused(dscale(*own, "-p", made["predictor"], "--costs", made["costs"]), "fitted for drafter", "f" * 64)


def test_traces_of_trimmed_blocks_are_refused(dscale, made, tmp_path) -> None:  # noqa: F811
    from dataclasses import replace

    traces = made_up(40)
    cut = replace(traces, slots=(traces.accepted + 1).astype(traces.slots.dtype))
    folder = save(cut, tmp_path / "traces", drafter_hash=None)
    own = ["evaluate", "policies", folder, tmp_path / "out", "--costs", made["costs"], *FAST]
    refused(dscale(*own), "were not verified to their end", "record with policy full")
