"""Intervals for benchmarks (measurement.md §2): what a record shows, and what it does not.

Prompts are the sample. An interval comes from a paired, stratified bootstrap: prompts are drawn again within each
workload, repeats of a prompt averaged first, and the aggregate throughput of both arms is computed on the same draw,
from the tokens and the share of the window of each prompt (prompt_table.py). The headline is the ratio of throughputs
over the windows as measured, never a mean of per-prompt ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from dscale.config import require
from dscale.evaluate.bench_record import BenchRecord, RequestRow, Run
from dscale.evaluate.prompt_table import (
    Floats,
    Prompt,
    PromptTable,
    busy,
    closed_runs,
    draws,
    prompt_table,
    shared_concurrencies,
    shared_prompts,
)

RESAMPLES = 8000
LEVEL = 0.95
FEWEST_PROMPTS = 5  # below it no interval is trusted
BOOTS_FOR_INTERVAL = 3
TOLERANCE = 0.02  # of the ratio: how far windows and shares of prompts may disagree unsaid
NO_BOOT_VARIANCE = "boot variance is not in this interval"
NO_DIFFERENCE = "no difference shown"
TYPICAL_VARIATION = 0.25  # SmolLM2, `full` against `off`, within a workload: benchmarks/records/acceptance_curves.json


@dataclass(frozen=True)
class Estimate:
    """A relative change (0.1 is 10% more) with its 95% interval, over this many prompts."""

    value: float
    low: float
    high: float
    prompts: int

    @property
    def shown(self) -> bool:
        """Whether the interval excludes zero, on enough prompts to be believed."""
        return self.prompts >= FEWEST_PROMPTS and not self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class BootAggregate:
    """Output tokens per second of all runs of one boot of an arm."""

    arm: str
    concurrency: int
    boot: int
    tokens_per_s: float


@dataclass(frozen=True)
class Comparison:
    """An arm against a baseline. change: the ratio of window throughputs, less 1, with the interval over prompts;
    hierarchical: the same with boots resampled as the outer level, None with fewer than three boots of either arm.

    tokens_per_s, baseline_tokens_per_s: over the windows. resampled: the change by shares, which the intervals are
    about: each prompt once and all workers busy. workloads: the change on each, by shares.
    """

    arm: str
    baseline: str
    concurrencies: tuple[int, ...]
    change: Estimate
    hierarchical: Estimate | None
    tokens_per_s: float
    baseline_tokens_per_s: float
    resampled: float
    workloads: dict[str, Estimate]
    boots: tuple[BootAggregate, ...]
    notes: tuple[str, ...]

    @property
    def shown(self) -> bool:
        """Whether every interval there is excludes zero."""
        return self.change.shown and (self.hierarchical is None or self.hierarchical.shown)

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the phrase."""
        return asdict(self) | {"shown": self.shown, "phrase": phrase(self)}


def compare(
    record: BenchRecord,
    arm: str,
    baseline: str,
    concurrency: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """How much faster `arm` is than `baseline`, in a closed loop at one concurrency or over all that both have.

    Over several concurrencies tokens and windows add up, one mean run of each. InputError for arms without common
    runs, or with failed requests.
    """
    levels = shared_concurrencies(record, (arm, baseline), concurrency)
    runs = {name: [closed_runs(record, name, level) for level in levels] for name in (arm, baseline)}
    prompts = shared_prompts([one for levels_of in runs.values() for one in levels_of])
    tables = {name: [prompt_table(one, prompts) for one in of] for name, of in runs.items()}
    workload = _codes(prompts)
    drawn = draws(workload, resamples, seed)
    means = [_mean_run(tables[name]) for name in (arm, baseline)]
    groups = {name: workload == number for number, name in enumerate(sorted({one for one, _ in prompts}))}
    speeds = [_window_speed(runs[name]) for name in (arm, baseline)]
    change = _changes(means, drawn)
    headline = _estimate(speeds[0] / speeds[1] - 1, change[1:], len(prompts))
    return Comparison(
        arm=arm,
        baseline=baseline,
        concurrencies=levels,
        change=headline,
        hierarchical=_hierarchical(tables[arm], tables[baseline], drawn, headline.value, seed),
        tokens_per_s=speeds[0],
        baseline_tokens_per_s=speeds[1],
        resampled=float(change[0]),
        workloads={name: _of_workload(means, drawn, inside) for name, inside in groups.items()},
        boots=tuple(_boots(record, (arm, baseline), levels)),
        notes=tuple(_notes(runs, float(change[0]), headline.value, groups)),
    )


def _codes(prompts: Sequence[Prompt]) -> np.ndarray:
    return np.unique([workload for workload, _ in prompts], return_inverse=True)[1].ravel()


def _mean_run(tables: Sequence[PromptTable]) -> Floats:
    """[2, P]: tokens and seconds of a prompt, means over runs, summed over concurrencies."""
    tokens = np.sum([table.tokens.mean(0) for table in tables], axis=0)
    return np.stack([tokens, np.sum([table.seconds.mean(0) for table in tables], axis=0)])


def _changes(means: Sequence[Floats], drawn: Floats) -> Floats:
    """Relative change on every draw: means are [2, P] of the arm and the baseline, drawn [R, P]."""
    sums = drawn @ np.concatenate(means).T
    return sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2] - 1


