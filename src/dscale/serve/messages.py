"""What HTTP process and engine process say to each other. Plain picklable values, no tensors.

To the engine: Load, then Submit, Abort, Switch, Stop. From it: Ready once, then Delta and Refused for requests,
Switched, Refitted, and a Snapshot of the whole engine at most ten times a second; Failed before it ends in an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dscale.config import SamplingParams
from dscale.engine.request import StepRecord, TokenLogprob


@dataclass(frozen=True)
class RefitOptions:
    """When to fit anew to live traffic: at most every so many seconds, once min_records new ones have come. keep: the
    most records in memory. folder: where the last accepted predictor is kept."""

    every: float = 300.0
    min_records: int = 2000
    keep: int = 50_000
    folder: str | None = None


@dataclass(frozen=True)
class Load:
    """The first message: arguments of LLM, how many requests may wait beyond those that run, and whether to refit."""

    model: str
    options: dict[str, Any]
    max_waiting: int
    refit: RefitOptions | None = None


@dataclass(frozen=True)
class Submit:
    """One sequence to decode (n > 1 is n of them). seed: of its sampling, decided by the HTTP side.

    pace: seconds that lie at least between two of its deltas, but for the first and the last, which come at once. What
    the steps between have added is told together: each word to the other process costs the steps time. None: the engine
    decides.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    pace: float | None = 0.0


@dataclass(frozen=True)
class Abort:
    """End a request; unknown ids are ignored."""

    id: str


@dataclass(frozen=True)
class Switch:
    """Change the policy for the steps to come; answered by a Switched."""

    policy: str
    slots: float | None = None
    width: int | None = None


@dataclass(frozen=True)
class Stop:
    """Finish what runs, refuse what comes, then exit. after: seconds until what still runs is aborted."""

    after: float


@dataclass(frozen=True)
class Ready:
    """The engine serves. about: model, dtype, device, policy, width, context length, end tokens, versions,
    and what was captured."""

    about: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The last word of an engine that ends in an error. bad_input: the user can mend it, message is one line; else
    detail is a traceback."""

    message: str
    bad_input: bool
    detail: str = ""


@dataclass
class Usage:
    """Token counts of one sequence. slots: rows verified in all; trimmed: drafted rows that were not verified."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    slots: int = 0

    @property
    def trimmed(self) -> int:
        """Drafts that were not verified."""
        return max(self.drafted - (self.slots - self.steps), 0)


@dataclass
class Delta:
    """What a step added to one request: text (complete characters, stop strings held back and cut), token ids, the
    step's record. finish_reason is set on the last one: stop, length or abort."""

    id: str
    text: str
    token_ids: list[int]
    steps: list[StepRecord]
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class Refused:
    """A request that cannot be served. kind: "invalid" (400), "overloaded" (503), "shutdown" (503)."""

    id: str
    kind: str
    message: str


@dataclass(frozen=True)
class Switched:
    """Policy and slots a request in force after a Switch; error is set when it could not be taken."""

    policy: str
    slots: float
    error: str | None = None


@dataclass(frozen=True)
class Refitted:
    """A refit ended; record: the fields of its line in the log (serve/refit.py)."""

    record: dict[str, Any]


@dataclass
class RefitState:
    """Where refits stand. version: of the predictor in force, 0 the one that was loaded; records: held now. By what was
    fitted (predictor, confidence): outcomes counts accepted, rejected and failed, log_loss has old and new of the last.
    """

    version: int = 0
    records: int = 0
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    log_loss: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Lane:
    """One request of the last decode step: drafts made, rows verified (anchor included), drafts accepted."""

    id: str
    drafted: int
    slots: int
    accepted: int


@dataclass
class Snapshot:
    """The engine at one moment. Counters are sums since the start; histograms are for the metrics page.

    drafted_at, accepted_at, verified_at: by draft position 1 … W-1. predicted, calibrated: sums of predicted survival
    and of accepted by position, over verified drafts of steps whose policy had scores. step_seconds: durations of the
    decode steps since the last snapshot. budget: slots a request in force. cache: pages used and in all. refit: None
    unless it was asked for.
    """

    time: float
    policy: str
    running: int = 0
    waiting: int = 0
    budget: float = 0.0
    pages_used: int = 0
    pages: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    accepted_at: list[int] = field(default_factory=list)
    verified_at: list[int] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    calibrated: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    refit: RefitState | None = None


class EngineDied(Exception):
    """The engine process ended although nobody asked it to."""


class Refusal(Exception):
    """The engine refused a request; see Refused."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.kind = refused.kind


class EngineClient(Protocol):
    """The HTTP side's view of the engine; serve/client.py talks to the process, tests may use one in a thread."""

    about: dict[str, Any]
    snapshot: Snapshot

    def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        """Deltas of one request to its end. Raises Refusal or EngineDied. Closing the iterator aborts the request."""
        ...

    async def switch(self, switch: Switch) -> str:
        """Name of the policy now in force; Refusal when it cannot be taken."""
        ...

    @property
    def alive(self) -> bool:
        """True while a request would be served."""
        ...

    @property
    def draining(self) -> bool:
        """True once shutdown began."""
        ...

    @property
    def silence(self) -> float:
        """Seconds for which the engine has said nothing although something was asked of it. While it runs it says
        something after every step, so that this is how long the step takes; a hung one stays silent."""
        ...

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Every new snapshot."""
        ...
