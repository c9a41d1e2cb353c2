"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from dscale.engine.request import Request, StepRecord, TokenLogprob


@dataclass
class RequestMetrics:
    """What one sequence cost. steps: decode steps; drafted, accepted: draft tokens; slots: rows verified in all.

    Times are seconds on the engine's clock: first_token and total count from arrival.
    """

    steps: int
    drafted: int
    accepted: int
    slots: int
    cached_tokens: int
    preemptions: int
    first_token: float | None
    total: float | None
    records: list[StepRecord] = field(default_factory=list)

    @property
    def mean_progress(self) -> float:
        """Output tokens per decode step."""
        return sum(record.emitted for record in self.records) / self.steps if self.steps else 0.0

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        """Metrics of a request as it stands."""
        records = request.steps
        return cls(
            steps=len(records),
            drafted=sum(record.drafted for record in records),
            accepted=sum(record.accepted for record in records),
            slots=sum(record.slots for record in records),
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
            first_token=None if request.first_token_at is None else request.first_token_at - request.arrived,
            total=None if request.finished_at is None else request.finished_at - request.arrived,
            records=records[:],
        )


@dataclass
class CompletionOutput:
    """One sequence: its text, tokens, and why it ended."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    metrics: RequestMetrics | None = None


@dataclass
class RequestOutput:
    """A prompt and its `n` sequences. note: what must be known of them ("simulated acceptance")."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: bool = True
    note: str | None = None

    @property
    def metrics(self) -> RequestMetrics:
        """Metrics of the first sequence."""
        assert self.outputs[0].metrics is not None
        return self.outputs[0].metrics


def completion_of(request: Request, index: int) -> CompletionOutput:
    """The sequence of a finished request."""
    return CompletionOutput(
        index=index,
        text=request.text.text if request.text is not None else "",
        token_ids=list(request.output),
        finish_reason=request.finish_reason.value if request.finish_reason else None,
        stop_reason=request.stop_reason,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        metrics=RequestMetrics.of(request),
    )


def output_of(group: list[Request], text: str | None, note: str | None) -> RequestOutput:
    """What a prompt's sequences became. text: the prompt, None where it was given as ids."""
    outputs: list[CompletionOutput] = [completion_of(request, index) for index, request in enumerate(group)]
    first = group[0]
    scored = first.prompt_logprobs if first.params.prompt_logprobs is not None else None
    return RequestOutput(first.id.split("-")[0], text, list(first.prompt), outputs, scored, note=note)
