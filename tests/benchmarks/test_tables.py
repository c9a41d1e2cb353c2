"""Printed tables of small records, with numbers worked out by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tables

from dscale.evaluate.bench_record import ArmInfo, BenchRecord, RequestRow, Run

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


def arm(rate: float, ratio: float, interval: list[float] | None = None, base: str = "control") -> dict[str, Any]:
    run = {"tokens_per_s": rate, "interval_ms": 1e5 / rate}
    graphs = {"memory": 3 << 28}
    return {"runs": [run], "tokens_per_s": rate, "base": base, "ratio": ratio, "interval": interval, "graphs": graphs}


def throughput(cells: dict[int, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    made = [{"concurrency": c, "skipped": [], "arms": arms} for c, arms in cells.items()]
    head = {"schema": "dscale.gpu_throughput/1", "model": "random:m", "device": "GPU", "note": "simulated acceptance"}
    return {**head, "dtype": "bfloat16", "acceptance": {}, "arguments": {"prompt_tokens": "8"}, "cells": made, **fields}


FIRST = throughput({
    32: {"control": arm(1000, 1.0, [1.0, 1.0]), "full": arm(2000, 2.0, [1.9, 2.125]), "dvl@4": arm(2500, 2.5),
         "dvl@8": arm(4000, 4.0), "dvl@16": arm(4100, 4.1), "auto": arm(3960, 3.96)},
    8: {"control": arm(500, 1.0), "full": arm(4000, 8.0), "dvl@8": arm(3000, 6.0), "dvl@4": {"runs": []}},
})  # fmt: skip
SECOND = throughput({
    16: {"control": arm(800, 1.0), "auto": arm(1600, 2.0)},
    8: {"control": arm(505, 1.0), "auto+fp8": arm(5050, 10.0), "dvl@8+fp8": arm(5000, 9.9)},
})  # fmt: skip
SGLANG = {
    "schema": "dscale.sglang_h200/1", "note": "simulated acceptance", "arguments": {}, "agreement": {"a = b": 250},
    "arms": [
        {"name": "dflash+fa3", "memory": {"graph": 0.813}, "cells": [
            {"concurrency": 8, "tokens_per_s": rate, "interval_ms": 9.165, "prefill_steps": steps}
            for rate, steps in ((2000.0, 30), (2400.0, 34))]},
        {"name": "dscale", "memory": None, "cells": [
            {"concurrency": 8, "tokens_per_s": 3300.0, "interval_ms": 12.345, "prefill_steps": 7},
            {"concurrency": 32, "problem": "never 32 requests in a step"}]},
        {"name": "off", "problem": ["Traceback", "out of memory"]},
    ],
}  # fmt: skip


def write(folder: Path, **records: Any) -> list[str]:
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    return [str(folder / f"{name}.json") for name in records]


def printed(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert tables.main(given) == 0
    return capsys.readouterr().out


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *write(tmp_path, first=FIRST), "--over", "full", "--of", "auto").splitlines()
    assert lines[0] == "first.json: random:m, GPU, simulated acceptance"
    assert "| c | control | full | dvl@4 | dvl@8 | dvl@16 | auto | runs |" in lines
    assert "| 8 | 500 | **4000** · 8.00× | – | 3000 · 6.00× | – | – | 0–1 |" in lines
    whole = "2000 · 2.00× (1.90…2.12) | 2500 · 2.50× | 4000 · 4.00× | **4100** · 4.10× | 3960 · 3.96× | 1 |"
    assert f"| 32 | 1000 | {whole}" in lines
    mean = "| 1.00× | 4.00× | 2.50× (1 of 2) | 4.90× | 4.10× (1 of 2) | 3.96× (1 of 2) |"
    assert f"| geometric mean {mean}  |" in lines
    assert "| 32 | auto | 3960 | 4000 (dvl@8) | 0.990 | – |" in lines  # dvl@16 is faster and does not count
    assert "| c, tokens/s | dvl@4 | dvl@8 | dvl@16 |" in lines
    assert "| 8 | – | 3000 | – |" in lines
    assert "| 32 | 2500 | 4000 | **4100** |" in lines
    assert "| auto over full | – | 1.98× |" in lines


def test_records_of_two_calls_stay_apart_unless_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, first=FIRST, second=SECOND)
    apart = printed(capsys, *files).splitlines()
    assert [line for line in apart if line.startswith("| 16 |")] == ["| 16 | 800 | **1600** · 2.00× | – | – | 1 |"]
    assert "| 8 | 505 | – | **5050** · 10.00× | 5000 · 9.90× | 1 |" in apart
    joined = printed(capsys, *files, "--join").splitlines()
    assert joined[0].startswith("first.json, second.json: ")
    eight = "| 8 | 500 | 4000 · 8.00× | – | 3000 · 6.00× | – | – | **5050** · 10.00× | 5000 · 9.90× | 0–1 |"
    assert eight in joined
    assert "c = 8, control: 505 in second.json, not shown" in joined
    assert "| 8 | auto+fp8 | 5050 | 5000 (dvl@8+fp8, alone) | 1.010 | – |" in joined
    assert [line.split(" |")[0] for line in joined if " · " in line] == ["| 8", "| 16", "| 32"]


def test_ratios_to_different_arms_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = throughput({16: {"off": arm(100, 1.0, base="off"), "full": arm(300, 3.0, base="off")}})
    text = printed(capsys, *write(tmp_path, first=FIRST, other=other), "--join")
    assert "no ratios, for they are to different arms: control, off" in text
    assert "×" not in text
    assert "| 16 | – | **300** | – | – | – | – | 100 | 1 |" in text


def test_auto_is_not_held_against_another_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = throughput({8: {"full": arm(4000, 1.0)}}), throughput({8: {"auto": arm(1000, 1.0)}})
    assert "auto over best" not in printed(capsys, *write(tmp_path, one=one, two=two), "--join")


def test_auto_is_paired_with_the_best_by_repetition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians 200 and 190; pairs 0.95, 0.9 and 0.9604: the middle, an interval of the mean log."""
    arms = {"full": arm(150, 1.0), "dvl@8": arm(200, 1.0), "auto": arm(190, 1.0)}
    for name, speeds in (("dvl@8", (200, 220, 197.84)), ("auto", (190, 198, 190))):
        arms[name]["runs"] = [{"repetition": at, "tokens_per_s": one} for at, one in enumerate(speeds)]
    lines = printed(capsys, *write(tmp_path, one=throughput({8: arms}))).splitlines()
    assert "| 8 | auto | 190 | 200 (dvl@8) | 0.950 | 0.950 (0.859…1.021) |" in lines
    arms["auto"]["runs"] = arms["auto"]["runs"][:1]
    lines = printed(capsys, *write(tmp_path, one=throughput({8: arms}))).splitlines()
    assert "| 8 | auto | 190 | 200 (dvl@8) | 0.950 | 0.950 |" in lines


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {"matrix products": 5.0, "attention": 1.0, "norm": 0.25, "rotary, cache write": 0.125, "gate": 0.1,
              "vocabulary": 0.05, "predict": 0.02, "allocate": 0.01, "pack": 0.005, "accept": 0.003, "copies": 0.03,
              "simulation": 0.002, "quantise": 0.2, "other": 0.04}  # fmt: skip
    row = {"concurrency": 8, "name": "dvl@8", "rows": 64.2, "interval_ms": 7.0, "floor_ms": 5.0, "times_floor": 1.4,
           "groups_ms": groups, "decide_share": 0.0051, "idle_share": 0.0236, "gap_share": 0.0388}  # fmt: skip
    overlapped = {**row, "gap_share": None, "name": "full", "interval_ms": 6.8, "concurrency": 4}
    record = {"schema": "dscale.gpu_step/1", "model": "m", "device": "GPU", "rows": [row, overlapped], "skipped": ["x"]}
    lines = printed(capsys, *write(tmp_path, step=record)).splitlines()
    assert "| 8 | dvl@8 | 64 | 7.00 | 5.00 | 1.40 | 5.00 | 1.00 | 0.5% | 2.4% | 3.9% |" in lines
    assert "| 4 | full | 64 | 6.80 | 5.00 | 1.40 | 5.00 | 1.00 | 0.5% | 2.4% | – |" in lines
    kernels = "5.000 | 1.000 | 0.250 | 0.125 | 0.100 | 0.050 | 0.035 | 0.003 | 0.272"
    assert f"| 8 | dvl@8 | 7.00 | {kernels} | 0.165 |" in lines
    assert f"| 4 | full | 6.80 | {kernels} | -0.035 |" in lines
    assert lines[-1] == "x"


