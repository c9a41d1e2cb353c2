"""The processes that share one model, seen from the first of them, which alone has scheduler, tokenizer and requests.

Every other rank is a fresh Python (engine/follower.py) with a pipe to this one. What the first rank's workers do on
their device they first tell the others, in the same words: place these requests, prefill these tokens, make this step.
So there is one plan, and nothing to disagree about but arithmetic (speculation/agreement.py). Pickle is safe here: all
ends are ours.

    crew = Crew.start(2, "cpu")                one crew serves any number of engines, one after the other or together
    llm = LLM("random:tiny", tensor_parallel=2, crew=crew)

A rank that ends breaks the crew: whoever waits for it is let go, and RankFailed says which it was and its last words.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from dscale.config import DecoderConfig, InputError, RankFailed, require
from dscale.layers.ranks import ALONE, Ranks, connect
from dscale.models.drafter import Drafter

START_SECONDS = 120.0  # until a new process has loaded its libraries
COLLECTIVE_SECONDS = 300.0  # longest that one rank waits for another, which may be compiling a kernel
EXIT_SECONDS = 5.0  # that a follower gets to end by itself
WATCH_SECONDS = 0.2  # between looks at whether all still run
NOTICE_SECONDS = 2.0  # in which a process whose end broke a collective is found to have ended


@dataclass(frozen=True)
class Introduction:
    """The first message to a follower: who it is, where all meet, and on which device it works."""

    rank: int
    size: int
    store: str
    device: str
    check: bool
    threads: int


class Member:
    """A rank among others: what an LLM needs to know of it."""

    def __init__(self, ranks: Ranks, device: str) -> None:
        self.ranks, self.device = ranks, device


class Follower:
    """One process and our end of its pipe."""

    def __init__(self, introduction: Introduction) -> None:
        self.rank = introduction.rank
        self.pipe, theirs = Pipe()
        self.process = start_python(theirs)
        self.send(pickle.dumps(introduction))

    def send(self, message: bytes) -> None:
        """A pickled command; RankFailed where nobody reads any more."""
        try:
            self.pipe.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError, OSError):
            raise RankFailed(f"rank {self.rank} does not take commands any more") from None

    def wait_for_word(self, seconds: float) -> None:
        """Until its first word; RankFailed when it ends before or is silent for so long."""
        until = time.monotonic() + seconds
        while not self.pipe.poll(WATCH_SECONDS):
            if self.process.poll() is not None or time.monotonic() > until:
                raise RankFailed(self.epitaph() or f"rank {self.rank} did not start within {seconds:.0f} s")
        with suppress(EOFError, OSError):
            self.pipe.recv()

    def epitaph(self) -> str | None:
        """How it ended, with its last words; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        words = ""
        with suppress(EOFError, OSError):
            while self.pipe.poll(0):
                words = str(self.pipe.recv())
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"rank {self.rank} ended {how}" + (f": {words.strip()}" if words else "")

    def end(self) -> None:
        """Let it end by itself, else kill it."""
        self.pipe.close()
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_python(theirs: Connection) -> subprocess.Popen[bytes]:
    """A fresh Python (nothing of this process is copied) that follows the other end of a pipe, in a session of its own,
    so that Ctrl-C in the terminal reaches the first rank alone."""
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dscale.engine.follower", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
        )  # fmt: skip


class Watch(threading.Thread):
    """Looks whether all followers run; when one has ended, frees whoever waits for it in a collective."""

    def __init__(self, followers: Sequence[Follower], ranks: Ranks) -> None:
        super().__init__(name="ranks", daemon=True)
        self.followers, self.ranks = followers, ranks
        self.over = threading.Event()
        self.failed = threading.Event()

    def run(self) -> None:
        while not self.over.wait(WATCH_SECONDS):
            if any(one.process.poll() is not None for one in self.followers):
                self.failed.set()
                with suppress(RuntimeError):
                    self.ranks.abort()
                return


