"""Starting and ending the engine's process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import Process
from contextlib import suppress
from dataclasses import dataclass

from dscale.serve.link import READ_LIMIT, frame
from dscale.serve.logs import tell
from dscale.serve.messages import Load

EXIT_SECONDS = 5.0  # that a process gets to end by itself once its pipe is closed
RELAY_SECONDS = 1.0  # in which its last words are read; whatever it started may hold its output open for longer
LINE = 1 << 16  # most bytes of what it prints that are one line of the log


@dataclass
class Child:
    """The engine's process and our end of its pipe."""

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    relay: asyncio.Task[None]  # of what it prints

    async def end(self, patience: float = EXIT_SECONDS) -> int:
        """Exit code, after at most `patience` seconds; a process that still runs then is killed."""
        self.writer.close()
        try:
            code = await asyncio.wait_for(self.process.wait(), patience)
        except TimeoutError:
            self.kill()
            code = await self.process.wait()
        await asyncio.wait([self.relay], timeout=RELAY_SECONDS)
        return code

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self.process.kill()


async def launch(load: Load) -> Child:
    """Start a fresh Python (nothing of this process is copied, only one end of a socket) and tell it what to load.

    It runs in a session of its own, so that Ctrl-C in the terminal reaches this process alone.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "dscale.serve.engine_process", str(theirs.fileno()),
            pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
        )  # fmt: skip
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=READ_LIMIT)
    writer.write(frame([load]))
    assert process.stdout is not None
    return Child(process, reader, writer, asyncio.create_task(relayed(process.stdout)))


async def relayed(output: asyncio.StreamReader) -> None:
    """Log what a process prints, line by line: warnings, compilers, a fault's last words."""
    rest = b""
    while data := await output.read(LINE):
        *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(rest) > LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            said(line)
    said(rest)


def said(line: bytes) -> None:
    """One line of the log from one that the engine's process printed."""
    text = line.decode("utf-8", "replace").strip()
    if text:
        tell("engine said", text=text)
