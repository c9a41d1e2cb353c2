"""A request: its tokens, its parameters, what it holds, and what it has cost."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import overload

from dscale.config import PAGE_SIZE, SamplingParams, require
from dscale.engine.pages import page_hash
from dscale.engine.text import TextStream
from dscale.speculation.grammar import CompiledGrammar


class Status(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass
class StepRecord:
    """One decode step of one request: tokens emitted, drafts accepted among them, slots verified (anchor included),
    drafts made."""

    emitted: int
    accepted: int
    slots: int
    drafted: int


class StepRecords(Sequence[StepRecord]):
    """A request's step records, packed: thousands of objects that stay would have Python's garbage collector look
    through all there is now and then, and no step starts meanwhile."""

    def __init__(self) -> None:
        self._numbers = array("H")  # emitted, accepted, slots, drafted; and so on

    def append(self, emitted: int, accepted: int, slots: int, drafted: int) -> None:
        """Add the record of the next step."""
        self._numbers.extend((emitted, accepted, slots, drafted))

    def __len__(self) -> int:
        return len(self._numbers) // 4

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        start = 4 * range(len(self))[index]
        return StepRecord(*self._numbers[start : start + 4])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StepRecords({self[:]})"


@dataclass
class TokenLogprob:
    """Log-probability of an emitted token under the target's raw logits, and of the alternatives asked for."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """One sequence being served; equal to itself alone. `committed` counts tokens whose keys are in the cache; the next
    one is the anchor."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    end_ids: tuple[int, ...]  # tokens that finish it
    cap: int  # most output tokens
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    committed: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its full pages, as far as computed
    row: int = -1  # row of the device state while it runs
    bound: bool = False  # whether that row holds this request's parameters and anchor yet
    cached_tokens: int = 0
    preemptions: int = 0
    in_flight: int = 0  # decode steps that were started and whose tokens are not known yet
    steps: StepRecords = field(default_factory=StepRecords)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    text: TextStream | None = None
    grammar: CompiledGrammar | None = None  # what its text has to be
    arrived: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output together."""
        return self.prompt + self.output

    def span(self, start: int, stop: int) -> list[int]:
        """Tokens start … stop - 1, at a cost that does not grow with the rest."""
        own = len(self.prompt)
        if start >= own:
            return self.output[start - own : max(stop - own, 0)]
        return self.prompt[start:stop] + self.output[: max(stop - own, 0)]

    @property
    def length(self) -> int:
        """Tokens so far, anchor included."""
        return len(self.prompt) + len(self.output)

    @property
    def prefill_left(self) -> int:
        """Tokens still to be put through the target before the last one can serve as the anchor."""
        return self.length - 1 - self.committed

    @property
    def remaining(self) -> int:
        """Output tokens it may still emit."""
        return self.cap - len(self.output)

    def longest(self, width: int) -> int:
        """Most tokens it may have by now, when a step in flight emits at most `width`."""
        return len(self.prompt) + min(len(self.output) + self.in_flight * width, self.cap)

    def page_digests(self, tokens: int) -> list[bytes]:
        """Digests of the full pages within the first `tokens` tokens."""
        full, digests = tokens // PAGE_SIZE, self.digests
        for start in range(len(digests) * PAGE_SIZE, full * PAGE_SIZE, PAGE_SIZE):
            parent = digests[-1] if digests else b""
            digests.append(page_hash(parent, self.span(start, start + PAGE_SIZE)))
        return digests if len(digests) == full else digests[:full]


def derive_seed(base: int, index: int) -> int:
    """A 63-bit seed for the index-th child of a seed, the same on every machine."""
    digest = hashlib.blake2b(f"{base}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Sampling of `count` prompts from one for all (None: the default) or one for each; else InputError."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    require(len(params) == count, f"sampling_params: {len(params)} given for {count} prompts")
    return list(params)