def test_clocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 slots take 1.25 of 8 in rows and 1.2 alone among the other: 4.2% closer."""
    eight = {"row_ms": 8.0, "alone_ms": 8.2, "alone_over_row": 1.025, "after": [1.02, 1.01, 1.0, 1.0, 1.0, 1.0, 0.99]}
    twelve = {"row_ms": 10.0, "alone_ms": 9.84, "alone_over_row": 0.984, "after": [0.98, *[1.0] * 5, None]}
    none = {"row_ms": 1.0, "alone_ms": None, "alone_over_row": None, "after": [None] * 7}
    cells = [
        {"concurrency": 28, "sizes": [8, 12], "8": none, "12": twelve},
        {"concurrency": 16, "sizes": [8, 12], "8": eight, "12": twelve},
    ]
    record = {"schema": "dscale.gpu_clocks/1", "model": "random:m", "device": "GPU", "note": "s", "cells": cells}
    lines = printed(capsys, *write(tmp_path, clocks=record)).splitlines()
    assert lines[0] == "clocks.json: random:m, GPU, s"
    assert "| 16 | 8 | 8.000 | 8.200 | 1.025 | 1.020 | 1.010 | 1.000 | 1.000 | 1.000 | 1.000 | 0.990 |" in lines
    assert "| 16 | 12 | 10.000 | 9.840 | 0.984 | 0.980 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 | – |" in lines
    assert lines[-2:] == ["| 16 | 12 over 8 | 1.250 | 1.200 | 4.2% |", "| 28 | 12 over 8 | 10.000 | – | – |"]
    assert tables.main([str(tmp_path / "clocks.json"), "--over", "8"]) == 2
    assert "no arm '8' here; there are: none" in capsys.readouterr().err


def bench(arm: str, runs: dict[int, tuple[float, list[tuple[float, float, int]]]], **fields: Any) -> dict[str, Any]:
    """runs: by concurrency, the window and (sent, first token, tokens) of each request."""
    counters = {"steps": 10, "request_steps": 25}
    made = [
        Run(arm, c, 0, 0, order, window, tuple(answered(*one) for one in rows), None, counters, 0.125)
        for order, (c, (window, rows)) in enumerate(runs.items())
    ]
    manifest = {"name": "gsm8k", "max_tokens": 20, "temperature": 0.0} | fields
    arms = (ArmInfo(arm, "dscale"),)
    record = BenchRecord({}, {"gpu": "GPU"}, "dscale bench", 0, manifest, arms, tuple(made), notes=("n",))
    return record.as_json()


def answered(sent: float, first: float, tokens: int) -> RequestRow:
    return RequestRow("row", "prompt", "gsm8k", sent, first, 9.0, 5, tokens)


OFF = bench("off", {8: (4.0, [(0.0, 0.5, 20), (1.0, 1.25, 12), (2.0, 2.125, 8)]), 2: (5.0, [(0.0, 1.0, 20)])})
AUTO = bench("auto", {8: (2.0, [(0.0, 0.5, 20), (1.0, 2.25, 40)])})


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = bench("auto", {8: (6.0, [(0.0, 0.5, 90)])}, temperature=1.0)
    files = write(tmp_path, off=OFF, auto=AUTO, hot=hot)
    lines = printed(capsys, *files, "--join", "--over", "off").splitlines()
    assert lines[0] == "off.json, auto.json, hot.json: GPU, gsm8k, answers of up to 20 tokens"
    assert "| temperature | c | off | auto | auto over off |" in lines
    assert {"| 0 | 2 | 4 | – | – |", "| 0 | 8 | 10 | **30** | 3.00× |", "| 1 | 8 | – | 15 | – |"} <= set(lines)
    assert "| 0 | 8 | off | 1 | 3 | 13 | 0.8 | 0.250 | 2.5 | 4.0 | 0.12 |" in lines
    assert "| 0 | 8 | auto | 1 | 2 | 30 | 1.0 | 0.875 | 2.5 | 2.0 | 0.12 |" in lines
    order = [line[:7] for line in lines if line.startswith(("| 0 ", "| 1 "))]
    assert order == ["| 0 | 2", "| 0 | 8", "| 1 | 8", "| 0 | 2", "| 0 | 8", "| 0 | 8", "| 1 | 8"]
    assert lines[-3:] == ["n", "n", "n"]


def test_bench_runs_of_one_record_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two boots, 40 tokens in 4 s and in 1 s: 80 tokens in 5 s. An open loop has a line of its own."""
    boots = [OFF["runs"][0], {**OFF["runs"][0], "window_s": 1.0, "counters": {}, "client_busy": None}]
    twice = {**OFF, "runs": [*boots, {**boots[0], "rate": 2.5}]}
    files = write(tmp_path, twice=twice, off=OFF)
    lines = printed(capsys, *files, "--join").splitlines()
    assert {"| 0 | 8 | 16 |", "| 0 | 8, 2.5 requests/s | 10 |", "| 0 | 2 | 4 |"} <= set(lines)
    assert "| 0 | 8 | off | 2 | 6 | 13 | 1.2 | 0.250 | 2.5 | 2.5 | 0.12 |" in lines
    assert "c = 8, temperature 0, off: 10 in off.json, not shown" in lines


