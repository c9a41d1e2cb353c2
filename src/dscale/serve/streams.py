"""Responses that outlive their first byte: server-sent events, and work that ends when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

from dscale.serve.answers import event
from dscale.serve.errors import ApiError

T = TypeVar("T")
STALLED = 60.0  # seconds a reader may leave one event unread before its stream is cut
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection before the answer was ready."""


async def watched(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of work, which is cancelled (ClientGone) as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. When the client goes or stops reading, `events` is closed at once.

    An ApiError of the events becomes a last event in OpenAI's shape.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], log: dict[str, Any]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events, self._log = events, log

    async def stream_response(self, send: Send) -> None:
        """Send what comes until the end."""
        start: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        self._log["error"] = "client_gone"  # unless it turns out otherwise
        async with aclosing(self._events):
            with suppress(TimeoutError):
                async with Reader(send) as reader:
                    await self._tell(reader, start)

    async def _tell(self, reader: Reader, start: Message) -> None:
        await reader.send(start)
        try:
            async for piece in self._events:
                await reader.send(_body(piece, True))
            del self._log["error"]
        except ApiError as error:
            self._log["error"] = error.code
            await reader.send(_body(event(error.body()), True))
        await reader.send(_body(b"", False))


class Reader:
    """A client that reads a stream. TimeoutError at the end of its context once it has left something unread for
    STALLED seconds. One timer looks after all events: one for each was a twentieth of what serving a stream costs."""

    def __init__(self, send: Send) -> None:
        self._send, self._limit = send, asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when it was given what it has not taken yet

    async def __aenter__(self) -> Reader:
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(STALLED, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    async def send(self, message: Message) -> None:
        """Send it; returns once there is room for more."""
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        unread = 0.0 if self._since is None else now - self._since
        if unread >= STALLED:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(STALLED - unread, self._look)


def _body(body: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def first_of(events: AsyncGenerator[bytes, None], request: Request) -> AsyncGenerator[bytes, None]:
    """The same events, of which the first has come: errors before it are still errors of the response."""

    async def begin() -> bytes:
        return await anext(events)

    try:
        first = await watched(request, begin())
    except BaseException:
        await events.aclose()
        raise
    return _rejoined(first, events)


async def _rejoined(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for piece in events:
            yield piece
