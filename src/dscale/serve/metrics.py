"""What Prometheus scrapes. vLLM's names where dashboards exist for them, `dscale:` for what only this engine counts.

Counters that the engine keeps (sums since its start) are read from the last snapshot when scraped; counters and
latencies of requests are added as they finish. Draft positions count from 1 in `dscale:` series and from 0 in vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dscale.serve.messages import RefitState, Snapshot, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHORT = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
)
FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

# Prometheus name, engine counter, help
COUNTERS = (
    ("vllm:generation_tokens", "emitted", "Tokens generated."),
    ("vllm:prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
    ("vllm:num_preemptions", "preemptions", "Requests whose pages were taken, to be recomputed later."),
    ("vllm:spec_decode_num_drafts", "drafted_steps", "Request steps in which drafts were verified."),
    ("vllm:spec_decode_num_draft_tokens", "drafted", "Tokens drafted."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted", "Drafts accepted."),
    ("dscale:decode_steps", "steps", "Decode steps of the engine."),
    ("dscale:request_steps", "request_steps", "Decode steps, counted for each request in them."),
    ("dscale:verified_slots", "slots", "Rows verified by the target, anchors included."),
    ("dscale:decode_seconds", "decode_seconds", "Seconds spent in decode steps."),
    ("dscale:prefill_seconds", "prefill_seconds", "Seconds spent on prompts."),
)
IDLE = "device_idle_seconds"  # engine counter that only a GPU engine keeps


class EngineCollector(Collector):
    """The last snapshot as metric families; nothing before the first one."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.snapshot: Snapshot | None = None
        self.idle: float | None = None

    def take(self, snapshot: Snapshot) -> None:
        """Make this the snapshot that is scraped; the share of idle time is that between it and the one before."""
        before = self.snapshot
        if before is not None and IDLE in snapshot.counters and snapshot.time > before.time:
            idle = snapshot.counters[IDLE] - before.counters.get(IDLE, 0.0)
            self.idle = min(max(idle / (snapshot.time - before.time), 0.0), 1.0)
        self.snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Families of the last snapshot."""
        if self.snapshot is not None:
            yield from self._gauges(self.snapshot)
            yield from self._sums(self.snapshot)
            yield from self._positions(self.snapshot)
            if self.snapshot.refit is not None:
                yield from self._refits(self.snapshot.refit)

    def _gauges(self, now: Snapshot) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests that hold a row of the engine.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", now.waiting)
        used = now.pages_used / now.pages if now.pages else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache pages in use; 1 is all of them.", used)
        yield self._gauge("dscale:budget_slots", "Slots a request that the policy verifies now.", now.budget)
        info = GaugeMetricFamily("dscale:policy_info", "The policy in force.", labels=("model_name", "policy"))
        info.add_metric((self.model, now.policy), 1)
        yield info
        if self.idle is not None:
            yield self._gauge(
                "dscale:gpu_idle_ratio", "Share of the last interval that the GPU had no work.", self.idle
            )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _sums(self, now: Snapshot) -> Iterator[Metric]:
        counts = now.counters
        for name, key, text in COUNTERS:
            yield self._counter(name, text, counts.get(key, 0.0))
        verified = counts.get("slots", 0.0) - counts.get("request_steps", 0.0)  # an anchor is one row of every step
        trimmed = max(counts.get("drafted", 0.0) - verified, 0.0)
        yield self._counter("dscale:verified_draft_tokens", "Drafts verified by the target.", verified)
        yield self._counter("dscale:trimmed_draft_tokens", "Drafts that the policy left unverified.", trimmed)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _positions(self, now: Snapshot) -> Iterator[Metric]:
        # a step accepts only what it verified, and verifies only what it drafted
        trimmed = [max(a - b, 0) for a, b in zip(now.drafted_at, now.verified_at, strict=False)]
        series: tuple[tuple[str, str, Sequence[float], int], ...] = (
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, from position 0.", now.accepted_at, 0),
            ("dscale:drafted_tokens_at", "Drafts made, by position.", now.drafted_at, 1),
            ("dscale:verified_tokens_at", "Drafts verified, by position.", now.verified_at, 1),
            ("dscale:trimmed_tokens_at", "Drafts left unverified, by position.", trimmed, 1),
            ("dscale:accepted_tokens_at", "Drafts accepted, by position.", now.accepted_at, 1),
            ("dscale:predicted_accepted_at", "Sum of predicted acceptance, by position.", now.predicted, 1),
            ("dscale:calibration_accepted_at", "Drafts accepted where a prediction was.", now.calibrated, 1),
        )
        for name, text, values, first in series:
            family = CounterMetricFamily(name, text, labels=("model_name", "position"))
            for position, value in enumerate(values, start=first):
                family.add_metric((self.model, str(position)), value)
            yield family

    def _refits(self, now: RefitState) -> Iterator[Metric]:
        yield self._gauge("dscale:predictor_version", "Predictors swapped in; 0 is the one loaded.", now.version)
        yield self._gauge("dscale:refit_records", "Records of live traffic held for the next refit.", now.records)
        count = CounterMetricFamily("dscale:refits", "Refits ended.", labels=("model_name", "part", "outcome"))
        for part, outcomes in now.outcomes.items():
            for outcome, value in outcomes.items():
                count.add_metric((self.model, part, outcome), value)
        yield count
        text = "Log-loss on held-out prompts of the last refit, and of what it was to better."
        loss = GaugeMetricFamily("dscale:refit_log_loss", text, labels=("model_name", "part", "which"))
        for part, scores in now.log_loss.items():
            for which, score in scores.items():
                loss.add_metric((self.model, part, which), score)
        yield loss


class Metrics:
    """Everything `/metrics` shows. model: value of the label model_name, which vLLM's dashboards select by."""

    def __init__(self, registry: CollectorRegistry, model: str = "") -> None:
        self.registry, self.model = registry, model
        self._engine = EngineCollector(model)
        registry.register(self._engine)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Between tokens that follow.", SHORT)
        self._each = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens after its first.", SHORT
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to the end of a request.", WHOLE)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output = self._histogram("vllm:request_generation_tokens", "Tokens generated for a request.", TOKENS)
        self._step = self._histogram("dscale:decode_step_seconds", "Duration of one decode step.", SHORT)
        self._progress = self._histogram(
            "dscale:request_progress",
            "Tokens a step, mean of a request.",
            (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 16),
        )
        self._prompts = Counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests.", ("model_name",), registry=registry
        ).labels(model)
        self._ended = Counter(
            "vllm:request_success", "Requests ended, by reason.", ("model_name", "finished_reason"), registry=registry
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return family.labels(self.model)

    def observe(self, snapshot: Snapshot) -> None:
        """Take a new snapshot; call once for each, because its step durations are added to a histogram."""
        self._engine.take(snapshot)
        for seconds in snapshot.step_seconds:
            self._step.observe(seconds)

    def finished(
        self,
        usage: Usage,
        first_token_seconds: float | None,
        total_seconds: float,
        inter_token: Iterable[float],
        reason: str,
    ) -> None:
        """Add an ended request. inter_token: seconds between tokens that follow each other; first_token_seconds is None
        when no token came; reason: stop, length, abort or error."""
        self._ended.labels(self.model, reason).inc()
        self._whole.observe(total_seconds)
        self._prompts.inc(usage.prompt_tokens)
        self._prompt.observe(usage.prompt_tokens)
        self._output.observe(usage.completion_tokens)
        if usage.steps:
            self._progress.observe(usage.completion_tokens / usage.steps)
        if first_token_seconds is not None:
            self._first.observe(first_token_seconds)
            if usage.completion_tokens > 1:
                self._each.observe((total_seconds - first_token_seconds) / (usage.completion_tokens - 1))
        for seconds in inter_token:
            self._between.observe(seconds)

    def render(self) -> bytes:
        """The exposition in Prometheus' text format; serve it as CONTENT_TYPE."""
        return generate_latest(self.registry)
