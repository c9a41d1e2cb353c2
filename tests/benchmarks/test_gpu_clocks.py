"""Times of steps by what ran before them: the script, its summary by hand, and a run in miniature."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dscale.evaluate.record_file import rounded

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_clocks
import gpu_step_tables
from gpu_clocks import Step


def test_the_script_has_rows_and_single_steps() -> None:
    steps = gpu_clocks.script(8, 12, 32, 1)
    assert [step.slots for step in steps[:64]] == [8] * 32 + [12] * 32
    assert [step.place for step in steps[30:34]] == [30, 31, 0, 1]
    mixed = steps[64:]
    assert [step.slots for step in mixed[:32]] == ([12] * 15 + [8]) * 2
    assert [step.slots for step in mixed[32:]] == ([8] * 15 + [12]) * 2
    assert {step.part for step in mixed if step.slots == 8} == {"alone", "among"}
    assert sum(step.part == "alone" for step in mixed) == 4


def test_a_size_alone_is_held_against_its_row() -> None:
    seen = [(Step(8, "row", place), 8.4 if place < 3 else 8.0) for place in range(8)]
    seen += [(Step(8, "alone", 0), 8.2), (Step(8, "among", 1), 1.0), (Step(12, "row", 5), 9.0)]
    made = gpu_clocks.summary(seen, (8, 12), 8)
    assert (made["8"]["row_ms"], made["8"]["alone_ms"]) == (8.0, 8.2)
    assert made["8"]["alone_over_row"] == pytest.approx(1.025)
    assert made["8"]["after"] == [pytest.approx(1.05)] * 3 + [1.0, 1.0, None, None]
    assert made["12"]["alone_over_row"] is None


def test_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    given = "--model random:tiny --device cpu --concurrency 2 --rounds 1 --row 16 --warm-steps 1"
    record = gpu_clocks.main([*given.split(), "--prompt-tokens", "8", "--output-tokens", "400", "--out", str(out)])
    assert json.loads(out.read_text()) == rounded(record)
    (cell,) = record["cells"]
    assert cell["sizes"] == [8, 12]
    for size in ("8", "12"):
        assert 24 <= cell[size]["steps"] <= 32  # 16 in a row, 15 among and one alone, less those with a lane missing
        assert cell[size]["row_ms"] > 0
        assert cell[size]["alone_ms"] > 0
    assert "| 2 | 8 |" in capsys.readouterr().out
    assert len(gpu_clocks.PLACES) == len(gpu_step_tables.AFTER)


def test_sizes_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="two numbers, the smaller first"):
        gpu_clocks.main(["--sizes", "12,8", "--device", "cpu"])
