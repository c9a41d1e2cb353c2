"""Clients of the engine for tests: a tiny real engine in a thread, and one that says what a script tells it to."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import uvicorn

from dscale.engine.llm import LLM
from dscale.models.tokenizer import Tokenizer
from dscale.serve.app import build_app
from dscale.serve.client import Mailbox
from dscale.serve.engine_process import EngineLoop, about
from dscale.serve.messages import (
    Abort,
    Delta,
    EngineDied,
    Refusal,
    Refused,
    Snapshot,
    Stop,
    Submit,
    Switch,
    Switched,
    Usage,
)
from dscale.serve.run import HttpServer
from dscale.serve.service import Service
from dscale.serve.settings import ServerSettings
from tests.engine.pairs import make_llm, tiny_drafter, tiny_target

CHAT = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}quick {% endif %}<assistant>"
)


@cache
def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end token; a chat template that shows tools."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return Tokenizer(fast, [256])


def tiny_llm(policy: str = "full", **options: Any) -> LLM:
    """A random llama of one token a byte with a random drafter."""
    target = replace(tiny_target("llama", vocab=257), own_tokenizer=byte_tokenizer(), name="tiny")
    return make_llm(target, policy, tiny_drafter(target), **options)


class Pipe:
    """The loop's end: messages in from any thread, messages out to `hand`."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.hand: Any = lambda messages: None

    def send(self, messages: list[object]) -> None:
        self.hand(messages)

    def receive(self, timeout: float | None) -> list[Any]:
        found = []
        try:
            found.append(self.inbox.get(timeout is None or timeout > 0, timeout))
            while True:
                found.append(self.inbox.get_nowait())
        except queue.Empty:
            return found


class InProcess:
    """An EngineClient on an engine in a thread of this process."""

    def __init__(self, llm: LLM, max_waiting: int = 256) -> None:
        self.llm, self.about = llm, about(llm)
        self.snapshot = Snapshot(0.0, llm.policy)
        self.draining, self.silence = False, 0.0
        self.aborted: list[str] = []
        self._pipe = Pipe()
        self._pipe.hand = self._receive
        self._boxes: dict[str, tuple[asyncio.AbstractEventLoop, Mailbox]] = {}
        self._switches: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Switched]]] = []
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Snapshot]]] = []
        self._thread = threading.Thread(target=EngineLoop(llm, self._pipe, max_waiting).run, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.draining

    def _receive(self, messages: list[object]) -> None:
        for message in messages:
            if isinstance(message, Snapshot):
                self.snapshot = message
                for loop, listener in self._listeners:
                    loop.call_soon_threadsafe(listener.put_nowait, message)
            elif isinstance(message, Switched):
                loop, future = self._switches.pop(0)
                loop.call_soon_threadsafe(future.set_result, message)
            elif isinstance(message, Delta | Refused) and message.id in self._boxes:
                loop, box = self._boxes[message.id]
                if isinstance(message, Delta):
                    loop.call_soon_threadsafe(box.put, message)
                else:
                    loop.call_soon_threadsafe(box.fail, Refusal(message))

    async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        box = Mailbox()
        self._boxes[submit.id] = asyncio.get_running_loop(), box
        try:
            self._pipe.inbox.put(submit)
            while True:
                delta = await box.take()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if not box.ended:
                self.aborted.append(submit.id)
                self._pipe.inbox.put(Abort(submit.id))
            del self._boxes[submit.id]

    async def switch(self, switch: Switch) -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Switched] = loop.create_future()
        self._switches.append((loop, future))
        self._pipe.inbox.put(switch)
        switched = await future
        if switched.error is not None:
            raise Refusal(Refused("", "invalid", switched.error))
        self.about |= {"policy": switched.policy, "slots": switched.slots}
        return switched.policy

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        listener = asyncio.get_running_loop(), asyncio.Queue()
        self._listeners.append(listener)
        try:
            while True:
                yield await listener[1].get()
        finally:
            self._listeners.remove(listener)

    def stop(self) -> None:
        self.draining = True
        self._pipe.inbox.put(Stop(0.0))
        self._thread.join(20)


class Scripted:
    """An EngineClient that says the pieces of `text`, one a step, then ends as `ending` says.

    ending: stop, length, abort; died (the engine ends), hang (nothing more comes), or a Refused.
    """

    def __init__(self, text: Sequence[str] = ("hello",), ending: str | Refused = "stop", pause: float = 0.0) -> None:
        self.about = {"context_length": 512, "vocabulary": 257, "policy": "off", "versions": {"dscale": "0"}}
        self.snapshot = Snapshot(0.0, "off")
        self.text, self.ending, self.pause = list(text), ending, pause
        self.alive, self.draining, self.silence = True, False, 0.0
        self.submits: list[Submit] = []
        self.closed = 0

    async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        self.submits.append(submit)
        usage = Usage(prompt_tokens=len(submit.prompt))
        try:
            if isinstance(self.ending, Refused):
                raise Refusal(self.ending)
            for index, piece in enumerate(self.text):
                await asyncio.sleep(self.pause)
                usage = replace(usage, completion_tokens=index + 1, steps=index + 1, slots=index + 1)
                last = index == len(self.text) - 1 and self.ending in ("stop", "length", "abort")
                yield Delta(submit.id, piece, [index], [], usage, finish_reason=str(self.ending) if last else None)
            if self.ending == "died":
                raise EngineDied
            if self.ending == "hang":
                await asyncio.sleep(3600)
        finally:
            self.closed += 1

    async def switch(self, switch: Switch) -> str:
        return switch.policy

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        await asyncio.sleep(3600)
        yield self.snapshot


def service_of(client: InProcess | Scripted, **settings: Any) -> Service:
    """A service on a client, with the byte tokenizer."""
    from prometheus_client import CollectorRegistry

    from dscale.serve.metrics import Metrics

    known = ServerSettings(**{"model": "tiny", "seed": 0, "max_requests": 4, "max_queue": 60, **settings})
    return Service(client, byte_tokenizer(), known, Metrics(CollectorRegistry(), "tiny"))


@contextmanager
def live(service: Service) -> Iterator[str]:
    """A uvicorn with the service's app on a free port; its address."""
    config = uvicorn.Config(build_app(service), log_config=None, access_log=False, lifespan="off")
    server = HttpServer(config)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    sock.listen(128)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def post(url: str, path: str, body, **options) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=20, **options)


def wait_for(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()
