"""`dscale` in processes of their own, which can be killed, and a disk that is full.

A new interpreter imports for seconds what takes no time to fork: the processes come from one that has it all imported.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload([
    "dscale.cli.main", "dscale.evaluate.drafter", "dscale.evaluate.features", "dscale.evaluate.policy_run",
    "dscale.train.corpus", "dscale.train.drafter_run", "dscale.train.fit", "dscale.train.trace_run",
    "transformers.models.auto", "torch.distributed",
])  # fmt: skip


class Running:
    """One `dscale` command. environment is added to that of the tests."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        given = (list(map(str, arguments)), environment, self._said)
        self.process = FORKING.Process(target=_run, args=given, daemon=True)
        self.process.start()

    def ended(self, seconds: float = 200) -> tuple[int | None, str, str]:
        """Exit code (-9: killed, None: it still runs), stdout and stderr, once it has ended."""
        self.process.join(seconds)
        said = [path.read_text() if path.exists() else "" for path in self._said]
        return self.process.exitcode, said[0], said[1]

    def kill_once(self, there: Callable[[], object]) -> None:
        """SIGKILL as soon as `there()` is true; an error if the command ends before."""
        while not there():
            assert self.process.is_alive(), self.ended()
            time.sleep(0.002)
        self.process.kill()
        assert self.ended()[0] == -signal.SIGKILL, "it had ended already"


def _run(arguments: list[str], environment: dict[str, str], said: list[Path]) -> None:
    """In the new process."""
    os.environ.update(environment)
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    import torch

    from dscale.cli.main import run

    if "OMP_NUM_THREADS" in environment:  # was read when torch was imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = ["dscale", *arguments]
    run()


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """Meanwhile this process cannot write files of more than so many bytes, as on a full disk."""
    limits, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # a module's may come out cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = bytecode
        signal.signal(signal.SIGXFSZ, handler)
