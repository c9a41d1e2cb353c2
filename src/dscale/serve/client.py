"""The HTTP side's end of the engine: requests in, deltas out, all in one asyncio loop.

client = await Client.start("smollm2-135m", policy="auto")
async with aclosing(client.generate(Submit("1", prompt, params, seed))) as deltas:
    async for delta in deltas: ...
code = await client.stop(after=30.0)
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from dscale.config import InputError
from dscale.serve.lifecycle import Child, launch
from dscale.serve.link import Closed, frame, read_frame
from dscale.serve.logs import tell
from dscale.serve.messages import (
    Abort,
    Delta,
    EngineDied,
    Failed,
    Load,
    Ready,
    RefitOptions,
    Refitted,
    Refusal,
    Refused,
    Snapshot,
    Stop,
    Submit,
    Switch,
    Switched,
)

log = logging.getLogger("dscale.serve.engine")
STOP_GRACE = 10.0  # seconds beyond a Stop's own until the process is killed
SNAPSHOTS_KEPT = 100  # unread ones a subscriber may have; older ones are dropped


class Mailbox:
    """What came for one request and was not read yet: at most one delta, since a later one is added to it."""

    def __init__(self) -> None:
        self.ended = False  # the engine has nothing more to say
        self._delta: Delta | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Add a delta."""
        self._delta = delta if self._delta is None else join(self._delta, delta)
        self.ended = delta.finish_reason is not None
        self._filled.set()

    def fail(self, error: Exception) -> None:
        """Let the reader get this error, once it has read what came before."""
        if not self.ended:
            self._error, self.ended = error, True
            self._filled.set()

    async def take(self) -> Delta:
        """All that is there, waiting for something."""
        await self._filled.wait()
        self._filled.clear()
        if self._delta is None:
            assert self._error is not None
            raise self._error
        delta, self._delta = self._delta, None
        if self._error is not None:
            self._filled.set()
        return delta


def join(first: Delta, then: Delta) -> Delta:
    """`first` with the delta that follows it added, in place."""
    first.text += then.text
    first.token_ids += then.token_ids
    first.steps += then.steps
    if then.logprobs is not None:
        first.logprobs = (first.logprobs or []) + then.logprobs
    if first.prompt_logprobs is None:
        first.prompt_logprobs = then.prompt_logprobs
    first.usage, first.finish_reason, first.stop_reason = then.usage, then.finish_reason, then.stop_reason
    return first


