"""The engine's process: `python -m dscale.serve.engine_process FD`, started by serve/lifecycle.py.

FD is its end of the pipe. The first message, a Load, says what to serve; then it takes what has come (Submit, Abort,
Switch, Stop), makes one engine step, sends what that added, and so on. With nothing to do it waits on the pipe. It
ignores SIGINT and SIGTERM, because the HTTP process decides when to stop, and it ends when that process is gone.
"""

from __future__ import annotations

import faulthandler
import platform
import signal
import socket
import sys
import time
import traceback
import warnings
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dscale.config import POLICIES, InputError
from dscale.engine.request import Request, Status
from dscale.serve.garbage import keep_out_of_collections
from dscale.serve.link import Closed, Link
from dscale.serve.logs import one_line
from dscale.serve.messages import (
    Abort,
    Delta,
    Failed,
    Load,
    Ready,
    Refused,
    Snapshot,
    Stop,
    Submit,
    Switch,
    Switched,
    Usage,
)

if TYPE_CHECKING:
    from dscale.engine.llm import LLM
    from dscale.serve.refit import Refitter

# Of all streams. On a CPU events take time from the cores that compute; beside a GPU the process that sends them is the
# first to be busy (a small model would make 25,000).
EVENTS_A_SECOND = {"cpu": 100.0, "cuda": 3000.0}
SNAPSHOT_SECONDS = 0.1  # between snapshots while something runs
REFIT_SECONDS = 0.2  # between looks at a refit that runs while nothing else does


class Messages(Protocol):
    """The end of the pipe that the loop reads and writes; serve/link.py's Link."""

    def send(self, messages: list[object]) -> None:
        """Send them together."""
        ...

    def receive(self, timeout: float | None) -> list[Any]:
        """What is there, or comes within timeout seconds (None: for ever)."""
        ...


@dataclass
class Told:
    """A request, what of it was told, and from when on the next delta may go (seconds of the monotonic clock).

    pace: seconds between deltas, at least; None: its share of EVENTS_A_SECOND.
    """

    request: Request
    usage: Usage
    pace: float | None
    next: float = 0.0


class EngineLoop:
    """Drives the engine of an LLM from messages, until a Stop is carried out or the pipe is closed."""

    def __init__(self, llm: LLM, link: Messages, max_waiting: int, refitter: Refitter | None = None) -> None:
        from dscale.serve.tally import Tally

        self.llm, self.engine, self.link = llm, llm.engine, link
        self.tally, self.refitter = Tally(llm.engine), refitter
        self.most = llm.config.max_requests + max_waiting
        self._open: dict[str, Told] = {}
        self._share = 1.0 / EVENTS_A_SECOND[self.engine.worker.device.type]
        self._compiling: dict[str, tuple[Submit, Future]] = {}  # whose grammar is new, while others run
        self._threads = ThreadPoolExecutor(1, "grammar")
        self._out: list[object] = []
        self._stop_at: float | None = None
        self._shown_at = 0.0
        self._changed = True  # since the last snapshot

    def run(self) -> None:
        """Serve; returns once a Stop is carried out."""
        self.link.send([Ready(about(self.llm))])
        try:
            while self._turn():
                pass
        finally:
            if self.refitter is not None:
                self.refitter.close()

    def _patience(self) -> float | None:
        """Seconds to wait for messages; None: for ever."""
        if self._changed or self.engine.busy or self._compiling or self._stop_at is not None:
            return 0.0
        return REFIT_SECONDS if self.refitter is not None and self.refitter.running else None

    def _turn(self) -> bool:
        """Messages, a step, answers; False after the last."""
        for message in self.link.receive(self._patience()):
            self._take(message)
            self._changed = True
        self._add_compiled()
        if self.engine.busy and self._stop_at is not None and time.monotonic() >= self._stop_at:
            for id in list(self._open):
                self._abort(id)
        if self.engine.busy:
            stepped, pace = self.engine.step(), self._fair_pace()
            for request in stepped:
                self._tell(request, pace)
            self._changed = True
        if self.refitter is not None:
            refitted = self.refitter.turn()
            self._out += refitted
            self._changed = self._changed or bool(refitted)
        self._show()
        out, self._out = self._out, []
        self.link.send(out)
        return self.engine.busy or bool(self._compiling) or self._stop_at is None

    def _take(self, message: object) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message.id)
        elif isinstance(message, Switch):
            self._switch(message)
        elif isinstance(message, Stop):
            at = time.monotonic() + message.after
            self._stop_at = at if self._stop_at is None else min(at, self._stop_at)

    def _submit(self, submit: Submit) -> None:
        if self._stop_at is not None:
            self._out.append(Refused(submit.id, "shutdown", "the server is shutting down"))
            return
        if len(self._open) + len(self._compiling) >= self.most:
            full = f"the queue is full: {self.most} requests run or wait; try again later"
            self._out.append(Refused(submit.id, "overloaded", full))
            return
        grammar = submit.params.grammar
        if grammar is not None and self.engine.busy and not self.engine.knows(grammar):
            self._compiling[submit.id] = submit, self._threads.submit(self.engine.compile, grammar)
        else:
            self._add(submit)

    def _add_compiled(self) -> None:
        """Queue requests whose grammar is compiled by now; with nothing else to do, wait for it."""
        for id, (submit, compiled) in list(self._compiling.items()):
            if not compiled.done() and self.engine.busy:
                continue
            del self._compiling[id]
            error = compiled.exception()
            if error is None:
                self._add(submit)
            else:
                self._out.append(Refused(id, "invalid", str(error)))

    def _add(self, submit: Submit) -> None:
        try:
            prompt = list(array("q", submit.prompt))
            request = self.engine.add(submit.id, prompt, submit.params, submit.seed)
        except (TypeError, ValueError, OverflowError) as error:  # InputError is a ValueError
            self._out.append(Refused(submit.id, "invalid", str(error).removeprefix(f"request {submit.id}: ")))
            return
        self._open[submit.id] = Told(request, Usage(prompt_tokens=len(prompt)), submit.pace)

    def _abort(self, id: str) -> None:
        self._compiling.pop(id, None)
        if id in self._open:
            self.engine.abort(id)
            self._tell(self._open[id].request)

    def _switch(self, switch: Switch) -> None:
        try:
            policy, wrong = self.llm.switch(switch.policy, switch.slots, switch.width), None
        except InputError as error:
            policy, wrong = self.llm.policy, str(error)
        self._out.append(Switched(policy, self.llm.speculation.slots, wrong))

    def _tell(self, request: Request, fair_pace: float = 0.0) -> None:
        """What a request has gained since it was last told of."""
        if request.id not in self._open:
            return  # aborted after its step was committed by a switch, and told so then
        told, now = self._open[request.id], time.monotonic()
        ended = request.status is Status.FINISHED
        if not ended and now < told.next:
            return
        told.next = now + (fair_pace if told.pace is None else told.pace)
        self._out.append(delta_of(request, told.usage))
        if ended:
            del self._open[request.id]

    def _fair_pace(self) -> float:
        """Seconds between two deltas of a request whose pace is for the engine to say. Those that wait send none."""
        sending = [told for told in self._open.values() if told.pace is None]
        return self._share * sum(told.request.status is not Status.WAITING for told in sending)

    def _show(self) -> None:
        """A snapshot when one is due: now and then while something runs, and once when nothing does any more."""
        now = time.monotonic()
        due = not self.engine.busy or now - self._shown_at >= SNAPSHOT_SECONDS
        if self._changed and due:
            self._out.append(self._snapshot())
            self._shown_at, self._changed = now, False

    def _snapshot(self) -> Snapshot:
        snapshot = self.tally.snapshot()
        snapshot.refit = self.refitter.now() if self.refitter is not None else None
        return snapshot


