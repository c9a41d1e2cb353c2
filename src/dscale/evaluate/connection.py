"""HTTP/1.1 connections of a load: one request at a time each, kept for the next one.

The client shares the machine with the server and must not be what is measured. httpx looks through its whole pool at
every request and each end of one: at 128 streams of 40 events 13 ms of processor time a request, 2 ms with a pool for
every stream. Here the parser hands what comes straight to who reads it: half a millisecond.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import httpx

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 900.0  # to open a connection; without a byte of an answer
IDLE_SECONDS = 4.0  # after which one is not used again: common servers close it after 5, maybe as a request comes


class Unreachable(Exception):
    """No connection can be opened. The message is its reason."""


class Broken(Exception):
    """A connection that ended, fell silent or spoke no HTTP before the answer was complete. The message is why."""


@dataclass
class Reply:
    """An answer. body: its bytes, where they were not handed on as they came."""

    status: int = 0
    kind: str = ""  # content-type
    body: bytes = b""


@dataclass
class Connections:
    """As many connections to one path as are asked for at a time. token: sent as a bearer token."""

    base_url: str
    path: str
    token: str | None = None
    _idle: list[Connection] = field(default_factory=list, init=False)
    _open: set[Connection] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.url = httpx.URL(self.base_url.rstrip("/") + self.path)
        self._head = _head(self.url, self.token)
        self._ssl: ssl.SSLContext | None = None
        if self.url.scheme == "https":
            self._ssl = httpx.create_ssl_context()  # one for all connections: it reads a file of certificates
            self._ssl.set_alpn_protocols(["http/1.1"])

    async def post(self, body: dict[str, Any], take: Callable[[bytes], None]) -> Reply:
        """Send a body as JSON. What comes of a 200 that is no JSON goes to `take` at once. Unreachable or Broken."""
        connection = await self._free()
        try:
            return await connection.ask(self._head, json.dumps(body, separators=(",", ":")).encode(), take)
        finally:
            if connection.closed:
                self._open.discard(connection)
            else:
                self._idle.append(connection)

    async def _free(self) -> Connection:
        """One that nobody uses: the last one used, or a new one."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and loop.time() - connection.heard < IDLE_SECONDS:
                return connection
            connection.close()
            self._open.discard(connection)
        port = self.url.port or (443 if self._ssl else 80)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, made = await loop.create_connection(Connection, self.url.host, port, ssl=self._ssl)
        except TimeoutError:
            raise Unreachable(f"no answer within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise Unreachable(str(error) or type(error).__name__) from None
        self._open.add(made)
        return made

    def close(self) -> None:
        """Close all of them."""
        for connection in self._open:
            connection.close()


def _head(url: httpx.URL, token: str | None) -> bytes:
    """The head of every request, up to the body's length."""
    lines = [b"POST " + url.raw_path + b" HTTP/1.1", b"host: " + url.netloc, b"accept: */*",
             b"accept-encoding: identity", b"content-type: application/json", b"user-agent: dscale"]  # fmt: skip
    if url.userinfo:  # goes before a token, as with httpx, which asks the questions around a load
        lines.append(b"authorization: Basic " + base64.b64encode(f"{url.username}:{url.password}".encode()))
    elif token:
        lines.append(f"authorization: Bearer {token}".encode())
    return b"\r\n".join(lines) + b"\r\n"


class Connection(asyncio.Protocol):
    """One connection. heard: when something came last, or was sent, by the clock of its loop."""

    def __init__(self) -> None:
        self._lost = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._begin(lambda data: None)

    def _begin(self, take: Callable[[bytes], None]) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._take, self._reply, self._parts = take, Reply(), list[bytes]()
        self._until_closed = True  # the end of the connection is that of the answer
        self._whole = True
        self.heard = self._loop.time()

    async def ask(self, head: bytes, body: bytes, take: Callable[[bytes], None]) -> Reply:
        """Send one request; its answer when it is complete."""
        assert self._transport is not None
        self._begin(take)
        self._done = self._loop.create_future()
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        try:
            await self._answered(self._done)
        except BaseException:
            self._done = None  # nobody waits for it any more
            self.close()
            raise
        self._reply.body = b"".join(self._parts)
        return self._reply

    async def _answered(self, done: asyncio.Future[None]) -> None:
        """Wait until it is, as long as something comes now and then. One timer for all of it: chunks are many."""
        while not done.done():
            left = self.heard + ANSWER_SECONDS - self._loop.time()
            if left <= 0:
                raise Broken(f"nothing came for {ANSWER_SECONDS:g} s")
            await asyncio.wait((done,), timeout=left)
        done.result()

    @property
    def closed(self) -> bool:
        """Whether it takes no further request."""
        return self._lost or self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """Close it; nothing that comes is read any more."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: Broken | None = None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came. What nobody asked for would be taken for the next answer, so no request follows it."""
        self.heard = self._loop.time()
        if self._done is None or self._done.done():
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(Broken(f"it cannot be read: {error.__context__ or error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed."""
        self._lost = True
        complete = error is None and self._until_closed and self._reply.status
        self._end(None if complete else Broken(str(error or "the server closed it")))

    # what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of the head."""
        name = name.lower()
        if name == b"content-type":
            self._reply.kind = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._until_closed = False

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._reply.status = self._parser.get_status_code()
        self._whole = self._reply.status != 200 or "json" in self._reply.kind

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._whole:
            self._parts.append(data)
        else:
            self._take(data)

    def on_message_complete(self) -> None:
        """The answer is complete, or it was but a first word (1xx)."""
        if self._reply.status < 200:
            self._reply, self._until_closed = Reply(), True
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._end()
