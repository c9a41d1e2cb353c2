"""`dscale bench` as a user runs it: a stub server, a dead one, failing requests, our engine in a process, manifests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dscale.evaluate.arm_process import free_port
from dscale.evaluate.bench_record import read_record
from dscale.evaluate.inprocess import InProcess
from dscale.evaluate.load import Watcher
from dscale.evaluate.manifest import BenchRequest, Manifest
from dscale.evaluate.peers import Transformers
from tests.cli.test_commands import dscale, folders, refused  # noqa: F401 (fixtures)
from tests.evaluate.stub_server import stub_server

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
SMALL = ("--num-prompts", 4, "--warmup", 1, "--max-tokens", 5)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts in the tiny target's words."""
    file = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w1 w{number} w3"}) for number in (2, 4, 5)))
    return file


def manifest(count: int, max_tokens: int = 6) -> Manifest:
    said = [({"role": "user", "content": f"w{number + 1} w2"},) for number in range(count)]
    return Manifest("m", tuple(BenchRequest(f"r{i}", f"p{i}", "w", one, max_tokens, i) for i, one in enumerate(said)))


def test_a_running_server(dscale, prompts, tmp_path) -> None:  # noqa: F811
    out = tmp_path / "record.json"
    with stub_server() as (url, stub):
        arguments = ["bench", "--base-url", url, "--prompts", prompts, *SMALL, "--concurrency", "1,2", "--out", out]
        code, printed, err = dscale(*arguments, "--json")
        assert code == 0, err
        assert stub.asked == 2 * (1 + 4)
        code, table, err = dscale(*arguments)  # nothing is left to run
        assert code == 0, err
        assert stub.asked == 2 * (1 + 4)
    assert "tokens/s" in err or "the record is in" in table
    record, shown = read_record(out), json.loads(printed)
    assert [cell["concurrency"] for cell in shown["cells"]] == [1, 2]
    assert all(cell["tokens"] == 20 for cell in shown["cells"])
    run = record.runs[0]
    assert shown["cells"][0]["tokens_per_s"] == pytest.approx(20 / run.window_s)
    assert [row.id for row in run.rows] == ["words:0#0", "words:1#0", "words:2#0", "words:0#1"]
    assert (record.manifest["requests"], record.manifest["distinct"]) == (4, 3)
    assert record.arms[0].engine == "vllm"
    assert all(run.client_busy is not None and 0 < run.client_busy <= 1 for run in record.runs)
    assert record.command.startswith("dscale bench")


