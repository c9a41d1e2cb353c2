"""A rank other than the first: `python -m dscale.engine.follower FD PARENT`, started by engine/crew.py.

FD is its end of the pipe, PARENT the first rank's process. After an introduction come commands, each a tuple:

    ("build", number, options)      make an LLM with this rank's share of the weights
    ("drop", number)                forget it
    (number, name, *arguments)      call this method of its worker, or its `switch`

It ends when the pipe is closed, when the first rank is gone, or with an error, whose words go up the pipe.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from dscale.config import InputError
from dscale.engine.crew import COLLECTIVE_SECONDS, Introduction, Member
from dscale.layers.ranks import connect

if TYPE_CHECKING:
    from dscale.engine.llm import LLM

ORPHAN_SECONDS = 0.5  # between looks at whether the first rank is there


def follow(pipe: Connection) -> None:
    """Carry out commands until the pipe is closed."""
    introduction: Introduction = pickle.loads(pipe.recv_bytes())
    device = torch.device(introduction.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(introduction.threads)
    pipe.send("here")
    i = introduction
    member = Member(connect(i.rank, i.size, i.store, device, COLLECTIVE_SECONDS, i.check), i.device)
    member.ranks.least(0, device)
    llms: dict[int, LLM] = {}
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        obey(llms, member, pickle.loads(message))


def obey(llms: dict[int, LLM], member: Member, command: tuple[Any, ...]) -> None:
    """Carry out one command."""
    from dscale.engine.llm import LLM

    first, *rest = command
    if first == "build":
        number, options = rest
        llms[number] = LLM(**options, crew=member)
    elif first == "drop":
        llms.pop(rest[0], None)
    elif rest[0] == "switch":
        with suppress(InputError):  # the first rank meets it too, and says so
            llms[first].switch(*rest[1:])
    else:
        getattr(llms[first].engine.worker, rest[0])(*rest[1:])


def end_with(parent: int) -> None:
    """End this process as soon as its parent is gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def main() -> int:
    """The whole life of the process; its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
    pipe = Connection(int(sys.argv[1]))
    try:
        follow(pipe)
    except (Exception, KeyboardInterrupt) as error:
        words = str(error) if isinstance(error, InputError) else traceback.format_exc()
        with suppress(OSError):
            pipe.send(words)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the group would outlive the interpreter