def delta_of(request: Request, told: Usage) -> Delta:
    """What `request` has beyond `told`, which moves on with it."""
    ended = request.status is Status.FINISHED
    tokens, steps = request.output[told.completion_tokens :], request.steps[told.steps :]
    scored = request.params.logprobs is not None
    scores = request.logprobs[told.completion_tokens :] if scored else None
    first = told.steps == 0 and bool(steps)
    if first:
        told.cached_tokens = request.cached_tokens
    told.completion_tokens += len(tokens)
    told.steps += len(steps)
    for step in steps:
        told.drafted += step.drafted
        told.accepted += step.accepted
        told.slots += step.slots
    return Delta(
        id=request.id,
        text=request.text.take(final=ended) if request.text is not None else "",
        token_ids=tokens,
        steps=steps,
        usage=Usage(**vars(told)),
        logprobs=scores,
        prompt_logprobs=request.prompt_logprobs if first and request.params.prompt_logprobs is not None else None,
        finish_reason=request.finish_reason.value if ended and request.finish_reason else None,
        stop_reason=request.stop_reason,
    )


def about(llm: LLM) -> dict[str, Any]:
    """What a client may want to know of the engine; plain values."""
    import torch
    import transformers

    import dscale

    engine, drafter = llm.engine, llm.drafter
    graphs = engine.worker.graphs
    target = llm.loaded.config
    return {
        "model": llm.loaded.name,
        "family": target.family,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": str(engine.worker.device),
        "drafter": drafter is not None,
        "predictor": llm.predictor is not None,
        "policy": llm.policy,
        "policies": POLICIES if drafter is not None else "off",
        "width": engine.scheduler.lookahead,
        "slots": llm.speculation.slots,
        "context_length": engine.max_model_len,
        "vocabulary": target.decoder.vocab_size,
        "end_tokens": list(target.eos_token_ids),
        "max_requests": llm.config.max_requests,
        "pages": engine.scheduler.pool.capacity,
        "captured": None if graphs is None else asdict(graphs.counters),
        "seed": llm.config.seed,
        "versions": {
            "dscale": dscale.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def serve(link: Link) -> None:
    """Load what the first message names, then serve."""
    from dscale.engine.llm import LLM

    load: Load = link.receive(None)[0]
    if load.refit is None:
        llm, refitter = LLM(load.model, **load.options), None
    else:
        from dscale.serve.refit import Refitter, refitting_recorder

        llm = LLM(load.model, recorder=refitting_recorder(), **load.options)
        refitter = Refitter(llm, load.refit)
    keep_out_of_collections()
    EngineLoop(llm, link, load.max_waiting, refitter).run()


def main() -> int:
    """The whole life of the process; its exit code: 0 stopped or left alone, 2 bad input, 1 an error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    warnings.formatwarning = one_line
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(link)
    except Closed:
        return 0
    except InputError as error:
        return _fail(link, Failed(str(error), bad_input=True), 2)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return _fail(link, Failed(words, bad_input=False, detail=traceback.format_exc()), 1)
    return 0


def _fail(link: Link, failed: Failed, code: int) -> int:
    try:
        link.send([failed])
    except Closed:
        print(failed.detail or failed.message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
