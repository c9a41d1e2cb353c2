"""The process of an in-process arm: reads lines of JSON, loads the engine, warms up, runs, and answers in lines.

python -m dscale.evaluate.arm_child     started by arm_process.ServedByChild; ends when its input does
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

from dscale.config import InputError
from dscale.evaluate.inprocess import InProcess
from dscale.evaluate.load import Progress, Watcher
from dscale.evaluate.manifest import manifest_of
from dscale.evaluate.peers import Transformers

EVERY_SECONDS = 0.25  # between two words on the progress


class Teller(Watcher):
    """Writes the progress now and then."""

    def __init__(self, out: TextIO) -> None:
        self.out, self._said = out, 0.0

    def changed(self, progress: Progress) -> None:
        """Write it if the last word is old."""
        now = time.perf_counter()
        if now - self._said >= EVERY_SECONDS:
            self._said = now
            say(self.out, {"progress": asdict(progress)})


def say(out: TextIO, what: dict[str, Any]) -> None:
    """One line."""
    out.write(json.dumps(what) + "\n")
    out.flush()


def serve(lines: TextIO, out: TextIO) -> None:
    """Answer line by line."""
    asked = json.loads(lines.readline())
    kind: type[InProcess] | type[Transformers] = InProcess if asked["engine"] == "dscale" else Transformers
    arm = kind(asked["settings"], manifest_of(asked["manifest"]), asked["c"])
    say(out, {"about": arm.about()})
    for line in lines:
        order = json.loads(line)
        if "warm_up" in order:
            arm.warm_up()
            say(out, {"done": True})
            continue
        measured, counters = arm.run(order["run"]["rate"], order["run"]["seed"], Teller(out))
        rows = [asdict(row) for row in measured.rows]
        say(out, {"rows": rows, "window_s": measured.window_s, "counters": counters})


def main() -> None:
    """Libraries that print get the log; bad input is told to the other side."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin, out)
    except InputError as error:
        say(out, {"bad_input": str(error)})


if __name__ == "__main__":
    main()