class Crew(Member):
    """The first rank with its followers."""

    def __init__(self, followers: Sequence[Follower], ranks: Ranks, device: str, folder: str) -> None:
        super().__init__(ranks, device)
        self.followers, self._built = list(followers), 0
        self._watch = Watch(self.followers, ranks)
        self._watch.start()
        self._end = weakref.finalize(self, _end, self.followers, self._watch, ranks, folder)

    @classmethod
    def start(cls, size: int, device: str = "cpu", check: bool = False) -> Crew:
        """Start size - 1 processes beside this one. device: cpu, or the first of as many GPUs (cuda, cuda:N).

        check: as of EngineConfig.check_ranks. InputError when there are fewer GPUs; RankFailed when one does not start.
        """
        devices = devices_for(size, device)
        if devices[0] != "cpu":
            torch.cuda.set_device(devices[0])
        folder = tempfile.mkdtemp(prefix="dscale-ranks-")
        store = os.path.join(folder, "store")
        followers: list[Follower] = []
        try:
            for rank in range(1, size):
                threads = torch.get_num_threads()
                followers.append(Follower(Introduction(rank, size, store, devices[rank], check, threads)))
            for follower in followers:
                follower.wait_for_word(START_SECONDS)
            ranks = connect(0, size, store, torch.device(devices[0]), COLLECTIVE_SECONDS, check)
            ranks.least(0, devices[0])
        except BaseException:
            _end(followers, None, ALONE, folder)
            raise
        return cls(followers, ranks, devices[0], folder)

    def build(self, options: dict) -> int:
        """Have every follower make an LLM with these options; its number."""
        self._built += 1
        self.tell("build", self._built, options)
        return self._built

    def drop(self, number: int) -> None:
        """Have every follower forget an LLM."""
        with suppress(RankFailed):
            self.tell("drop", number)

    def tell(self, *command: object) -> None:
        """A command to every follower, which is carried out in order; nobody waits for it."""
        message = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
        for follower in self.followers:
            follower.send(message)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What involves all ranks. When it is broken off, the ranks no longer stand at the same place: the crew ends,
        and where a rank has died the error says so."""
        try:
            if self._watch.failed.is_set() or self._watch.over.is_set():
                raise RankFailed("the ranks of this model have ended; load it again")
            yield
            if self._watch.failed.is_set():
                raise RankFailed("a rank ended")
        except InputError:
            raise
        except BaseException as error:
            found = self._epitaphs(NOTICE_SECONDS) if isinstance(error, RuntimeError) else []
            self.close()
            if found:
                raise RankFailed(f"tensor parallel: {'; '.join(found)}") from error
            raise

    def _epitaphs(self, seconds: float) -> list[str]:
        until = time.monotonic() + seconds
        while True:
            ended = [one for one in self.followers if one.process.poll() is not None]
            if ended or time.monotonic() > until or self._watch.over.is_set():
                return [words for one in ended if (words := one.epitaph())]
            time.sleep(0.02)

    def check_agreement(self) -> None:
        """RankFailed when ranks differed in what they decided, where that is counted."""
        differing = self.ranks.differing
        if differing is not None and int(differing):
            raise RankFailed(f"ranks disagree: {int(differing)} drafts, lengths or tokens differ from the first rank's")

    def close(self) -> None:
        """End the other processes; more than once does no harm."""
        self._end()


def _end(followers: Sequence[Follower], watch: Watch | None, ranks: Ranks, folder: str) -> None:
    """folder: where they met; NCCL looks there now and then as long as the group lives."""
    if watch is not None:
        watch.over.set()
        watch.join()
        if watch.failed.is_set():  # the others wait for one that is gone
            for follower in followers:
                follower.process.kill()
    for follower in followers:
        with suppress(OSError):
            follower.pipe.close()
    for follower in followers:
        follower.end()
    if watch is not None:
        ranks.group = None  # its threads must end before the interpreter does
    shutil.rmtree(folder, ignore_errors=True)


def devices_for(size: int, device: str) -> list[str]:
    """The device of every rank: the CPU for all, or consecutive GPUs from the one named."""
    if device == "cpu":
        return ["cpu"] * size
    if size == 1:
        return [device]
    first = int(device.partition(":")[2] or 0)
    here = torch.cuda.device_count()
    require(first + size <= here, f"tensor_parallel: {size} GPUs from {device} on are asked for; this host has {here}")
    return [f"cuda:{first + rank}" for rank in range(size)]


def check_shareable(model: object, drafter: object, recorder: object) -> None:
    """InputError for what several ranks cannot load or do together."""
    for what, one in (("model", model), ("drafter", drafter)):
        known = one is None or isinstance(one, str)
        require(known, f"{what}: ranks load it themselves; give its name or folder, not a loaded one")
    require(recorder is None, "recorder: several ranks cannot record; use tensor_parallel 1")


def sharing(size: int, whole: DecoderConfig, drafter: Drafter | None) -> str:
    """One line: how so many ranks share a model and its drafter."""
    drafts = "none" if drafter is None else "shared" if drafter.stack.ranks.size > 1 else "on each rank"
    return (
        f"tensor parallel: {size} ranks share {whole.num_heads} query and {whole.num_kv_heads} key/value heads; "
        f"drafter: {drafts}"
    )
