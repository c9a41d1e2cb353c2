"""What each prompt cost each arm: the table that every interval of a benchmark is resampled from.

A closed loop of c workers gives no time per prompt of its own, for c requests run side by side. While all workers are
busy a window of S seconds holds c · S seconds of latency, so a request's share of the window is its latency / c. Tokens
over shares of all prompts then is the throughput with all workers busy. Towards the end of a run workers fall idle and
the window is longer than its shares: `busy` = Σ latency / (c · window) says how far, and who compares arms checks that
both ways give the same change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dscale.config import require
from dscale.evaluate.bench_record import BenchRecord, Run

Floats = NDArray[np.float64]
Prompt = tuple[str, str]  # workload, prompt id


@dataclass(frozen=True)
class PromptTable:
    """One arm at one concurrency over P prompts and R runs. tokens, seconds [R, P]: means over a prompt's repeats
    within a run; boots [R]: which boot a run belongs to."""

    tokens: Floats
    seconds: Floats
    boots: tuple[int, ...]

    def by_boot(self) -> tuple[Floats, Floats]:
        """tokens and seconds [B, P], means over the runs of each boot."""
        boots = np.array(self.boots)
        inside = [boots == boot for boot in np.unique(boots)]
        return tuple(np.stack([part[rows].mean(0) for rows in inside]) for part in (self.tokens, self.seconds))  # type: ignore[return-value]


def closed_runs(record: BenchRecord, arm: str, concurrency: int) -> list[Run]:
    """Runs of an arm in a closed loop, in order. InputError for a run with failed requests."""
    runs = [run for run in record.runs if run.arm == arm and run.concurrency == concurrency and run.rate is None]
    for run in runs:
        require(run.tokens_per_s > 0, f"{arm}: a run at c = {concurrency} made no tokens")
    return sorted(runs, key=lambda run: (run.boot, run.run))


def shared_concurrencies(record: BenchRecord, arms: Sequence[str], concurrency: int | None) -> tuple[int, ...]:
    """The concurrencies at which all arms were run in a closed loop: the one asked for, or all there are."""
    for arm in arms:
        record.arm(arm)
    found = [{run.concurrency for run in record.runs if run.arm == arm and run.rate is None} for arm in arms]
    shared = sorted(set.intersection(*found)) if found else []
    wanted = shared if concurrency is None else [one for one in shared if one == concurrency]
    at = "the same concurrency" if concurrency is None else f"c = {concurrency}; both have {shared}"
    require(bool(wanted), f"{' and '.join(arms)}: no closed-loop runs of both at {at}")
    return tuple(wanted)


def shared_prompts(groups: Sequence[Sequence[Run]]) -> list[Prompt]:
    """Prompts that every run of every group answered, ordered by workload."""
    sets = [{(row.workload, row.prompt_id) for row in run.rows} for runs in groups for run in runs]
    prompts = sorted(set.intersection(*sets)) if sets else []
    require(bool(prompts), "no prompt was answered in every run; the runs are of different manifests")
    return prompts


def shares(run: Run) -> Floats:
    """Seconds of the window that each row of a run stands for: latency / c (see above)."""
    latency = np.array([row.ended_s - row.sent_s for row in run.rows])
    require(bool((latency > 0).all()) and run.window_s > 0, f"{run.arm}: a request or a window without duration")
    return latency / run.concurrency


def busy(run: Run) -> float:
    """Share of the workers' time in which a request was running."""
    return sum(row.ended_s - row.sent_s for row in run.rows) / (run.concurrency * run.window_s)


def prompt_table(runs: Sequence[Run], prompts: Sequence[Prompt]) -> PromptTable:
    """The table of these runs; rows of other prompts are left out."""
    place = {prompt: index for index, prompt in enumerate(prompts)}
    tokens, seconds = np.zeros((2, len(runs), len(prompts)))
    for number, run in enumerate(runs):
        at = np.array([place.get((row.workload, row.prompt_id), -1) for row in run.rows])
        inside = at >= 0
        repeats = np.bincount(at[inside], minlength=len(prompts))
        made = np.array([row.output_tokens for row in run.rows], float)
        tokens[number] = np.bincount(at[inside], made[inside], len(prompts)) / repeats
        seconds[number] = np.bincount(at[inside], shares(run)[inside], len(prompts)) / repeats
    return PromptTable(tokens, seconds, tuple(run.boot for run in runs))


def draws(workload: NDArray[np.intp], resamples: int, seed: int) -> Floats:
    """[resamples + 1, P]: the weight of each prompt in each draw, within workloads; the first row has each once.

    Of a workload's n prompts n - 1 are drawn and weighted up: drawing n makes the variance of a mean too small by
    (n - 1) / n (Rao and Wu 1988). A workload of one prompt always has it once.
    """
    generator = np.random.default_rng(seed)
    drawn = np.ones((resamples + 1, len(workload)))
    for number in np.unique(workload):
        inside = np.flatnonzero(workload == number)
        count = len(inside)
        if count > 1:
            times = generator.multinomial(count - 1, np.full(count, 1 / count), size=resamples)
            drawn[1:, inside] = times * (count / (count - 1))
    return drawn
