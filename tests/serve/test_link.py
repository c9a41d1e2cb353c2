"""Frames over a real socket pair: whole, in pieces, many at once, and the end."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dscale.serve.link import Closed, Link, frame, read_frame
from dscale.serve.messages import Abort


def test_a_frame_in_pieces_is_not_waited_for_and_order_is_kept():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link, data = Link(theirs), frame([Abort("a"), Abort("b")]) + frame([Abort("c" * 100)])
        got = []
        for start in range(0, len(data), 37):
            ours.sendall(data[start : start + 37])
            got += link.receive(0.0)
        assert got == [Abort("a"), Abort("b"), Abort("c" * 100)]
        assert link.receive(0.0) == []
        ours.sendall(data)
        assert link.receive(None) == got


def test_the_end_of_the_stream_is_told_on_both_sides():
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    ours.close()
    with pytest.raises(Closed):
        link.receive(None)
    with pytest.raises(Closed):
        link.send([Abort("a")])
    link.send([])  # nothing to send is no news
    theirs.close()


def test_large_frames_pass_from_the_engine_to_a_stream():
    async def exchange() -> list[Abort]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        with theirs:
            sending = asyncio.to_thread(Link(theirs).send, [Abort("x" * 5_000_000)])
            got, _ = await asyncio.gather(read_frame(reader), sending)
        with pytest.raises(Closed):
            await read_frame(reader)
        writer.close()
        return got

    assert asyncio.run(exchange()) == [Abort("x" * 5_000_000)]