def _estimate(value: float, changes: Floats, prompts: int) -> Estimate:
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(changes, [tail, 100 - tail])
    return Estimate(value, float(low), float(high), prompts)


def _of_workload(means: Sequence[Floats], drawn: Floats, inside: np.ndarray) -> Estimate:
    changes = _changes([mean[:, inside] for mean in means], drawn[:, inside])
    return _estimate(float(changes[0]), changes[1:], int(inside.sum()))


def _hierarchical(
    arm: Sequence[PromptTable], baseline: Sequence[PromptTable], drawn: Floats, value: float, seed: int
) -> Estimate | None:
    """Boots drawn again too, of each arm by itself. Of B boots B - 1 are drawn: the variance of a mean of so few would
    come out too small by (B - 1) / B otherwise (Rao and Wu 1988)."""
    generator = np.random.default_rng([seed, 1])
    sums = []
    for tables in (arm, baseline):
        parts = [table.by_boot() for table in tables]
        boots = min(len(tokens) for tokens, _ in parts)
        if boots < BOOTS_FOR_INTERVAL:
            return None
        weights = generator.multinomial(boots - 1, np.full(boots, 1 / boots), size=len(drawn) - 1) / (boots - 1)
        for index in (0, 1):
            by_boot = np.sum([part[index][:boots] for part in parts], axis=0)
            sums.append(np.einsum("rb,rb->r", weights, drawn[1:] @ by_boot.T))
    changes = sums[0] / sums[1] * sums[3] / sums[2] - 1
    return _estimate(value, changes, drawn.shape[1])


def _window_speed(levels: Sequence[Sequence[Run]]) -> float:
    """Tokens per second of one mean run of every concurrency."""
    tokens = sum(np.mean([sum(row.output_tokens for row in run.rows) for run in runs]) for runs in levels)
    return float(tokens / sum(np.mean([run.window_s for run in runs]) for runs in levels))


def _boots(record: BenchRecord, arms: Sequence[str], levels: Sequence[int]) -> Iterable[BootAggregate]:
    for level in levels:
        for arm in arms:
            runs = closed_runs(record, arm, level)
            for boot in sorted({run.boot for run in runs}):
                yield BootAggregate(arm, level, boot, _window_speed([[run for run in runs if run.boot == boot]]))


def _notes(
    runs: dict[str, list[list[Run]]], resampled: float, headline: float, groups: dict[str, np.ndarray]
) -> Iterable[str]:
    every = [run for levels in runs.values() for level in levels for run in level]
    boots = [len({run.boot for run in level}) for levels in runs.values() for level in levels]
    if min(boots) < BOOTS_FOR_INTERVAL:
        yield NO_BOOT_VARIANCE
    if abs(resampled - headline) > TOLERANCE * (1 + headline):
        idle = 1 - min(map(busy, every))
        yield (
            f"by shares of prompts, which the interval is about, the change is {resampled:+.1%}: workers were idle for "
            f"up to {idle:.0%} of a window, or prompts were repeated unequally; send more requests"
        )
    small = [f"{name} ({inside.sum()})" for name, inside in groups.items() if inside.sum() < FEWEST_PROMPTS]
    if small:
        yield f"too few prompts for an interval of their own: {', '.join(small)}"