def test_bench_records_that_have_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = json.loads(json.dumps(OFF))
    failed["runs"][0]["rows"][1][-1] = "503"
    other = {**AUTO, "machine": {"processor": "CPU"}}
    longer = bench("auto", {8: (2.0, [(0.0, 0.5, 20)])}, max_tokens=40)
    files = write(tmp_path, failed=failed, off=OFF, other=other, longer=longer, new={**OFF, "schema": 2})
    for given, told in (
        (files[:1], "failed.json: off: 1 requests failed, so there is no throughput"),
        ([*files[1:3], "--join"], "machine must be the same: off.json has GPU, other.json has CPU"),
        ([files[1], files[3], "--join"], "max_tokens must be the same: off.json has 20, longer.json has 40"),
        (files[4:], "schema 'dscale.bench/2' has no table"),
    ):
        assert tables.main(given) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert told in err


def test_sglang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, sglang=SGLANG, first=FIRST)
    lines = printed(capsys, files[0], "--over", "dflash+fa3").splitlines()
    assert "| tokens/s (ms from step to step) | c = 8 | prompt steps | graphs, GiB |" in lines
    assert "| dflash+fa3 | 2200 (9.16) | 30/34 | 0.81 |" in lines
    assert "| dscale | **3300** (12.3) | 7 | – |" in lines
    assert "| dscale over dflash+fa3 | 1.50× |" in lines
    assert "| off over dflash+fa3 | – |" in lines
    assert {"off: out of memory", "dscale: c = 32: never 32 requests in a step", "a = b: 250 tokens"} <= set(lines)
    asked = ["--join", "--over", "dflash+fa3", "--of", "ours, full"]
    lines = printed(capsys, *files, *asked).splitlines()
    assert "| ours, full | **4000** (25.0) | 2000 (50.0) | – | 0.75 |" in lines
    assert "| ours, full over dflash+fa3 | 1.82× | – |" in lines
    assert not any("dscale over" in line for line in lines)


