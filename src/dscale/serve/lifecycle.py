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
from dscale.serve.messages import Load

EXIT_SECONDS = 5.0  # that a process gets to end by itself once its pipe is closed


@dataclass
class Child:
    """The engine's process and our end of its pipe."""

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def end(self, patience: float = EXIT_SECONDS) -> int:
        """Exit code, after at most `patience` seconds; a process that still runs then is killed."""
        self.writer.close()
        try:
            return await asyncio.wait_for(self.process.wait(), patience)
        except TimeoutError:
            self.kill()
            return await self.process.wait()

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
            pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
        )  # fmt: skip
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=READ_LIMIT)
    writer.write(frame([load]))
    return Child(process, reader, writer)
