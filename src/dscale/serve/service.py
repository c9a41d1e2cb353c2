"""What the routes work with: who gets in, sequences through the engine, deadlines, token ids, and what is measured."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from dscale.config import SamplingParams
from dscale.engine.request import derive_seed
from dscale.models.tokenizer import Tokenizer
from dscale.serve.answers import TokenNames
from dscale.serve.errors import ApiError, from_engine, invalid
from dscale.serve.messages import Delta, EngineClient, EngineDied, Refusal, Snapshot, Submit, Usage
from dscale.serve.metrics import Metrics
from dscale.serve.settings import ServerSettings

LONG = 4096  # characters from which text is encoded in a thread, so that the other requests go on
T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, Delta], None]


@dataclass
class Service:
    """One model being served. `open`: sequences between admission and end; `closing` is set once shutdown began."""

    client: EngineClient
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: Metrics | None = None
    open: int = 0
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.names = TokenNames(self.tokenizer)
        self.started = int(time.time())
        self._base_seed = self.settings.seed if self.settings.seed is not None else secrets.randbits(62)
        self._prompts = 0
        self._by_client: Counter[str] = Counter()
        self._reader = deepcopy(self.tokenizer)  # a tokenizer may not encode in two threads at once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return int(self.client.about["context_length"])

    @property
    def state(self) -> str:
        """ok while a request would be served; else why not: ended, stopping, stalled or full."""
        if self.closing.is_set() or self.client.draining:
            return "stopping"
        if not self.client.alive:
            return "ended"
        if self.client.silence > self.settings.stall_seconds:
            return "stalled"
        return "full" if self.open >= self.settings.capacity else "ok"

    @contextmanager
    def admitted(self, sequences: int, client: str) -> Iterator[None]:
        """Room for so many sequences of a client; ApiError 503 or 429 where there is none."""
        self._check(sequences, client)
        self.open += sequences
        self._by_client[client] += 1
        try:
            yield
        finally:
            self.open -= sequences
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    def _check(self, sequences: int, client: str) -> None:
        room, state = self.settings.capacity, self.state
        if state == "stopping":
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=10)
        if state == "ended":
            raise from_engine(EngineDied())
        if state == "stalled":
            message = "the engine does not answer; try again later"
            raise ApiError(503, message, code="stalled", retry_after=self.settings.stall_seconds)
        if sequences > room:
            raise invalid(f"n: {sequences} sequences are more than this server holds; at most {room}", "n")
        limit = self.settings.max_per_client
        if limit is not None and self._by_client[client] >= limit:
            message = f"{limit} requests of this client are running; wait for one to end"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
        if self.open + sequences > room:
            raise ApiError(503, f"the queue is full ({room} sequences); try again", code="overloaded", retry_after=1)

    async def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of text; ApiError 400 for text that is no valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid("the text holds lone surrogates, which are not Unicode", code="bad_text") from None
        if len(text) < LONG:
            return self.tokenizer.encode(text, add_special)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._reader.encode, text, add_special)

    def submits(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        streamed: bool = True,
    ) -> list[Submit]:
        """The sequences of prompts × n, each with its own seed, as dscale.LLM derives them. Of an answer that is not
        streamed only the beginning and the end are asked for."""
        pace = self.settings.stream_interval if streamed else math.inf
        self._check_prompts(prompts)
        found: list[Submit] = []
        for index, prompt in enumerate(prompts):
            number, self._prompts = self._prompts, self._prompts + 1
            base = params.seed if params.seed is not None else derive_seed(self._base_seed, number)
            for copy in range(n):
                seed = base if copy == 0 else derive_seed(base, copy)
                name = f"{request_id}-{index}-{copy}"
                found.append(Submit(name, tuple(prompt), replace(params, n=1), seed, pace))
        return found

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        vocabulary = self.client.about["vocabulary"]
        for prompt in prompts:
            if not prompt:
                raise invalid("prompt: is empty; give at least one token", "prompt")
            if len(prompt) >= self.context:
                message = (
                    f"the prompt has {len(prompt)} tokens; the context length is {self.context}, and one must be left "
                    "for the answer"
                )
                raise invalid(message, "prompt", "context_length_exceeded")
            if not all(0 <= token < vocabulary for token in prompt):
                raise invalid(f"prompt: token ids must lie in [0, {vocabulary - 1}]", "prompt")

    async def deltas(self, submits: Sequence[Submit], log: dict[str, Any]) -> Deltas:
        """(index, delta) of all sequences as they come. Closing it aborts what still runs.

        ApiError for what the engine refuses, its end, a timeout (504), or a stop before the end (503).
        """
        timings = [Timing() for _ in submits]
        reason = "abort"
        try:
            async with aclosing(self._merged(submits)) as merged:
                async for index, delta in until(merged, self.settings.request_timeout):
                    timings[index].add(delta)
                    if delta.finish_reason == "abort":
                        raise ApiError(503, "the server shut down before the answer ended", code="shutting_down")
                    yield index, delta
        except (Refusal, EngineDied) as error:
            reason = "error"
            raise from_engine(error) from error
        finally:
            log |= {name: sum(getattr(one.usage, name) for one in timings) for name in ("completion_tokens", "steps")}
            log["prompt_tokens"] = sum(one.usage.prompt_tokens for one in timings)
            for timing in timings if self.metrics is not None else ():
                timing.tell(cast(Metrics, self.metrics), reason)

    def _merged(self, submits: Sequence[Submit]) -> Deltas:
        return self._one(submits[0]) if len(submits) == 1 else self._many(submits)

    async def _one(self, submit: Submit) -> Deltas:
        async with aclosing(cast(AsyncGenerator[Delta, None], self.client.generate(submit))) as deltas:
            async for delta in deltas:
                yield 0, delta

    async def _many(self, submits: Sequence[Submit]) -> Deltas:
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(maxsize=2 * len(submits))

        async def pump(index: int, submit: Submit) -> None:
            try:
                async with aclosing(self._one(submit)) as deltas:
                    async for _, delta in deltas:
                        await queue.put((index, delta))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index, submit)) for index, submit in enumerate(submits)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        """The snapshot in force, then every new one, until shutdown begins."""
        yield self.client.snapshot
        async with aclosing(cast(AsyncGenerator[Snapshot, None], self.client.snapshots())) as source:
            while (snapshot := await either(anext(source, None), self.closing)) is not None:
                yield snapshot


async def either(work: Awaitable[T], event: asyncio.Event) -> T | None:
    """Result of work, or None as soon as the event is set."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return cast("T", tasks[0].result()) if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(source: AsyncIterator[T], seconds: float) -> AsyncGenerator[T, None]:
    """Items of source; ApiError 504 when it has not ended after so many seconds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                item = await anext(source)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(504, f"the request took longer than {seconds:g} s and was ended", code="timeout") from None
        yield item


class Timing:
    """When the tokens of one sequence came."""

    def __init__(self) -> None:
        self.usage = Usage()
        self._began = self._last = time.perf_counter()
        self._first: float | None = None
        self._gaps: list[float] = []
        self._reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Take in a delta. Tokens that came together share the time since those before."""
        now, count = time.perf_counter(), len(delta.token_ids)
        if count and self._first is None:
            self._first, count = now - self._began, count - 1
            self._gaps += [0.0] * count
        elif count:
            self._gaps += [(now - self._last) / count] * count
        self._last = now if delta.token_ids else self._last
        self.usage, self._reason = delta.usage, delta.finish_reason

    def tell(self, metrics: Metrics, reason: str) -> None:
        """Count the sequence; reason: why it ended where the engine gave none."""
        total = time.perf_counter() - self._began
        metrics.finished(self.usage, self._first, total, self._gaps, self._reason or reason)