def test_sglang_in_two_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [{"concurrency": c, "tokens_per_s": 9.0 * c, "interval_ms": None, "prefill_steps": c} for c in (8, 16)]
    more = {**SGLANG, "arms": [{"name": "dflash+fa3", "memory": {"graph": 2.0}, "cells": cells}], "agreement": {}}
    lines = printed(capsys, *write(tmp_path, sglang=SGLANG, more=more), "--join").splitlines()
    assert "| dflash+fa3 | 2200 (9.16) | 144 | 30/34, 16 | 0.81 |" in lines
    assert "dflash+fa3, c = 8 of more.json: not shown" in lines


def test_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cell(c: int, temperature: float, arms: dict[str, Any]) -> dict[str, Any]:
        return {"concurrency": c, "temperature": temperature, "skipped": ["full, repetition 1"], "arms": arms}

    costs = {"off": {"8": 0.783, "32": 1.03}, "full": {"32": 0.9}}
    part_c = {"cells": [cell(8, 0.0, {"off": arm(100, 1.0, base="off")})], "cost": costs}
    fast = {"off": arm(100, 1.0, base="off"), "full": arm(300, 3.0, base="off"), "dvl": arm(350, 3.5, base="off"),
            "auto": arm(343, 3.43, base="off")}  # fmt: skip
    part_d = {"cells": [cell(8, 1.0, fast), cell(8, 0.0, {**fast, "off": arm(200, 1.0, base="off")})]}
    record = {"schema": "dscale.gpu_real/1", "model": "smol", "device": "GPU", "c": part_c, "d": part_d}
    lines = printed(capsys, *write(tmp_path, real=record)).splitlines()
    assert "| deterministic over ordinary | c = 8 | c = 32 |" in lines
    assert {"| off | 0.78× | 1.03× |", "| full | – | 0.90× |"} <= set(lines)
    assert "real.json: smol, GPU, part d, temperature 1" in lines
    assert "| 8 | 100 | 300 · 3.00× | **350** · 3.50× | 343 · 3.43× | 1 |" in lines
    assert "| 8 | auto | 343 | 350 (dvl) | 0.980 | – |" in lines
    assert "c = 8: 1 left out, the first: full, repetition 1" in lines
    assert lines.index("real.json: smol, GPU, part d, temperature 0") < lines.index(
        "real.json: smol, GPU, part d, temperature 1"
    )


