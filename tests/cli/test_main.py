"""How the command as a whole ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What an interpreter that is taken down meets now and then: a thread of a library that aborts the process.
ABORTS = (
    "import atexit, os, sys; from dscale.cli.main import run; "
    "atexit.register(lambda: os.abort()); sys.argv = ['dscale', *sys.argv[1:]]; run()"
)


@pytest.mark.parametrize(
    ("processes", "argument", "code"), [("2", "--help", 0), ("1", "--help", -6), ("", "--help", -6), ("2", "-x", -6)]
)
def test_one_of_several_processes_ends_without_taking_the_interpreter_down(
    processes: str, argument: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", processes)
    done = subprocess.run([sys.executable, "-c", ABORTS, argument], capture_output=True, text=True)
    assert done.returncode == code
    if argument == "--help":
        assert "adaptive verification" in done.stdout
    else:
        assert "No such option: -x" in done.stderr