def phrase(compared: Comparison | Estimate) -> str:
    """What may be said: the change with its interval, or "no difference shown" where an interval spans zero."""
    if isinstance(compared, Estimate):
        return _phrase(compared.value, [compared], compared.shown)
    intervals = [one for one in (compared.change, compared.hierarchical) if one is not None]
    return _phrase(compared.change.value, intervals, compared.shown)


def _phrase(value: float, intervals: Sequence[Estimate], shown: bool) -> str:
    names = ("", "; with boots ")
    ranges = "".join(f"{name}{one.low:+.1%} … {one.high:+.1%}" for name, one in zip(names, intervals, strict=False))
    if intervals[0].prompts < FEWEST_PROMPTS:
        return f"{NO_DIFFERENCE} (too few prompts: {intervals[0].prompts})"
    return f"{value:+.1%} ({ranges})" if shown else f"{NO_DIFFERENCE} ({ranges})"


@dataclass(frozen=True)
class GeometricMean:
    """Geometric mean over cells of median ratios. change: less 1, with its interval over prompts; cells: each cell's
    ratio of median throughputs by (workload, concurrency); repetitions: fewest runs of a cell."""

    arm: str
    baseline: str
    change: Estimate
    cells: dict[tuple[str, int], float]
    repetitions: int


