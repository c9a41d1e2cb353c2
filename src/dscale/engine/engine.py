"""The engine: requests in, tokens out. One `step` is a plan of the scheduler, its prefill, one decode step, commits.

With lag 1 the decode step is started and the one before it committed while it runs. What the host learns late:
- a request that ended in step t takes part in step t + 1, where the device gives it no rows (end token, cap) or its
  tokens are dropped (stop string, abort). Its pages and its row are free at the commit of t: whatever uses them next
  comes later in the same stream.
- pages are reserved two blocks ahead; before anything is preempted the step in flight is committed.
- requests whose logits are edited or scored need every token at once: while one is here, lag is 0.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dscale.config import Grammar, InputError, SamplingParams, require
from dscale.engine.recorder import Recorder
from dscale.engine.request import FinishReason, Request, Status, TokenLogprob
from dscale.engine.scheduler import Chunk, Scheduler
from dscale.engine.text import TextStream
from dscale.engine.worker import Decoded, Launched, Worker
from dscale.models.tokenizer import IncrementalDecoder, Tokenizer
from dscale.speculation.grammar import CompiledGrammar, GrammarCompiler
from dscale.speculation.policies import StepOutcome
from dscale.speculation.sampling import RowLogprobs
from dscale.speculation.state import MAX_END_TOKENS

ALARM_STEPS = 200  # drafted request steps before acceptance is judged
ALARM_PROGRESS = 1.1  # tokens a step that no drafter in order stays under
Observer = Callable[[Sequence[Request], StepOutcome], None]  # told of every decode step, after its tokens are committed


@dataclass
class EngineCounters:
    """Sums over the engine's life. decode_seconds: on a GPU by its own clock; prefill_seconds: of the host, which on a
    GPU only starts the work."""

    steps: int = 0
    request_steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    slots: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    shapes: dict[str, int] = field(default_factory=dict)
    drafted_steps: int = 0  # request steps in which something was drafted
    drafted_emitted: int = 0  # tokens they emitted


class Engine:
    """Continuous batching over one worker."""

    def __init__(
        self,
        worker: Worker,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        lag: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        self.worker, self.scheduler, self.tokenizer = worker, scheduler, tokenizer
        self.max_model_len, self.lag, self.recorder = max_model_len, lag, recorder
        self.counters = EngineCounters()
        self.observer: Observer | None = None
        self._live: dict[str, Request] = {}
        self._in_flight: Launched | None = None
        self._early: list[Request] = []  # committed by `settle`, not told by a step yet
        self._need_host = 0  # live requests with needs_host
        self._alarmed = False
        self._grammars = GrammarCompiler(tokenizer, worker.vocab_size) if tokenizer is not None else None

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, seed: int) -> Request:
        """Queue a prompt of token ids; InputError when it is empty, out of range or too long, or its grammar is wrong.

        A grammar seen for the first time is compiled here; `compile` in another thread beforehand spares the wait.
        """
        vocabulary = self.worker.vocab_size
        require(request_id not in self._live, f"request id {request_id!r} is already in use")
        require(len(prompt) > 0, f"request {request_id}: the prompt is empty; give at least one token")
        require(
            min(prompt) >= 0 and max(prompt) < vocabulary,
            f"request {request_id}: prompt token ids must lie in [0, {vocabulary - 1}]",
        )
        require(
            len(prompt) < self.max_model_len,
            f"request {request_id}: prompt has {len(prompt)} tokens; the context length is {self.max_model_len}, "
            "and one must be left for the answer",
        )
        bias = params.logit_bias or {}
        require(
            all(0 <= token < vocabulary for token in bias),
            f"request {request_id}: logit_bias token ids must lie in [0, {vocabulary - 1}]",
        )
        require(-(1 << 63) <= seed < 1 << 63, f"request {request_id}: seed {seed} must fit in 64 bits, with its sign")
        room = self.max_model_len - len(prompt)
        cap = room if params.max_tokens is None else min(params.max_tokens, room)
        request = Request(request_id, list(prompt), params, seed, self._end_ids(request_id, params), cap)
        if self.tokenizer is not None:
            decoder = IncrementalDecoder(self.tokenizer, params.skip_special_tokens)
            request.text = TextStream(decoder, params.stop, params.include_stop_str_in_output)
        else:
            require(not params.stop, "stop: stop strings need a tokenizer; this model has none")
        if params.grammar is not None:
            require(
                len(request.end_ids) > 0, f"request {request_id}: a grammar needs an end token; this model has none"
            )
            request.grammar = self.compile(params.grammar)
        self.scheduler.add(request)
        self._live[request_id] = request
        self._need_host += params.needs_host
        return request

    def _end_ids(self, request_id: str, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self.worker.models.target.config.eos_token_ids
        ends = tuple(dict.fromkeys([*eos, *params.stop_token_ids]))
        require(
            len(ends) <= MAX_END_TOKENS,
            f"request {request_id}: {len(ends)} end and stop tokens; at most {MAX_END_TOKENS} are allowed",
        )
        last = self.worker.vocab_size - 1
        require(
            all(0 <= token <= last for token in params.stop_token_ids),
            f"request {request_id}: stop_token_ids must lie in [0, {last}]",
        )
        return ends

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar for this model's tokens, kept for the next time; from any thread. InputError when it is wrong."""
        if self._grammars is None:
            raise InputError(f"{grammar.kind}: a grammar needs a tokenizer; this model has none")
        return self._grammars.compile(grammar)

    def knows(self, grammar: Grammar) -> bool:
        """True when the grammar is compiled already."""
        return self._grammars is not None and self._grammars.knows(grammar)

    @property
    def busy(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.busy or bool(self._early)

    def abort(self, request_id: str) -> None:
        """End a request now; its pages are free at once. Unknown or finished ids are ignored."""
        request = self._live.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT, None)
            if self.recorder is not None:
                self.recorder.finish(request)

    def step(self) -> list[Request]:
        """One plan; returns the requests that emitted tokens or ended, each once though two steps were committed."""
        late = self.lag == 1 and not self._need_host
        done, self._early = self._early, []
        done += [] if late else self._settle()
        plan = self.scheduler.schedule()
        if plan is None:
            done += self._settle()
            plan = self.scheduler.schedule()
        assert plan is not None, "with no step in flight every plan can be made"
        if plan.prefill:
            self._prefill(plan.prefill, plan.decode)
        started = self._launch(plan.decode) if plan.decode else None
        if late:
            done += self._settle()
            self._in_flight = started
        elif started is not None:
            done += self._commit_step(started)
        return list({request.id: request for request in done}.values())

    def _launch(self, requests: list[Request]) -> Launched:
        launched = self.worker.launch(requests)
        for request in requests:
            request.in_flight += 1
        return launched

    def settle(self) -> None:
        """Commit the step in flight, if there is one; the next `step` returns its requests."""
        self._early += self._settle()

    def _settle(self) -> list[Request]:
        """Commit the step in flight, if there is one."""
        launched, self._in_flight = self._in_flight, None
        return [] if launched is None else self._commit_step(launched)

    def _commit_step(self, launched: Launched) -> list[Request]:
        """Read a step's results; requests that ended while it ran get nothing from it. The others are returned."""
        requests = launched.requests
        for request in requests:
            request.in_flight -= 1
        kept = [lane for lane, request in enumerate(requests) if request.status is not Status.FINISHED]
        if not kept:
            return []
        decoded = self.worker.collect(launched)
        if len(kept) < len(requests):
            decoded, requests = decoded.only(kept), [requests[lane] for lane in kept]
        drafted = decoded.draft.tokens.shape[1]
        emitted = [self._commit(request, decoded, lane, drafted) for lane, request in enumerate(requests)]
        self._count(emitted, drafted, decoded)
        self._learn(requests, decoded, len(launched.requests))
        return requests

    def _prefill(self, chunks: list[Chunk], decoding: list[Request]) -> None:
        began = time.perf_counter()
        self.worker.prefill(chunks, decoding)
        for index, chunk in enumerate(chunks):
            if chunk.request.params.prompt_logprobs is not None:
                self._score_prompt(index, chunk)
            self.scheduler.commit(chunk.request, chunk.start + chunk.length)
        self.counters.prefill_seconds += time.perf_counter() - began

    def _score_prompt(self, index: int, chunk: Chunk) -> None:
        """Log-probabilities of the prompt tokens that follow the rows of the index-th chunk of this prefill."""
        request = chunk.request
        known = request.prompt_logprobs or [None]  # the first token has nothing before it
        following = request.prompt[chunk.start + 1 : chunk.start + chunk.length + 1]
        first = max(len(known) - 1 - chunk.start, 0)  # preempted: part of it is known already
        fresh, wanted = following[first:], request.params.prompt_logprobs or 0
        if fresh:
            scores = self.worker.score(index, first, fresh, wanted)
            known += [token_logprob(scores, i, token, wanted) for i, token in enumerate(fresh)]
        request.prompt_logprobs = known

    def _commit(self, request: Request, decoded: Decoded, lane: int, drafted: int) -> int:
        """Append what a step emitted and end the request where it ends; how many tokens it emitted."""
        if request.first_token_at is None:
            request.first_token_at = time.perf_counter()
        kept, reason, stop = self._append(request, decoded.tokens[lane])
        emitted, params = len(kept), request.params
        request.steps.append(emitted, min(decoded.accepted[lane], emitted), decoded.slots[lane], drafted)
        if params.logprobs is not None:
            self._read_logprobs(request, decoded, lane, emitted)
        if params.edits_logits:
            self.worker.commit_edits(request, kept)
        if reason is not None:
            self._finish(request, reason, stop)
        else:
            self.scheduler.commit(request, request.length - 1)
        return emitted

    def _append(self, request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None, int | str | None]:
        """Tokens kept, and why the request ends with the last of them, if it does."""
        output, ends, text = request.output, request.end_ids, request.text
        before = len(output)
        room, stopped = request.cap - before, None
        kept = tokens if len(tokens) <= room else tokens[:room]
        for end in ends:
            if end in kept:
                kept = kept[: kept.index(end) + 1]
        if text is not None:
            stopped = text.push(kept, free=request.params.min_tokens - before - 1)
            kept = kept if stopped is None else kept[:stopped]
        output += kept
        if ends and kept and kept[-1] in ends:
            eos = kept[-1] in self.worker.models.target.config.eos_token_ids
            return kept, FinishReason.STOP, None if eos else kept[-1]
        if text is not None and stopped is not None:
            return kept, FinishReason.STOP, text.stopped_by
        return kept, FinishReason.LENGTH if len(kept) >= room else None, None

    def _read_logprobs(self, request: Request, decoded: Decoded, lane: int, kept: int) -> None:
        assert decoded.result is not None, "a step whose log-probabilities are wanted is eager"
        scores, wanted = decoded.result.logprobs, request.params.logprobs
        assert scores is not None
        assert wanted is not None
        start = int(decoded.result.starts[lane])
        for offset in range(kept):
            token = decoded.tokens[lane][offset]
            request.logprobs.append(token_logprob(scores, start + offset, token, wanted))

    def _count(self, emitted: list[int], drafted: int, decoded: Decoded) -> None:
        """Add one step to the counters: tokens emitted by lane, drafts made for each."""
        counters, shape = self.counters, decoded.shape
        counters.steps += 1
        counters.decode_seconds += decoded.seconds
        key = "off" if shape.width == 1 else f"{shape.rows / len(emitted):.1f}"
        counters.shapes[key] = counters.shapes.get(key, 0) + 1
        counters.request_steps += len(emitted)
        counters.emitted += sum(emitted)
        counters.drafted += drafted * len(emitted)
        counters.accepted += sum(map(min, decoded.accepted, emitted))
        counters.slots += sum(decoded.slots)
        told = [count for count, slots in zip(emitted, decoded.slots, strict=True) if slots > 1]
        counters.drafted_steps += len(told)
        counters.drafted_emitted += sum(told)

    def _learn(self, requests: list[Request], decoded: Decoded, launched: int) -> None:
        """Give the policy the outcome; lanes that were cut or whose logits were edited do not count as clean."""
        counters, shape = self.counters, decoded.shape
        plain = [not request.params.edits_logits for request in requests]
        clean = [one and request.status is not Status.FINISHED for one, request in zip(plain, requests, strict=True)]
        outcome = StepOutcome(shape, decoded.draft, decoded.slots, decoded.accepted, clean, decoded.seconds, launched)
        self.worker.learn(outcome)
        if self.observer is not None:
            self.observer(requests, outcome)
        if self.recorder is not None:
            self.recorder.record(requests, decoded.draft, plain)
        if not self._alarmed and counters.drafted_steps >= ALARM_STEPS:
            self._check_acceptance()

    def _check_acceptance(self) -> None:
        """Warn once when hardly any draft is accepted: that is how a misread drafter shows (dflash.md)."""
        progress = self.counters.drafted_emitted / self.counters.drafted_steps
        drafter = self.worker.models.drafter
        if progress >= ALARM_PROGRESS or drafter is None:
            self._alarmed = progress >= 2 * ALARM_PROGRESS
            return
        self._alarmed = True
        config = drafter.config
        warnings.warn(
            f"only {progress:.2f} tokens a step over {self.counters.drafted_steps} drafted steps; usual causes: anchor "
            f"layout (in force: {config.layout}), taps ({list(config.taps)}), rotary style "
            f"({config.decoder.rope.style}), or a drafter for another target or tokenizer",
            stacklevel=2,
        )

    def _finish(self, request: Request, reason: FinishReason, stop: int | str | None) -> None:
        if request.status is Status.FINISHED:
            return
        self.scheduler.finish(request, reason)
        request.stop_reason, request.finished_at = stop, time.perf_counter()
        if request.text is not None:
            request.text.finish()
        del self._live[request.id]
        self._need_host -= request.params.needs_host


def token_logprob(scores: RowLogprobs, row: int, token: int, count: int) -> TokenLogprob:
    """One row of log-probabilities on the host, with `count` alternatives."""
    ids, values = scores.ids[row, :count].tolist(), scores.values[row, :count].tolist()
    return TokenLogprob(token, float(scores.chosen[row]), dict(zip(ids, values, strict=True)))