def test_tensor_parallel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"model": "random:tiny", "policy": "full", "sampling": "greedy"}
    texts = [
        {**told, "texts": 12, "different": 1, "steps_compared": 70, "first_difference": [3, 40]},
        {**told, "failed": "rank 1 ended"},
    ]
    head = {"schema": "dscale.gpu_tp/1", "correctness": texts}
    two = throughput({8: {"off": arm(180, 1.0, base="off"), "auto": arm(420, 2.3, base="off")}}, ranks=2, **head)
    one = throughput({8: {"off": arm(100, 1.0, base="off"), "auto": arm(300, 3.0, base="off")}}, ranks=1, **head)
    one["correctness"] = []
    files = write(tmp_path, two=two, one=one)
    lines = printed(capsys, *files, "--join").splitlines()
    assert "| random:tiny | full | greedy | 1 of 12 | text 3, token 40 | 70 |" in lines
    assert "| random:tiny | full | greedy | failed: rank 1 ended | – | – |" in lines
    assert {"| 8 | 100 | **300** · 3.00× | 1 |", "| 8 | 180 | **420** · 2.30× | 1 |"} <= set(lines)
    assert lines[-5:] == ["2 ranks over 1", "", "| c | off | auto |", "| --- | --- | --- |", "| 8 | 1.80× | 1.40× |"]
    assert "over 1" not in printed(capsys, *files)


@pytest.mark.parametrize("schema", [{}, {"schema": "dscale.gpu_attention/1"}])
def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: dict[str, str]) -> None:
    shape = {"lanes": 8, "context": 1024, "rows": 16, "heads": 32, "kv": 8, "size": 128, "path": "verify",
             "spread": 0.0, "cache": "torch.bfloat16", "tile": None, "floor": 8.0}  # fmt: skip
    tile = {"rows": 64}
    times = [
        {**shape, "case": "packed", "us": 24.9},
        {**shape, "case": "wide", "us": 58.0},
        {**shape, "case": "a", "tile": tile, "us": 30.0},
        {**shape, "case": "b", "tile": tile, "us": 20.0},
        {**shape, "case": "packed", "us": 50.0, "spread": 0.9, "cache": "torch.float8_e4m3fn"},
        {**shape, "case": "packed", "us": 40.0, "path": "prefill", "context": 0, "tflops": 253.7},
    ]
    record = {**schema, "working_set": 1, "device": "GPU", "times": times, "problems": ["p: failed"]}
    lines = printed(capsys, *write(tmp_path, attention=record)).splitlines()
    assert "| requests, context | packed | 128-row tiles | asked of packed |" in lines
    assert "| 8, 1k | 25 (3.11×) | 58 (7.25×) | 2.5× |" in lines
    heads = "16 rows, heads 32/8 of 128"
    assert f"| verify, 8, 1k ±90%, {heads}, float8_e4m3fn | packed | 50 (6.25×) |" in lines
    assert f"| prefill, 8, 0, {heads}, bfloat16 | packed | 40 (5.00×), 254 TFLOP/s |" in lines
    assert f"| verify, 8, 1k, {heads}, bfloat16 | 25 (3.11×) | b: 20 (2.50×) | 2 |" in lines
    assert lines[-1] == "p: failed"