class Client:
    """An EngineClient on the engine's process."""

    def __init__(self, child: Child, about: dict[str, Any]) -> None:
        self.about = about
        self.snapshot = Snapshot(time=0.0, policy=about["policy"], pages=about["pages"])
        self.draining = False
        self._child = child
        self._alive = True
        self._boxes: dict[str, Mailbox] = {}
        self._switches: deque[asyncio.Future[Switched]] = deque()
        self._subscribers: set[asyncio.Queue[Snapshot | None]] = set()
        self._failed: Failed | None = None
        self._owed: float | None = None  # since when the engine has owed an answer, by the loop's clock
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, model: str, max_waiting: int = 256, refit: RefitOptions | None = None, **options: Any
    ) -> Client:
        """Start the process and wait until the engine is loaded. options: those of dscale.engine.llm.LLM.

        max_waiting: requests that may wait beyond those that run. InputError for what cannot be loaded, EngineDied when
        the process ends otherwise.
        """
        child = await launch(Load(model, options, max_waiting, refit))
        try:
            (first,) = await read_frame(child.reader)
        except Closed:
            raise EngineDied(f"the engine ended while loading (exit code {await child.end()})") from None
        except BaseException:
            child.kill()
            await child.end()
            raise
        if isinstance(first, Failed):
            await child.end()
            raise InputError(first.message) if first.bad_input else EngineDied(f"{first.message}\n{first.detail}")
        assert isinstance(first, Ready)
        return cls(child, first.about)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.process.pid

    @property
    def alive(self) -> bool:
        """True while a request would be served."""
        return self._alive and not self.draining

    @property
    def silence(self) -> float:
        """Seconds for which the engine has said nothing although something was asked of it."""
        return 0.0 if self._owed is None else asyncio.get_running_loop().time() - self._owed

    async def wait(self) -> int:
        """Exit code of the engine's process, once it has ended, whatever the reason."""
        return await asyncio.shield(self._listener)

    async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        """Deltas of one request to its end; those that came since the last read are joined.

        Raises Refusal or EngineDied. Closing the iterator aborts the request: use contextlib.aclosing, for a cancelled
        task leaves an iterator that it was not waiting on to the garbage collector.
        """
        self._check(submit.id)
        box = self._boxes[submit.id] = Mailbox()
        try:
            self._send(submit)
            while True:
                delta = await box.take()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            del self._boxes[submit.id]
            if not box.ended:
                self._send(Abort(submit.id))

    def _check(self, id: str) -> None:
        if not self._alive:
            raise EngineDied(self._last_words())
        if self.draining:
            raise Refusal(Refused(id, "shutdown", "the server is shutting down"))
        if id in self._boxes:
            raise Refusal(Refused(id, "invalid", f"request id {id!r} is already in use"))

    async def switch(self, switch: Switch) -> str:
        """Name of the policy now in force; Refusal when it cannot be taken."""
        self._check("")
        answer: asyncio.Future[Switched] = asyncio.get_running_loop().create_future()
        self._switches.append(answer)
        self._send(switch)
        switched = await asyncio.shield(answer)
        if switched.error is not None:
            raise Refusal(Refused("", "invalid", switched.error))
        return switched.policy

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Every new snapshot until the engine ends; who reads too slowly misses old ones."""
        queue: asyncio.Queue[Snapshot | None] = asyncio.Queue()
        self._subscribers.add(queue)
        try:
            while self._alive and (snapshot := await queue.get()) is not None:
                yield snapshot
        finally:
            self._subscribers.discard(queue)

    async def stop(self, after: float) -> int:
        """Refuse what comes, let what runs finish for up to `after` seconds, abort the rest; exit code of the process.

        May be called again with fewer seconds.
        """
        self.draining = True
        if self._alive:
            self._send(Stop(after))
        done, _ = await asyncio.wait([self._listener], timeout=after + STOP_GRACE)
        if not done:
            log.error("the engine did not stop in time and is killed")
            self._child.kill()
        return await self.wait()

    def _send(self, message: object) -> None:
        if self._alive:
            self._child.writer.write(frame([message]))
            if self._owed is None:  # the loop answers whatever comes, with a snapshot if with nothing else
                self._owed = asyncio.get_running_loop().time()

    async def _listen(self) -> int:
        """Hand out what comes until the pipe is closed; then the process' exit code."""
        try:
            while True:
                for message in await read_frame(self._child.reader):
                    self._receive(message)
                waited = self._switches or any(not box.ended for box in self._boxes.values())
                self._owed = asyncio.get_running_loop().time() if waited else None
        except Closed:
            pass
        except Exception:  # then nobody would hear of the engine again
            log.exception("what the engine said cannot be read; it is killed")
            self._child.kill()
        self._alive = False
        self._give_up(EngineDied(self._last_words()))
        code = await self._child.end()
        if code != 0:
            detail = f"\n{self._failed.detail}" if self._failed else ""
            log.critical("the engine's process ended with code %d: %s%s", code, self._last_words(), detail)
        return code

    def _receive(self, message: object) -> None:
        if isinstance(message, Delta | Refused):
            box = self._boxes.get(message.id)
            if box is not None and isinstance(message, Delta):
                box.put(message)
            elif box is not None and isinstance(message, Refused):
                box.fail(Refusal(message))
        elif isinstance(message, Snapshot):
            self.snapshot = message
            for queue in self._subscribers:
                if queue.qsize() >= SNAPSHOTS_KEPT:
                    queue.get_nowait()
                queue.put_nowait(message)
        elif isinstance(message, Switched):  # in force also when who asked has left
            self.about |= {"policy": message.policy, "slots": message.slots}
            self._switches.popleft().set_result(message)
        elif isinstance(message, Refitted):
            failed = message.record.get("outcome") == "failed"
            tell("refit", logging.WARNING if failed else logging.INFO, **message.record)
        elif isinstance(message, Failed):
            self._failed = message

    def _give_up(self, error: Exception) -> None:
        """Nothing more will come: tell everyone who waits."""
        for box in self._boxes.values():
            box.fail(error)
        for answer in self._switches:
            answer.set_exception(error)
        for queue in self._subscribers:
            queue.put_nowait(None)

    def _last_words(self) -> str:
        return f"the engine ended ({self._failed.message})" if self._failed else "the engine ended"