def test_a_client_that_was_the_limit_says_so(dscale, prompts, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("dscale.evaluate.bench.BUSY_CLIENT", 0.0)
    out = tmp_path / "record.json"
    with stub_server() as (url, _):
        code, _, err = dscale("bench", "--base-url", f"a={url}", "--prompts", prompts, *SMALL, "--concurrency", "2",
                              "--out", out)  # fmt: skip
    assert code == 0
    (note,) = [one for one in read_record(out).notes if "the client used" in one]
    assert note.startswith("a, boot 0, c = 2, run 0: ")
    assert f"dscale bench: {note}" in err


def test_no_throughput_when_a_request_failed(dscale, prompts, tmp_path) -> None:  # noqa: F811
    out = tmp_path / "record.json"
    with stub_server(fail_every=4) as (url, _):
        code, printed, err = dscale("bench", "--base-url", f"bad={url}", "--prompts", prompts, *SMALL, "--out", out)
    assert code == 1
    assert "tokens/s" not in printed + err
    assert "1 requests failed" in err
    assert "bad, c = 1, words:2#0: HTTP 500: out of luck" in err
    assert [row.id for row in read_record(out).runs[0].failed] == ["words:2#0"]


def test_a_dead_server_is_one_line(dscale, prompts) -> None:  # noqa: F811
    url = f"http://127.0.0.1:{free_port()}"
    code, printed, err = dscale("bench", "--base-url", url, "--prompts", prompts, *SMALL, "--concurrency", "1,2")
    assert code == 1
    assert printed == ""
    assert len(err.strip().splitlines()) == 1
    assert "no server answers there" in err


def test_our_engine_in_a_process_of_its_own(dscale, folders, prompts, tmp_path) -> None:  # noqa: F811
    out = tmp_path / "record.json.gz"
    code, printed, err = dscale(
        "bench", "-m", folders["target"], "-d", folders["drafter"], "-p", folders["predictor"], "--dtype", "float32",
        "--policy", "off,full", "--prompts", prompts, *SMALL, "--concurrency", "2", "--out", out, "--json",
    )  # fmt: skip
    assert code == 0, err
    assert "1 boot × 3 prompts you can see ±" in err
    off, full = json.loads(printed)["cells"]
    assert off["progress"] == off["verified"] == 1
    assert full["verified"] == 6  # the drafter's width
    record = read_record(out)
    assert [(arm.name, arm.policy, arm.autoregressive, arm.baseline) for arm in record.arms] == [
        ("off", "off", True, True), ("full", "full", False, False)
    ]  # fmt: skip
    same = [[(row.id, row.output_tokens) for row in run.rows] for run in record.runs]
    assert same[0] == same[1]  # speculation does not change greedy answers
    assert not record.simulated


def test_rows_of_the_engine_agree_with_its_counters(folders) -> None:  # noqa: F811
    settings = {"model": str(folders["target"]), "drafter": str(folders["drafter"]), "predictor": "none",
                "policy": "full", "dtype": "float32"}  # fmt: skip
    arm = InProcess(settings, manifest(5), 2)
    arm.warm_up()
    for rate in (None, 500.0):
        measured, counters = arm.run(rate, 0, Watcher())
        assert [row.id for row in measured.rows] == [f"r{i}" for i in range(5)]
        for name, own in (("accepted", "accepted"), ("verified", "verified"), ("drafted", "drafted"),
                          ("request_steps", "steps"), ("tokens", "output_tokens")):  # fmt: skip
            assert counters[name] == sum(getattr(row, own) for row in measured.rows)
        assert sum(counters["accepted_by_position"]) == counters["accepted"]
        assert measured.window_s == max(row.ended_s for row in measured.rows)
    begun = sorted(row.sent_s for row in arm.run(None, 0, Watcher())[0].rows)
    assert begun[1] < begun[2]  # the third waits for one of the first two


def test_transformers_answers_in_batches_as_our_engine_does(folders) -> None:  # noqa: F811
    settings = {"model": str(folders["target"]), "dtype": "float32"}
    ours = InProcess(settings | {"policy": "off", "drafter": "none"}, manifest(5, 20), 1)
    want = [row.output_tokens for row in ours.run(None, 0, Watcher())[0].rows]
    theirs, _ = Transformers(settings, manifest(5, 20), 2).run(None, 0, Watcher())
    assert [row.output_tokens for row in theirs.rows] == want
    assert theirs.rows[0].sent_s == theirs.rows[1].sent_s < theirs.rows[1].ended_s <= theirs.rows[2].sent_s
    plain, counted = Transformers(settings, manifest(2, 20), 1).run(None, 0, Watcher())
    assert [row.steps for row in plain.rows] == [row.output_tokens for row in plain.rows] == want[:2]
    assert counted["accepted"] == 0
    lookup, counted = Transformers(settings | {"prompt_lookup_num_tokens": 3}, manifest(2, 20), 1).run(
        None, 0, Watcher()
    )
    assert [row.output_tokens for row in lookup.rows] == want[:2]
    assert counted["accepted"] == sum(row.accepted or 0 for row in lookup.rows)


def test_a_manifest_is_saved_and_used(dscale, prompts, tmp_path) -> None:  # noqa: F811
    file = tmp_path / "manifest.json"
    base = ["bench", "-m", "any", "--prompts", prompts, *SMALL]
    code, printed, err = dscale(*base, "--save-manifest", file, "--json")
    assert code == 0, err
    saved = json.loads(printed)
    with stub_server() as (url, stub):
        use = ["bench", "--base-url", url, "--manifest", file]
        code, printed, err = dscale(*use, "--json")
        assert code == 0, err
        assert json.loads(printed)["manifest"]["sha256"] == saved["sha256"]
        code, printed, _ = dscale(*use, "--num-prompts", 2, "--json")
        assert code == 0
        assert json.loads(printed)["manifest"]["requests"] == 2
        assert stub.bodies[-1]["max_tokens"] == 5
        refused(dscale(*use, "--max-tokens", 9), "--max-tokens: the manifest has its own")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("nothing to measure", "--base-url", "--plan")),
        (("--base-url", "localhost:80"), ("--base-url localhost:80", "http://")),
        (("--base-url", "http://x", "--policy", "off"), ("--policy: is for our engine",)),
        (("-m", "x", "--prompts", "no.jsonl"), ("no.jsonl", "neither a file nor a known set")),
        (("-m", "x", "--num-prompts", "0"), ("--num-prompts: 0",)),
        (("-m", "x", "--concurrency", "1,x"), ("--concurrency: '1,x'",)),
        (("-m", "x", "--concurrency", "0"), ("concurrency must be 1",)),
        (("-m", "x", "--rate", "0"), ("rate 0.0 must be positive",)),
        (("-m", "x", "--api-key-variable", "NO_SUCH_VARIABLE"), ("NO_SUCH_VARIABLE is not set",)),
        (("--plan", "none.toml"), ("none.toml", "cannot be read as a plan")),
        (("--plan", "none.toml", "-m", "x"), ("--plan: has its own arms",)),
        (("-m", "no/such/model", *map(str, SMALL)), ("no/such/model",)),
    ],
)
def test_bad_options(dscale, arguments, parts) -> None:  # noqa: F811
    refused(dscale("bench", *arguments), *parts)


def test_no_figure_of_the_table_is_cut(capsys, monkeypatch) -> None:
    """Long names and several runs, in a terminal of 60 columns. A name is no markup."""
    from dscale.cli.bench import _tell

    monkeypatch.setenv("COLUMNS", "60")
    record, name = read_record(RECORDS / "server_overhead.json"), f"served [auto], {'x' * 150}"
    arms = tuple(replace(arm, name=arm.name.replace("served auto, whole", name)) for arm in record.arms)
    runs = tuple(replace(run, arm=run.arm.replace("served auto, whole", name)) for run in record.runs)
    _tell(replace(record, arms=arms, runs=runs), None, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert f"{name} 1 341.7 315.5…372.7 0.36 0.47 – 4.32 8.13 10.96".split() in [line.split() for line in lines]
