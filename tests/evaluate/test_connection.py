"""Connections of the load: kept and reused, answers of every framing, and what breaks one."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dscale.evaluate import connection
from dscale.evaluate.arm_process import free_port
from dscale.evaluate.connection import Broken, Connections, Reply, Unreachable

OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = OK + b'content-type: application/json\r\ncontent-length: 8\r\n\r\n{"a": 1}'


class Server:
    """Says the next of its pieces to each request; None closes the connection. heads: what it was sent."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.heads: list[bytes] = []
        self.connections = 0
        self.closed_idle = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                await reader.readexactly(int(length))
                self.heads.append(head)
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await asyncio.sleep(0.005)  # so that pieces come one by one
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            self.closed_idle.set()


def ask(server: Server, work: Callable[[Connections], Awaitable[Any]], **options: Any) -> Any:
    """Result of work on connections to a server that runs meanwhile."""

    async def run() -> Any:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        connections = Connections(f"http://127.0.0.1:{port}", "/x?y=%20", **options)
        try:
            return await work(connections)
        finally:
            connections.close()
            listening.close()

    return asyncio.run(run())


def test_a_connection_is_kept_and_answers_come_as_they_are_sent() -> None:
    server = Server([STREAM, b"3\r\nab", b"c\r\n", b"2\r\nde\r\n0\r\n\r\n"], [WHOLE])
    taken: list[bytes] = []

    async def twice(connections: Connections) -> tuple[Reply, Reply]:
        return await connections.post({"n": 1}, taken.append), await connections.post({"n": 2}, taken.append)

    first, second = ask(server, twice, token="100%")
    assert taken == [b"ab", b"c", b"de"]
    assert (first.status, first.kind, first.body) == (200, "text/event-stream", b"")
    assert (second.status, second.body) == (200, b'{"a": 1}')
    assert server.connections == 1
    lines = server.heads[0].split(b"\r\n")
    assert lines[0] == b"POST /x?y=%20 HTTP/1.1"
    assert b"authorization: Bearer 100%" in lines
    assert b"content-length: 7" in lines
    assert lines[1].startswith(b"host: 127.0.0.1:")


def test_as_many_connections_as_requests_at_a_time() -> None:
    server = Server(*[[WHOLE] for _ in range(6)])

    async def three_then_three(connections: Connections) -> None:
        for _ in range(2):
            await asyncio.gather(*(connections.post({}, print) for _ in range(3)))

    ask(server, three_then_three)
    assert server.connections == 3


@pytest.mark.parametrize(
    ("pieces", "body", "status"),
    [
        ([OK + b"content-type: application/json\r\n\r\n{", b"}", None], b"{}", 200),  # its end is the connection's
        ([b"HTTP/1.1 103 Early Hints\r\n\r\n", WHOLE], b'{"a": 1}', 200),
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 3\r\n\r\nfu", b"ll"], b"ful", 503),
    ],
)
def test_every_framing(pieces: list[bytes | None], body: bytes, status: int) -> None:
    reply = ask(Server(pieces), lambda connections: connections.post({}, print))
    assert (reply.body, reply.status) == (body, status)


def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again() -> None:
    server = Server([OK + b"connection: close\r\ncontent-length: 0\r\n\r\n", None], [WHOLE, None], [WHOLE])

    async def thrice(connections: Connections) -> list[int]:
        found = [(await connections.post({}, print)).status]
        for _ in range(2):
            found.append((await connections.post({}, print)).status)
            await server.closed_idle.wait()
            await asyncio.sleep(0.02)
        return found

    assert ask(server, thrice) == [200, 200, 200]
    assert server.connections == 3


@pytest.mark.parametrize("pieces", [[WHOLE + b"more"], [WHOLE, b"HT"]])
def test_no_request_follows_what_nobody_asked_for(pieces: list[bytes | None]) -> None:
    server = Server(pieces, [WHOLE])

    async def twice(connections: Connections) -> list[bytes]:
        first = await connections.post({}, print)
        await asyncio.sleep(0.02)
        return [first.body, (await connections.post({}, print)).body]

    assert ask(server, twice) == [b'{"a": 1}'] * 2
    assert server.connections == 2


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.05)
    server = Server([WHOLE], [WHOLE], [WHOLE])

    async def thrice(connections: Connections) -> None:
        for pause in (0.0, 0.1, 0.0):
            await connections.post({}, print)
            await asyncio.sleep(pause)

    ask(server, thrice)
    assert server.connections == 2


def test_a_request_that_is_given_up_takes_its_connection_with_it() -> None:
    server = Server([STREAM, b"3\r\nabc\r\n"], [WHOLE])
    taken: list[bytes] = []

    async def cut_short(connections: Connections) -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connections.post({}, taken.append), 0.1)
        assert not connections._open
        return (await connections.post({}, taken.append)).status

    assert ask(server, cut_short) == 200
    assert (server.connections, taken) == (2, [b"abc"])


def test_a_name_in_the_address_is_sent_decoded_and_goes_before_a_token() -> None:
    connections = Connections("http://us%40er:p%3Ass@[::1]:8000/base/", "/x", token="t")
    *lines, _ = connections._head.split(b"\r\n")
    assert lines[0] == b"POST /base/x HTTP/1.1"
    assert b"host: [::1]:8000" in lines
    assert b"authorization: Basic " + base64.b64encode(b"us@er:p:ss") in lines
    assert not any(b"Bearer" in line for line in lines)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([None], "the server closed it"),
        ([STREAM, b"3\r\nabc\r\n", None], "the server closed it"),
        ([b"SSH-2.0-OpenSSH\r\n"], "it cannot be read"),
        ([b"HTTP/1.1 101 Other\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"], "it cannot be read"),
        ([STREAM, b"3\r\nabc\r\n", b""], "nothing came for 0.3 s"),
    ],
)
def test_what_breaks_off_is_told(monkeypatch: pytest.MonkeyPatch, pieces: list[bytes | None], why: str) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.3)
    with pytest.raises(Broken, match=why):
        ask(Server(pieces), lambda connections: connections.post({}, lambda data: None))


def test_a_slow_answer_is_waited_for_as_long_as_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.3)
    pieces: list[bytes | None] = [STREAM, *[b"1\r\nx\r\n"] * 100, b"0\r\n\r\n"]
    taken: list[bytes] = []
    ask(Server(pieces), lambda connections: connections.post({}, taken.append))
    assert len(taken) == 100  # in 0.5 s


def test_nobody_there() -> None:
    connections = Connections(f"http://127.0.0.1:{free_port()}", "/x")
    with pytest.raises(Unreachable, match=r"refused|failed"):
        asyncio.run(connections.post({}, print))
