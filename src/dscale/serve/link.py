"""Frames on the pipe between HTTP process and engine process: a length, then pickled messages.

The engine's end blocks, the HTTP side's end is an asyncio stream. Both processes are ours, so pickle is safe here.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEADER = struct.Struct("!Q")
CHUNK = 1 << 20  # bytes read at a time
READ_LIMIT = 1 << 22  # bytes of the asyncio stream's buffer


class Closed(Exception):
    """The other process closed the pipe, or is gone."""


def frame(messages: Sequence[object]) -> bytes:
    """One frame that holds these messages."""
    body = pickle.dumps(list(messages), protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> list[Any]:
    """Messages of the next frame; Closed at the end of the stream."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise Closed from None


class Link:
    """The engine's end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._bytes = bytearray()

    def send(self, messages: Sequence[object]) -> None:
        """Send messages in one frame; nothing for none. Closed when nobody reads any more."""
        if not messages:
            return
        try:
            self._end.sendall(frame(messages))
        except OSError:
            raise Closed from None

    def receive(self, timeout: float | None) -> list[Any]:
        """Every message that is there; waits up to timeout seconds (None: for ever) while there is none.

        A frame of which only a part has come does not hold up the caller. Closed at the end of the stream.
        """
        messages = self._whole()
        while not messages and self._read(timeout):
            messages += self._whole()
        while self._read(0.0):
            messages += self._whole()
        return messages

    def _read(self, timeout: float | None) -> bool:
        """Take in some bytes; False when none came in time."""
        ready, _, _ = select.select([self._end], [], [], timeout)
        if not ready:
            return False
        try:
            data = self._end.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            raise Closed
        self._bytes += data
        return True

    def _whole(self) -> list[Any]:
        """Messages of the frames that are complete."""
        messages: list[Any] = []
        while len(self._bytes) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._bytes)
            end = HEADER.size + size
            if len(self._bytes) < end:
                break
            messages += pickle.loads(self._bytes[HEADER.size : end])
            del self._bytes[:end]
        return messages
