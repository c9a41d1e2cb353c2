"""The throughput benchmark in miniature on a CPU."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dscale.config import InputError
from dscale.evaluate.record_file import rounded

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import gpu_throughput

    monkeypatch.setattr(gpu_throughput, "LEAST_STEPS", 40)  # whose outcome the seeds decide
    return gpu_throughput


MINIATURE = [
    "--model", "random:tiny", "--device", "cpu", "--dtype", "float32", "--concurrency", "2,4", "--seconds", "0",
    "--repeats", "2", "--warm-steps", "5", "--prompt-tokens", "40", "--output-tokens", "60",
]  # fmt: skip


def test_miniature(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    record = bench.main([*MINIATURE, "--arms", "off,control,dvl@6,auto", "--eager-repeats", "1", "--out", str(out)])
    assert json.loads(out.read_text()) == rounded(record)
    assert record["note"] == record["acceptance"]["kind"] == "simulated acceptance"
    assert [one["concurrency"] for one in record["cells"]] == [2, 4]
    for cell in record["cells"]:
        assert list(cell["arms"]) == ["off", "control", "dvl@6", "auto"]
        assert cell["skipped"] == []
        for name, arm in cell["arms"].items():
            assert [run["repetition"] for run in arm["runs"]] == ([0] if name == "control" else [0, 1])
            assert [run["first_request"] for run in arm["runs"]] == ([0] if name == "control" else [0, 10_000])
            for run in arm["runs"]:
                assert run["note"] == "simulated acceptance"
                assert run["tokens_per_s"] == pytest.approx(run["tokens"] / run["seconds"])
                assert run["decode_s"] + run["rest_s"] == pytest.approx(run["seconds"], rel=0.01)
                assert cell["concurrency"] - 1.5 < run["running"] <= cell["concurrency"]
            assert arm["base"] == "control"
        off, control, dvl = (cell["arms"][name]["runs"][0] for name in ("off", "control", "dvl@6"))
        assert (off["mean_progress"], off["slots_per_request"]) == (1, 1)
        assert control["slots_per_request"] == 16
        assert 3.5 < control["mean_progress"] < 8
        assert dvl["slots_per_request"] == pytest.approx(6)
        assert 2.5 < dvl["mean_progress"] < control["mean_progress"] + 1
        assert cell["auto_over_best"] is None  # neither full nor dvl at 8 slots
    assert record["geometric_mean"]["control"] == pytest.approx(1)
    printed = capsys.readouterr()
    assert "simulated acceptance" in printed.out
    assert printed.err.count("[simulated acceptance]") == 14


def test_auto_stands_beside_whole_blocks_and_half_of_them(bench: ModuleType) -> None:
    speeds = {"off": 400.0, "full": 100.0, "dvl@8": 120.0, "dvl@6": 150.0, "auto": 90.0, "auto+fp8": 300.0}
    arms = {name: {"tokens_per_s": speed} for name, speed in speeds.items()}
    arms = {name: arm | {"runs": []} for name, arm in arms.items()}
    assert bench.auto_over_best(arms) == {"auto_over_best": pytest.approx(0.75)}
    assert bench.auto_over_best({"full": {}, "auto": {"tokens_per_s": 1.0}}) == {"auto_over_best": None}
    for name, speeds in (("dvl@8", (120, 100, 160)), ("auto", (90, 90, 112))):
        arms[name]["runs"] = [{"repetition": at, "tokens_per_s": float(one)} for at, one in enumerate(speeds)]
    found = bench.auto_over_best(arms)["auto_over_best_paired"]
    assert (found["best"], found["ratio"]) == ("dvl@8", pytest.approx(0.75))  # the middle of 0.75, 0.9 and 0.7
    assert found["interval"] == pytest.approx(bench.interval([0.75, 0.9, 0.7]))


def test_each_repetition_is_another_sample_of_requests(bench: ModuleType) -> None:
    record = bench.main([*MINIATURE, "--arms", "full,dvl@16", "--concurrency", "2", "--repeats", "2"])
    runs = {name: arm["runs"] for name, arm in record["cells"][0]["arms"].items()}
    first, second = ([runs[name][at]["mean_progress"] for name in runs] for at in (0, 1))
    assert first[0] == first[1]  # whole blocks both, the same requests: not a token differs
    assert second[0] == second[1]
    assert first != second


def test_eager_arms_have_a_window_of_their_own(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []

    def window(loop, seconds):
        windows.append(seconds)
        return {"tokens_per_s": 1.0, "step_ms": 1.0, "mean_progress": 1.0, "slots_per_request": 1.0, "rest_s": 0.0,
                "seconds": 1.0}  # fmt: skip

    monkeypatch.setattr(bench, "window", window)
    asked = [*MINIATURE, "--arms", "control,full", "--concurrency", "2", "--repeats", "1", "--seconds", "3"]
    bench.main(asked)
    bench.main([*asked, "--eager-seconds", "0.5"])
    assert windows == [3, 3, 0.5, 3]


def test_time_box_is_kept(bench: ModuleType) -> None:
    record = bench.main([*MINIATURE, "--arms", "off,full", "--limit", "0"])
    assert all(len(cell["skipped"]) == 4 for cell in record["cells"])
    assert record["geometric_mean"] == {}


def test_an_arm_that_cannot_be_built_leaves_the_others(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    build = bench.build

    def full_card(arm, *given):
        if arm.policy == "full":
            raise RuntimeError("out of memory\nat some length")
        return build(arm, *given)

    monkeypatch.setattr(bench, "build", full_card)
    asked = [*MINIATURE, "--arms", "off,full,dvl@6", "--concurrency", "2", "--repeats", "1"]
    (cell,) = bench.main(asked)["cells"]
    assert list(cell["arms"]) == ["off", "dvl@6"]
    assert [len(arm["runs"]) for arm in cell["arms"].values()] == [1, 1]
    assert cell["skipped"] == ["full: RuntimeError: out of memory"]


def test_arms_take_turns(bench: ModuleType) -> None:
    assert list(bench.turns(["a", "b"], 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_trace_for_another_engine(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.safetensors"
    monkeypatch.setattr(bench, "TRACED", 3)
    bench.main(["--prompt-tokens", "10", "--output-tokens", "5", "--export-trace", str(path)])
    record = bench.main([*MINIATURE, "--arms", "full", "--trace", str(path), "--repeats", "1", "--concurrency", "2"])
    assert record["acceptance"] == {"kind": "simulated acceptance", "trace": str(path)}
    assert record["cells"][0]["arms"]["full"]["runs"][0]["mean_progress"] > 1.5


def test_arms_by_name(bench: ModuleType) -> None:
    control, budget = bench.Arm.parse("control"), bench.Arm.parse("dvl@12+narrow+deterministic")
    assert (control.policy, control.layout, control.eager) == ("full", "wide", True)
    assert (budget.policy, budget.slots, budget.layout, budget.eager) == ("dvl", 12, "narrow", False)
    assert budget.deterministic
    with pytest.raises(InputError, match=r"\['fast'\] not known"):
        bench.Arm.parse("dvl+fast")
    assert bench.Arm.parse("dvl@8+fp8").draft_weights == "fp8"
    assert bench.Arm.parse("dvl@8+w12").draft_weights == "auto"
    bits = {"draft_weights": "auto", "kv_cache_dtype": "fp8", "draft_kv_cache_dtype": "auto"}
    assert bench.Arm.parse("auto+kv8").bits == bits
    assert bench.Arm.parse("off+draftkv8+fp8").bits == dict.fromkeys(bits, "fp8") | {"kv_cache_dtype": "auto"}


def test_intervals_by_hand(bench: ModuleType) -> None:
    low, high = bench.interval([math.exp(0.1), math.exp(0.3)])
    assert (math.log(low), math.log(high)) == pytest.approx((0.2 - 12.71 * 0.1, 0.2 + 12.71 * 0.1))
    assert bench.interval([1.2]) is None
    arms = {
        "control": {"runs": [{"repetition": 0, "tokens_per_s": 10.0}, {"repetition": 1, "tokens_per_s": 20.0}]},
        "auto": {"runs": [{"repetition": 1, "tokens_per_s": 30.0}, {"repetition": 0, "tokens_per_s": 20.0}]},
    }
    bench.compare(arms)
    assert arms["auto"]["ratio"] == pytest.approx(1.75)  # the middle of 2.0 and 1.5, each beside its own repetition