def test_cpu_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"mean_progress": 4.536, "slots_per_request": 16.0, "step_ms": 28.71}
    arms = {
        "off": {"tokens_per_s": 470.2, "ratio": 1.0, "ratio_range": [1, 1], "same_text": True, "runs": [run]},
        "full": {"tokens_per_s": 443.8, "ratio": 0.94, "ratio_range": [0.91, 0.951], "same_text": False, "runs": [{}]},
    }
    curve = [{"rows": 1, "verify_ms": 4.04}, {"rows": 16, "verify_ms": 7.66, "draft_ms": 2.44}]
    record = {"schema": "dscale.cpu_speed/1", "cells": [{"concurrency": 4, "arms": arms}], "curve": curve}
    speed, progress, passes = printed(capsys, *write(tmp_path, cpu=record)).strip().split("\n\n")
    assert speed.splitlines()[0::2] == ["| concurrency | off | full |", "| 4 | 470 | 444 · 0.94× (0.91…0.95) |"]
    assert progress.splitlines()[2:] == ["| 4 | off | 4.54 | 16.0 | 28.7 | yes |"]
    assert passes.splitlines()[2:] == ["| verify, ms | 4.0 | 7.7 |", "| draft, ms |  | 2.4 |"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("cpu_policies", "| concurrency | off | full | dvl@8 | auto |"),
        ("gpu_throughput_8b", "| c | arm | tokens/s | best of full, dvl@8 | auto over best |"),
        ("gpu_step_8b", "| c | arm | rows | step, ms | floor, ms | times floor |"),
        ("gpu_beside_sglang", "| tokens/s (ms from step to step) | c = 8 |"),
        ("gpu_clocks_8b", "| c | slots | in a row, ms | alone, ms | alone over row | after 0 |"),
        ("gpu_http_auto_greedy", "| temperature | c | arm | runs | requests | tokens an answer | requests/s |"),
        ("peers_cpu", "| temperature | c | transformers | transformers, prompt lookup | vllm |"),
        ("gpu_real", "| deterministic over ordinary | c = "),
        ("gpu_attention", "| requests, context | packed | 16-row tiles | 128-row tiles | packed, deterministic |"),
    ],
)
def test_the_projects_own_records(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"\n{line}" in "\n" + printed(capsys, str(RECORDS / f"{name}.json"))


@pytest.mark.parametrize(
    ("content", "given", "told"),
    [
        (None, [], "No such file"),
        ("{1", [], "not JSON"),
        ("[]", [], "schema None has no table; known are dscale.cpu_speed/1, dscale.bench/1, dscale.gpu_throughput/1"),
        ('{"schema": 1}', [], "schema 1 has no table"),
        ('{"schema": [1]}', [], "schema [1] has no table"),
        ('{"schema": "dscale.gpu_step/1", "rows": [{}]}', [], "not a whole record of dscale.gpu_step/1"),
        (json.dumps(FIRST), ["--over", "nix"], "no arm 'nix' here; there are: auto; control; dvl@16"),
        (json.dumps(FIRST), ["--of", "auto"], "--of: say over what"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, given: list[str], told: str
) -> None:
    file = tmp_path / "bad.json"
    if content is not None:
        file.write_text(content)
    assert tables.main([str(file), *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert told in err


def test_what_cannot_be_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, first=FIRST, other=throughput({}, model="random:n"), sglang=SGLANG)
    assert tables.main([*files[:2], "--join"]) == 2
    assert "model must be the same: first.json has random:m, other.json has random:n" in capsys.readouterr().err
    assert tables.main([files[0], files[2], "--over", "dflash+fa3", "--of", "auto"]) == 2
    assert "in no table together" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tables.main(["--help"])
    assert ended.value.code == 0
    assert "python benchmarks/tables.py benchmarks/records/gpu_throughput_8b.json" in capsys.readouterr().out
