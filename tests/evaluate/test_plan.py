"""Plans: what a TOML file means and what is refused, the order of turns, servers started and stopped, going on."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from dscale.config import InputError
from dscale.evaluate.arm_process import ArmGone, ServerProcess, free_port
from dscale.evaluate.arm_start import Starter
from dscale.evaluate.bench import NOT_UP, Bench, View, new_record, take_up
from dscale.evaluate.bench_record import Run, read_record
from dscale.evaluate.bench_summary import cells
from dscale.evaluate.manifest import BenchRequest, Manifest
from dscale.evaluate.plan import Arm, Plan, blocked, filled, read_plan, turns
from dscale.evaluate.record_file import write_record

STUB = str(Path(__file__).with_name("stub_server.py"))
REQUESTS = tuple(
    BenchRequest(f"r{i}", f"p{i}", "w", ({"role": "user", "content": str(i)},), 4, i) for i in range(4)
)  # fmt: skip
WORK = Manifest("four", REQUESTS, (BenchRequest("warm", "p0", "w", ({"role": "user", "content": "w"},), 2, 0),))


def stub(name: str, *more: str, **fields: object) -> Arm:
    command = ("{python}", STUB, "--port", "{port}", "--cap", "{concurrency}", *more)
    return Arm(name, command=command, **fields)  # type: ignore[arg-type]


def bench(plan: Plan, folder: Path, view: View | None = None) -> Bench:
    out = folder / "record.json"
    record = take_up(new_record(plan, WORK, "test"), out)
    return Bench(Starter(plan, WORK, folder / "logs"), record, out, view or View())


def order(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(turn.arm.name, turn.concurrency, turn.boot, turn.run) for turn in turns(plan)]


def test_arms_alternate_over_boots() -> None:
    plan = Plan((stub("a"), stub("b")), concurrency=(1, 2), boots=2)
    assert [one[0] for one in order(plan)] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert [one[1:3] for one in order(plan)][:4] == [(1, 0), (1, 0), (2, 0), (2, 0)]
    shared = Arm("c", command=("serve", "{port}"))  # one process for all concurrencies
    assert order(Plan((shared, stub("b")), concurrency=(1, 2)))[:2] == [("c", 1, 0, 0), ("c", 2, 0, 0)]
    only = Plan((stub("a"), stub("b", concurrency=(2,))), concurrency=(1, 2))
    assert [one[:2] for one in order(only)] == [("a", 1), ("a", 2), ("b", 2)]


def test_arms_that_stay_up_together_alternate_over_runs() -> None:
    plan = Plan((stub("a"), stub("b")), runs=4, together=True)
    assert "".join(one[0] for one in order(plan)) == "abbaabba"
    assert blocked(plan) is None
    assert "one boot" in str(blocked(Plan((stub("a"), stub("b")), runs=4)))


def test_a_plan_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "x"}\n')
    file = tmp_path / "plan.toml"
    file.write_text(
        'prompts = ["mine.jsonl=own", "built-in"]\nconcurrency = [1, 4]\nboots = 3\nnum_prompts = 7\nmax_tokens = 9\n'
        '[[arms]]\nname = "vllm"\nengine = "vllm"\ncommand = ["${SERVER}", "--port", "{port}"]\nbaseline = true\n'
        'family = "f"\n[[arms]]\nname = "ours"\nsettings = {model = "smollm2-135m", policy = "off"}\n'
    )
    plan = read_plan(file)
    assert plan.prompts == (f"{tmp_path / 'mine.jsonl'}=own", "built-in")
    assert (plan.concurrency, plan.boots, plan.wanted.requests, plan.wanted.max_tokens) == ((1, 4), 3, 7, 9)
    theirs, ours = (arm.info() for arm in plan.arms)
    assert (theirs.engine, theirs.baseline, theirs.family, theirs.autoregressive) == ("vllm", True, "f", False)
    assert theirs.settings["command"] == ["${SERVER}", "--port", "{port}"]  # no path of this machine
    assert (ours.engine, ours.policy, ours.autoregressive) == ("dscale", "off", True)
    assert plan.only(["ours"]).arms == plan.arms[1:]
    monkeypatch.setenv("SERVER", "/bin/server")
    assert filled("${SERVER} {port} {x}", {"port": "80"}, "arm") == "/bin/server 80 {x}"
    monkeypatch.delenv("SERVER")
    with pytest.raises(InputError, match="arm: environment variable SERVER is not set"):
        filled("${SERVER}", {}, "arm")
    with pytest.raises(InputError, match="--arms: 'none' is not in the plan; it has vllm, ours"):
        plan.only(["none"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms = 3", "arms are"),
        ("boots = 2", "no arms"),
        ("[[arms]]\nengine = 'vllm'", "has no name"),
        ("[[arms]]\nname = 'a'", "arm a: has nothing"),
        ("[[arms]]\nname = 'a'\nbase_url = 'x:8000'", "arm a: base_url 'x:8000' must begin with http://"),
        ("[[arms]]\nname = 'a'\ncommand = ['x']", "no {port}"),
        ("[[arms]]\nname = 'a'\ncommand = 'x'", "command: 'x' has the wrong type"),
        ("[[arms]]\nname = 'a'\nsettings = {model = 'm', polcy = 'off'}", "setting 'polcy' is not known"),
        ("[[arms]]\nname = 'a'\nsettings = {policy = 'off'}", "no model"),
        ("[[arms]]\nname = 'a'\nengine = 'tgi'\nbase_url = 'http://x'", "engine 'tgi'"),
        ("conc = [1]\n[[arms]]\nname = 'a'\nbase_url = 'http://x'", "key 'conc' is not known"),
        ("boots = '2'\n[[arms]]\nname = 'a'\nbase_url = 'http://x'", "boots: '2' has the wrong type"),
        ("boots = 2\n[[arms]]\nname = 'a'\nbase_url = 'http://x'", "runs already"),
        ("concurrency = [0]\n[[arms]]\nname = 'a'\nbase_url = 'http://x'", "concurrency must be 1"),
        ("not toml", "cannot be read as a plan"),
    ],
)
def test_bad_plans(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_plan(file)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_plan_of_the_peers_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSCALE_PROMPTS", str(tmp_path))
    plan = read_plan(Path(__file__).parents[2] / "benchmarks" / "peers_cpu.toml")
    families = [arm.family for arm in plan.arms]
    assert families.count("vllm") == 6
    assert [arm.name for arm in plan.arms if arm.baseline] == ["vllm"]
    assert {arm.engine for arm in plan.arms if arm.per_concurrency} == {"transformers"}  # servers are started once


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    process = ServerProcess([sys.executable, "-c", script], {}, tmp_path / "log")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    assert alive(child)
    process.stop()
    assert process.process.poll() is not None
    until = time.monotonic() + 5
    while alive(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(child)


def test_a_server_that_ends_or_never_answers_is_told(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ended = ServerProcess([sys.executable, "-c", "print('no memory'); raise SystemExit(3)"], {}, tmp_path / "log")
    with pytest.raises(ArmGone, match=r"ended with code 3 before it answered; its log: .*log"):
        ended.wait_until_up(url, 30)
    assert "no memory" in (tmp_path / "log").read_text()
    silent = ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log")
    with pytest.raises(ArmGone, match=r"did not answer within 0.5 s"):
        silent.wait_until_up(url, 0.5)
    silent.stop()
    with pytest.raises(InputError, match="cannot be started"):
        ServerProcess(["no/such/server"], {}, tmp_path / "log")


def test_a_plan_runs_and_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    plan = Plan((stub("a", baseline=True), stub("b")), concurrency=(1, 2), boots=2)

    class Stop(View):
        def ended(self, run: Run) -> None:
            if run.order == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(plan, tmp_path, Stop()).go()
    kept = read_record(tmp_path / "record.json")
    assert [(run.arm, run.concurrency, run.boot) for run in kept.runs] == [("a", 1, 0), ("b", 1, 0), ("a", 2, 0)]
    second = bench(plan, tmp_path)
    assert len(second.todo()) == 5
    made = second.go()
    assert read_record(tmp_path / "record.json") == made
    assert made.runs[:3] == kept.runs
    assert [run.order for run in made.runs] == list(range(8))
    assert [run.arm for run in made.runs] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert all(run.counters["tokens"] == 16 for run in made.runs)
    assert [cell.tokens for cell in cells(made)] == [32] * 4
    assert made.arm("a").engine == "vllm"  # as its metrics tell
    assert (tmp_path / "logs" / "a-c1-boot0.log").exists()
    assert bench(plan, tmp_path).todo() == []


def test_another_manifest_or_setting_does_not_go_into_the_same_file(tmp_path: Path) -> None:
    plan = Plan((stub("a"),))
    bench(plan, tmp_path).go()
    other = new_record(plan, Manifest("less", REQUESTS[:2]), "test")
    with pytest.raises(InputError, match="was made with manifest"):
        take_up(other, tmp_path / "record.json")
    with pytest.raises(InputError, match="arm 'a' was set up otherwise"):
        bench(Plan((stub("a", env={"X": "1"}),)), tmp_path)
    assert len(bench(Plan((stub("a"), stub("b"))), tmp_path).todo()) == 1  # a new arm may join
    plain, packed = tmp_path / "record.json", tmp_path / "record.json.gz"
    write_record(packed, json.loads(plain.read_text()))
    plain.unlink()
    assert bench(plan, tmp_path).todo() == []
    with pytest.raises(InputError, match=r"record\.json\.gz: was made with manifest"):
        take_up(other, plain)


def test_a_server_that_dies_fails_its_run_and_is_asked_again_later(tmp_path: Path) -> None:
    plan = Plan((stub("dies", "--die-after", "4"), stub("lives")), concurrency=(2,), runs=2)
    made = bench(plan, tmp_path).go()
    assert [(run.arm, len(run.failed) > 0) for run in made.runs] == [("dies", True), ("lives", False), ("lives", False)]
    errors = [row.error or "" for row in made.runs[0].failed]
    assert any("broke" in one or "cannot be reached" in one for one in errors)
    with pytest.raises(InputError, match="no throughput"):
        cells(made)
    again = bench(plan, tmp_path)
    assert [turn.arm.name for turn in again.todo()] == ["dies", "dies"]
    missing = Plan((Arm("gone", command=(sys.executable, "-c", "raise SystemExit(4)", "{port}")),))
    other = tmp_path / "other"
    noted = bench(missing, other).go()
    assert noted.runs == ()
    assert NOT_UP in noted.notes[0]
    assert json.loads((other / "record.json").read_text())["notes"] == list(noted.notes)
    assert os.path.exists(other / "logs" / "gone-c1-boot0.log")
