"""A refit in a process of its own, of low priority and on one CPU core: `python -m dscale.train.refit_process`.

It reads a RefitJob from standard input and writes a Refit to standard output. When it dies, or takes too long, only
this refit is lost.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time

from dscale.config import InputError
from dscale.train.refit import Refit, RefitJob, refit

LIMIT = 900.0  # seconds of a refit
NICENESS = 19
LEFT_ALONE = 1.0  # seconds between looks whether the parent is still there


class RefitFailed(Exception):
    """A refit that ended without a result, with the reason in one line."""


class RefitProcess:
    """Runs jobs one at a time, each in a fresh process."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self, job: RefitJob) -> Refit:
        """The job's result, waited for. RefitFailed when there is none; from any thread."""
        with self._lock:
            if self._closed:
                raise RefitFailed("the engine is stopping")
            child = self._child = self._start()
        try:
            out, said = child.communicate(pickle.dumps(job, pickle.HIGHEST_PROTOCOL), self.limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise RefitFailed(f"took longer than {self.limit:g} s and was ended") from None
        finally:
            self._child = None
        if child.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines()
            reason = f": {lines[-1]}" if lines else ""
            raise RefitFailed(f"its process ended with code {child.returncode}{reason}")
        try:
            return pickle.loads(out)
        except Exception as error:
            raise RefitFailed(f"its result cannot be read ({error})") from None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dscale.train.refit_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        )  # fmt: skip

    def close(self) -> None:
        """End what runs; nothing is started any more."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()


def main() -> int:
    """One job from standard input. Exit codes: 0 done, 2 bad input, 1 an error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not print into the result
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job: RefitJob = pickle.load(sys.stdin.buffer)
    try:
        result = refit(job)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    pickle.dump(result, out, pickle.HIGHEST_PROTOCOL)
    out.close()
    return 0


def _end_with(parent: int) -> None:
    """End this process once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(LEFT_ALONE)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
