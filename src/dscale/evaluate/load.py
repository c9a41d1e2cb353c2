"""The load on an OpenAI-compatible server: closed loop with c workers, or open loop with Poisson arrivals.

Answers are streamed, so that the time of the first token is known, and asked for with
`stream_options.include_usage`. While the load runs, events are only looked at as far as needed: the client shares the
machine with the server. Whatever goes wrong with a request is one line in its row; once the server cannot be reached,
requests that were not sent yet are not sent.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from dscale.evaluate.bench_record import RequestRow
from dscale.evaluate.connection import ANSWER_SECONDS, CONNECT_SECONDS, Broken, Connections, Unreachable
from dscale.evaluate.manifest import BenchRequest

PATH = "/v1/chat/completions"
NOT_SENT = "not sent"


@dataclass
class Progress:
    """What has happened so far in the measured part of a run; tokens are those of ended requests."""

    total: int
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    failed: int = 0
    running: int = 0
    tokens: int = 0


class Watcher:
    """Is told while a run goes on; this one says nothing."""

    def changed(self, progress: Progress) -> None:
        """A request was sent or ended."""


@dataclass(frozen=True)
class Server:
    """An address, the name of the model there, and what is added to every body. token: sent as a bearer token.

    tokenizer: where given, an answer that ended at its end token counts no more tokens than its text has, and that one:
    some servers count on beyond it.
    """

    base_url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    token: str | None = None
    tokenizer: Any = None

    def client(self) -> httpx.AsyncClient:
        """An HTTP client for the questions around a load; proxies of the environment are not used."""
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        return httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=timeout, trust_env=False)

    def body(self, request: BenchRequest, temperature: float) -> dict[str, Any]:
        """What is posted. An arm whose body says `stream = false` gets its answers whole."""
        body = {
            "model": self.model,
            "messages": list(request.messages),
            "max_tokens": request.max_tokens,
            "temperature": temperature,
            "seed": request.seed & 0x7FFFFFFF,  # some servers take 32 bits
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if not body["stream"]:
            del body["stream_options"]
        return body


@dataclass(frozen=True)
class Measured:
    """Rows in the order of the requests; window_s: first submission to last completion. client_busy: share of a
    core that the client used over the window, None where the engine is asked without one."""

    rows: tuple[RequestRow, ...]
    window_s: float
    client_busy: float | None = None


async def closed_loop(
    server: Server, requests: Sequence[BenchRequest], concurrency: int, temperature: float, watcher: Watcher
) -> Measured:
    """c workers; each sends its next request when its last one has ended."""
    load = _Load(server, temperature, Progress(len(requests)), watcher)
    waiting = deque(enumerate(requests))

    async def work() -> None:
        while waiting:
            index, request = waiting.popleft()
            load.rows[index] = await load.answer(request)

    return await load.over(work() for _ in range(min(concurrency, len(requests))))


async def open_loop(
    server: Server, requests: Sequence[BenchRequest], rate: float, temperature: float, seed: int, watcher: Watcher
) -> Measured:
    """Requests sent at the times of a Poisson process of `rate` a second, whatever has ended by then."""
    load = _Load(server, temperature, Progress(len(requests)), watcher)

    async def send(index: int, request: BenchRequest, due: float) -> None:
        await asyncio.sleep(max(0.0, load.progress.began + due - time.perf_counter()))
        load.rows[index] = await load.answer(request)

    due = arrivals(len(requests), rate, seed)
    return await load.over(send(*one, at) for one, at in zip(enumerate(requests), due, strict=True))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests of a Poisson process arrive; the first at 0."""
    source, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        made.append(at)
        at += source.expovariate(rate)
    return made