def geometric_mean(
    record: BenchRecord,
    arm: str,
    baseline: str,
    concurrency: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> GeometricMean:
    """Ratios of an arm to a baseline combined across cells (workload × concurrency).

    A cell's throughput in a run is the workload's tokens over its shares of the window; each arm's median over runs is
    taken first. Prompts are drawn again within workloads, the same for all cells of a workload and both arms.
    """
    levels = shared_concurrencies(record, (arm, baseline), concurrency)
    runs = [[closed_runs(record, name, level) for level in levels] for name in (arm, baseline)]
    prompts = shared_prompts([one for of in runs for one in of])
    workload = _codes(prompts)
    drawn = draws(workload, resamples, seed)
    tables = [[prompt_table(one, prompts) for one in of] for of in runs]
    logs: dict[tuple[str, int], Floats] = {}
    for number, name in enumerate(sorted({one for one, _ in prompts})):
        inside = workload == number
        for place, level in enumerate(levels):
            speeds = [_median_speed(of[place], drawn, inside) for of in tables]
            logs[name, level] = np.log(speeds[0] / speeds[1])
    changes = np.exp(np.mean(list(logs.values()), axis=0)) - 1
    return GeometricMean(
        arm,
        baseline,
        _estimate(float(changes[0]), changes[1:], len(prompts)),
        {cell: float(np.exp(log[0])) for cell, log in logs.items()},
        min(len(one) for of in runs for one in of),
    )


def _median_speed(table: PromptTable, drawn: Floats, inside: np.ndarray) -> Floats:
    """Median over runs of the throughput on these prompts, for every draw."""
    tokens, seconds = (drawn[:, inside] @ part[:, inside].T for part in (table.tokens, table.seconds))
    return np.median(tokens / seconds, axis=1)


@dataclass(frozen=True)
class Spread:
    """Seconds: mean and percentiles over requests."""

    mean: float
    p50: float
    p95: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without values."""
        if not values:
            return None
        p50, p95, p99 = np.percentile(values, [50, 95, 99])
        return cls(float(np.mean(values)), float(p50), float(p95), float(p99), len(values))


@dataclass(frozen=True)
class LatencySummary:
    """Seconds from sending. between_tokens: of each request (end - first token) / (tokens - 1). None where untold."""

    end_to_end: Spread | None
    first_token: Spread | None
    between_tokens: Spread | None


def latency_summary(rows: Iterable[RequestRow]) -> LatencySummary:
    """Latency over requests that were answered."""
    good = [row for row in rows if row.error is None]
    first = [row for row in good if row.first_token_s is not None]
    return LatencySummary(
        Spread.of([row.ended_s - row.sent_s for row in good]),
        Spread.of([row.first_token_s - row.sent_s for row in first]),  # type: ignore[operator]
        Spread.of(
            [
                (row.ended_s - row.first_token_s) / (row.output_tokens - 1)  # type: ignore[operator]
                for row in first
                if row.output_tokens > 1
            ]
        ),
    )


@dataclass(frozen=True)
class FamilyBest:
    """The fastest arm of a family at one concurrency, and tokens per second of all its arms."""

    best: str
    sweep: dict[str, float]


def best_of_family(record: BenchRecord, family: str) -> dict[int, FamilyBest]:
    """By concurrency. The choice is made on the measured runs themselves, which favours the baseline, never the arm."""
    names = [arm.name for arm in record.arms if arm.family == family]
    require(bool(names), f"family {family!r}: no arm of the record belongs to it")
    found: dict[int, FamilyBest] = {}
    for level in sorted({run.concurrency for run in record.runs if run.arm in names and run.rate is None}):
        runs = {name: closed_runs(record, name, level) for name in names}
        sweep = {name: _window_speed([of]) for name, of in runs.items() if of}
        found[level] = FamilyBest(max(sweep, key=sweep.__getitem__), sweep)
    return found


def baseline_at(record: BenchRecord, concurrency: int) -> str:
    """Name of the arm that others are compared with at this concurrency: the baseline, or the best of its family."""
    chosen = next((arm for arm in record.arms if arm.baseline), None)
    require(chosen is not None, "no arm of the record is marked as the baseline")
    assert chosen is not None
    best = best_of_family(record, chosen.family).get(concurrency) if chosen.family else None
    return best.best if best else chosen.name


def variation(record: BenchRecord, arm: str, baseline: str, concurrency: int) -> tuple[float, float]:
    """(between prompts, between boots), for minimum_detectable_effect, from a record of an earlier run.

    The first is the standard deviation over prompts, within workloads, of a prompt's pull on the log ratio of
    throughputs; the second that of a boot's throughput over its mean, 0 where no arm had two boots.
    """
    runs = [closed_runs(record, name, concurrency) for name in (arm, baseline)]
    shared_concurrencies(record, (arm, baseline), concurrency)
    prompts = shared_prompts(runs)
    codes = _codes(prompts)
    (tokens, seconds), (base_tokens, base_seconds) = (_mean_run([prompt_table(one, prompts)]) for one in runs)
    pull = tokens / tokens.mean() - seconds / seconds.mean()
    pull = pull - base_tokens / base_tokens.mean() + base_seconds / base_seconds.mean()
    inside = [pull[codes == code] - pull[codes == code].mean() for code in np.unique(codes)]
    degrees = len(pull) - len(inside)
    between_prompts = float(np.sqrt(np.square(np.concatenate(inside)).sum() / degrees)) if degrees > 0 else 0.0
    boots = list(_boots(record, (arm, baseline), (concurrency,)))
    speeds = [[one.tokens_per_s for one in boots if one.arm == name] for name in {arm, baseline}]
    spread = [np.var(one, ddof=1) / np.mean(one) ** 2 for one in speeds if len(one) > 1]
    return between_prompts, float(np.sqrt(np.mean(spread))) if spread else 0.0


def minimum_detectable_effect(
    prompts: int, boots: int, variation: float = TYPICAL_VARIATION, boot_variation: float = 0.0, power: float = 0.8
) -> float:
    """The relative change that a run of this size shows with probability `power` at 95%.

    variation: standard deviation over prompts of the paired relative difference; what sets prompts apart does so in
    every boot, so boots do not make it smaller. boot_variation: coefficient of variation of a boot's throughput, of
    either arm.
    """
    require(prompts > 0 and boots > 0, f"prompts and boots: {prompts} and {boots} must be positive")
    require(variation >= 0 and boot_variation >= 0, "variation: must be 0 or positive")
    require(0 < power < 1, f"power: {power} must lie in (0, 1)")
    error = (variation**2 / prompts + 2 * boot_variation**2 / boots) ** 0.5
    normal = NormalDist()
    return (normal.inv_cdf(0.5 + LEVEL / 2) + normal.inv_cdf(power)) * error


def detectable(prompts: int, boots: int, effect: float) -> str:
    """The line that is told before a run."""
    return f"with {boots} boot{'s' * (boots != 1)} × {prompts} prompts you can see ±{effect:.1%}"
