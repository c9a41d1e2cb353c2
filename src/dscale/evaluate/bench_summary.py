"""The figures of a benchmark that its terminal shows: an arm at a concurrency, over its boots and runs.

Intervals and comparisons are made from the record by `dscale report`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dscale.config import require
from dscale.evaluate.bench_record import BenchRecord, RequestRow, Run


@dataclass(frozen=True)
class Cell:
    """An arm at a concurrency. Seconds; None where the rows or counters do not tell. progress: output tokens a request
    step; accepted_length: 1 + accepted / drafts of the server's counters; verified: rows a request step."""

    arm: str
    concurrency: int
    rate: float | None
    runs: int
    requests: int
    tokens: int
    tokens_per_s: float
    spread: tuple[float, float]  # lowest and highest run
    latency_mean: float
    latency_p50: float
    latency_p95: float
    latency_p99: float
    first_token: float | None
    between_tokens: float | None
    progress: float | None
    accepted_length: float | None
    verified: float | None
    step_ms: float | None


def failures(record: BenchRecord) -> list[tuple[Run, RequestRow]]:
    """Every failed request and its run."""
    return [(run, row) for run in record.runs for row in run.failed]


def cells(record: BenchRecord) -> list[Cell]:
    """Every arm and concurrency, in the order of the record. InputError when a request failed."""
    failed = failures(record)
    require(not failed, f"{len(failed)} requests failed, so there is no throughput")
    found: dict[tuple[str, int, float | None], list[Run]] = {}
    for run in record.runs:
        found.setdefault((run.arm, run.concurrency, run.rate), []).append(run)
    place = {arm.name: at for at, arm in enumerate(record.arms)}
    return [_cell(found[key]) for key in sorted(found, key=lambda key: (key[1], place[key[0]], key[2] or 0.0))]


def _cell(runs: list[Run]) -> Cell:
    rows = [row for run in runs for row in run.rows]
    latency = np.array([row.ended_s - row.sent_s for row in rows])
    speeds = [run.tokens_per_s for run in runs]
    tokens = sum(row.output_tokens for row in rows)
    firsts = [row.first_token_s - row.sent_s for row in rows if row.first_token_s is not None]
    steps = _sum([row.steps for row in rows])
    p50, p95, p99 = (float(np.quantile(latency, at)) for at in (0.5, 0.95, 0.99))
    return Cell(
        arm=runs[0].arm,
        concurrency=runs[0].concurrency,
        rate=runs[0].rate,
        runs=len(runs),
        requests=len(rows),
        tokens=tokens,
        tokens_per_s=tokens / sum(run.window_s for run in runs),
        spread=(min(speeds), max(speeds)),
        latency_mean=float(latency.mean()),
        latency_p50=p50,
        latency_p95=p95,
        latency_p99=p99,
        first_token=_mean(firsts),
        between_tokens=_mean([between for row in rows if (between := between_tokens(row)) is not None]),
        progress=_ratio(tokens, steps),
        accepted_length=_accepted_length(runs),
        verified=_ratio(_sum([row.verified for row in rows]), steps),
        step_ms=_step_ms(runs),
    )


def between_tokens(row: RequestRow) -> float | None:
    """Mean seconds from a token to the next, after the first."""
    if row.first_token_s is None or row.output_tokens < 2:
        return None
    return (row.ended_s - row.first_token_s) / (row.output_tokens - 1)


def _accepted_length(runs: list[Run]) -> float | None:
    share = _ratio(_counted(runs, "accepted"), _counted(runs, "drafts"))
    return None if share is None else 1 + share


def _step_ms(runs: list[Run]) -> float | None:
    seconds = _ratio(_counted(runs, "step_seconds"), _counted(runs, "steps"))
    return None if seconds is None else 1e3 * seconds


def _counted(runs: list[Run], name: str) -> float | None:
    return _sum([run.counters.get(name) for run in runs])


def _sum(values: list[Any]) -> float | None:
    return None if any(one is None for one in values) else float(sum(values))


def _ratio(upper: float | None, lower: float | None) -> float | None:
    return upper / lower if upper is not None and lower else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