class _Load:
    """One pass over the requests."""

    def __init__(self, server: Server, temperature: float, progress: Progress, watcher: Watcher) -> None:
        self.server, self.temperature = server, temperature
        self.connections = Connections(server.base_url, PATH, server.token)
        self.progress, self.watcher = progress, watcher
        self.rows: dict[int, RequestRow] = {}
        self.gone: str | None = None  # why the server cannot be reached any more

    async def over(self, work: Iterable[Coroutine[Any, Any, None]]) -> Measured:
        """Do all the work at once. All of it is done in this thread, so that its processor time is the client's."""
        gc.freeze()  # to look through all modules now and then would hold up every stream for a fifth of a second
        spent = time.thread_time()
        try:
            await asyncio.gather(*work)
            return self.measured(time.thread_time() - spent)
        finally:
            gc.unfreeze()
            self.connections.close()

    def now(self) -> float:
        return time.perf_counter() - self.progress.began

    async def answer(self, request: BenchRequest) -> RequestRow:
        """The row of one request, whatever becomes of it."""
        row = RequestRow(request.id, request.prompt_id, request.workload, self.now(), None, 0.0, 0, 0)
        if self.gone is not None:
            self.progress.failed += 1
            return replace(row, ended_s=row.sent_s, error=f"{NOT_SENT}: {self.gone}")
        self._count(running=1)
        stream = _Stream(self.now, keep=self.server.tokenizer is not None)
        error = await self._post(request, stream)
        row = replace(row, first_token_s=stream.first_token_s, ended_s=self.now(), error=error)
        if error is None:
            row = stream.fill(row, request.max_tokens, self.server.tokenizer)
        self._count(running=-1, done=row.error is None, failed=row.error is not None, tokens=row.output_tokens)
        return row

    async def _post(self, request: BenchRequest, stream: _Stream) -> str | None:
        """Read the answer into the stream; what went wrong in one line, or None."""
        try:
            reply = await self.connections.post(self.server.body(request, self.temperature), stream.feed)
        except Unreachable as error:
            self.gone = f"{self.server.base_url} cannot be reached ({_line(error)})"
            return self.gone
        except Broken as error:
            return f"the connection broke after {stream.events} events ({_line(error)})"
        if reply.status != 200:
            return f"HTTP {reply.status}: {_message(reply.body)}"
        if "json" in reply.kind:
            stream.whole(reply.body)
        return None

    def _count(self, running: int, done: int = 0, failed: int = 0, tokens: int = 0) -> None:
        progress = self.progress
        progress.running += running
        progress.done += done
        progress.failed += failed
        progress.tokens += tokens
        self.watcher.changed(progress)

    def measured(self, spent: float) -> Measured:
        """Times are moved so that the first submission is at 0. spent: seconds of processor time."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        start = min(row.sent_s for row in rows)
        moved = tuple(
            replace(
                row,
                sent_s=row.sent_s - start,
                ended_s=row.ended_s - start,
                first_token_s=None if row.first_token_s is None else row.first_token_s - start,
            )
            for row in rows
        )
        window = max(row.ended_s for row in moved)
        return Measured(moved, window, spent / window if window > 0 else None)


class _Stream:
    """The events of one answer. Only the first with text and the last ones are read; all are, with keep."""

    def __init__(self, now: Any, keep: bool) -> None:
        self.now, self.keep = now, keep
        self.first_token_s: float | None = None
        self.events = 0
        self._rest = b""
        self._ends: list[bytes] = []  # events that may hold usage, a reason to finish, or an error
        self._kept: list[bytes] = []

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def whole(self, answer: bytes) -> None:
        """An answer that was not streamed: there is no time of a first token."""
        self.events += 1
        self._ends.append(answer)
        self._kept.append(answer)

    def _event(self, event: bytes) -> None:
        self.events += 1
        if self.first_token_s is None and _has_text(event):
            self.first_token_s = self.now()
        if b'"usage":{' in event or b'"usage": {' in event or b'"error"' in event:
            self._ends.append(event)
        if self.keep:
            self._kept.append(event)

    def fill(self, row: RequestRow, max_tokens: int, tokenizer: Any) -> RequestRow:
        """The row with what usage says, or with what is wrong."""
        usage: dict[str, Any] | None = None
        for event in map(_parsed, self._ends):
            if event.get("error"):
                return replace(row, error=f"error in the stream: {_line(event['error'])}")
            usage = event.get("usage") or usage
        if usage is None or not isinstance(usage.get("completion_tokens"), int):
            why = "ended early" if self.events else "is empty"
            return replace(row, error=f"the answer {why}: no usage in it (stream_options.include_usage is needed)")
        tokens = min(usage["completion_tokens"], max_tokens)
        if self.keep:
            tokens = min(tokens, self._text_tokens(tokenizer, tokens))
        details = usage.get("completion_tokens_details") or {}
        return replace(
            row,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            output_tokens=tokens,
            steps=details.get("decode_steps"),
            accepted=details.get("accepted_draft_tokens"),
            verified=details.get("verified_slots"),
            drafted=details.get("drafted_tokens"),
        )

    def _text_tokens(self, tokenizer: Any, otherwise: int) -> int:
        """Tokens of the text and the end token, where the answer ended with one."""
        text, reason = "", None
        for event in map(_parsed, self._kept):
            for choice in event.get("choices") or ():
                text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
                reason = choice.get("finish_reason") or reason
        return len(tokenizer.encode(text, add_special=False)) + 1 if reason == "stop" else otherwise


def _has_text(event: bytes) -> bool:
    if event == b"[DONE]":
        return False
    deltas = [choice.get("delta") or {} for choice in _parsed(event).get("choices") or ()]
    return any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        found = json.loads(event)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _message(body: bytes) -> str:
    """What an error's body says, in one short line."""
    found = _parsed(body)
    error = found.get("error", found.get("detail", found.get("message")))
    return _line(error if error is not None else body.decode(errors="replace"))


def _line(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200]
