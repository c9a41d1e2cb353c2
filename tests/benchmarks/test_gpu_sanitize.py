"""What the sanitizer's runner reads from a run; the cases themselves need a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    import gpu_sanitize

    return gpu_sanitize


def test_errors_are_counted(sanitize: ModuleType) -> None:
    text = "CASE ok norm 1.0 s\nCASE failed draw: ValueError: no\n========= Invalid read\n"
    assert sanitize.summary(text)["errors"] is None, "cut off before the summary"
    found = sanitize.summary(text + "========= ERROR SUMMARY: 3 errors\n")
    assert (found["ok"], found["failed"], found["errors"]) == (1, ["draw: ValueError: no"], 3)
    assert found["reports"][0] == "========= Invalid read"
    clean = sanitize.summary("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")
    assert (clean["errors"], clean["reports"]) == (0, [])


def test_parts_are_one_result(sanitize: ModuleType) -> None:
    one = {"ok": 2, "failed": [], "errors": 0, "reports": [], "out_of_time": False, "seconds": 3.0}
    two = one | {"ok": 1, "failed": ["draw: no"], "errors": 1, "reports": ["="], "seconds": 5.0, "output": "text"}
    made = sanitize.together([one, two])
    assert (made["ok"], made["failed"], made["errors"], made["seconds"]) == (3, ["draw: no"], 1, 5.0)
    assert (made["reports"], made["output"], made["out_of_time"]) == (["="], "text", False)
    late = sanitize.together([one, two | {"errors": None, "out_of_time": True}])
    assert (late["errors"], late["out_of_time"]) == (None, True)


def test_the_tool_is_found_where_given(sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "PLACES", ())
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert sanitize.find_sanitizer(None) is None
    wheel = tmp_path / "nvidia" / "cuda_sanitizer_api" / "bin" / "compute-sanitizer"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    os.chmod(wheel, 0o755)
    assert sanitize.find_sanitizer(None) == str(wheel)
    assert sanitize.find_sanitizer("/nowhere") == str(wheel)
