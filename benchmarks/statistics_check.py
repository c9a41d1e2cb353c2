"""Do the intervals of dscale.evaluate.statistics hold what they promise? Synthetic records with a known effect.

    python benchmarks/statistics_check.py --repetitions 2000 --out benchmarks/records/statistics_check.json

Each repetition draws new prompts of two workloads, their answers' lengths, how much the arm gains on each, noise of
every request and, where asked, the speed of each boot, lets c workers of a closed loop go through them, and makes a
record of `dscale bench` of it. Counted is how often the interval holds the true change, and how often two equal arms
are told apart (A/A), which should be at most 5%.
"""

from __future__ import annotations

import argparse
import heapq
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dscale.evaluate.bench_record import ArmInfo, BenchRecord, RequestRow, Run
from dscale.evaluate.record_file import write_record
from dscale.evaluate.statistics import compare, minimum_detectable_effect, phrase
from dscale.versions import versions


@dataclass(frozen=True)
class Population:
    """What records are drawn from. gains: log speed-up of the arm on each workload; spread: its standard deviation over
    prompts; noise: of the log seconds of a request; boot_noise: of the log speed of a boot. Lengths are log-normal."""

    prompts: int = 60  # of each workload
    gains: tuple[float, ...] = (0.15, 0.35)
    mean_tokens: tuple[float, ...] = (120.0, 60.0)
    spread: float = 0.25
    length_spread: float = 0.5
    noise: float = 0.05
    boot_noise: float = 0.0
    boots: int = 1
    runs: int = 2
    concurrency: int = 4

    @property
    def change(self) -> float:
        """The relative change of throughput, in expectation: tokens cancel, so it is a ratio of expected seconds."""
        weights = np.array(self.mean_tokens)
        seconds = weights * np.exp(-np.array(self.gains) + self.spread**2 / 2)
        return float(weights.sum() / seconds.sum() - 1)

    def equal(self) -> Population:
        """The same with no gain anywhere, so that the arms are one."""
        return replace(self, gains=(0.0,) * len(self.gains), spread=0.0)


def draw_record(population: Population, generator: np.random.Generator) -> BenchRecord:
    """One benchmark of arms `base` and `arm`."""
    count, workloads = population.prompts, len(population.gains)
    workload = np.repeat(np.arange(workloads), count)
    tokens = np.maximum(1, np.round(_log_normal(generator, population.length_spread, count * workloads)
                                    * np.array(population.mean_tokens)[workload])).astype(int)  # fmt: skip
    own = generator.normal(0, population.spread, count * workloads) + np.array(population.gains)[workload]
    runs = []
    for boot in range(population.boots):
        for arm in ("base", "arm"):
            pace = 0.01 * _log_normal(generator, population.boot_noise, 1)
            for run in range(population.runs):
                seconds = tokens * pace * _log_normal(generator, population.noise, len(tokens))
                seconds = seconds * np.exp(-own) if arm == "arm" else seconds
                order = len(runs)
                runs.append(_closed_loop(arm, population.concurrency, boot, run, order, workload, tokens, seconds))
    arms = (ArmInfo("base", "dscale", baseline=True), ArmInfo("arm", "dscale"))
    return BenchRecord({}, {}, "synthetic", 0, {}, arms, tuple(runs), simulated=True)


def _log_normal(generator: np.random.Generator, sigma: float, size: int) -> np.ndarray:
    """Of mean 1."""
    return np.exp(generator.normal(-(sigma**2) / 2, sigma, size))


def _closed_loop(
    arm: str,
    workers: int,
    boot: int,
    run: int,
    order: int,
    workload: np.ndarray,
    tokens: np.ndarray,
    seconds: np.ndarray,
) -> Run:
    """Requests in order, each sent by the worker that is free first."""
    free, rows = [0.0] * workers, []
    for index, (kind, made, takes) in enumerate(zip(workload.tolist(), tokens.tolist(), seconds.tolist(), strict=True)):
        sent = heapq.heappop(free)
        heapq.heappush(free, sent + takes)
        rows.append(RequestRow(f"r{index}", f"p{index}", f"w{kind}", sent, None, sent + takes, 10, made))
    return Run(arm, workers, boot, run, order, max(free), tuple(rows))


def check(population: Population, repetitions: int, resamples: int, seed: int) -> dict[str, Any]:
    """Shares of repetitions in which the intervals hold the true change, and in which a difference is shown."""
    generator = np.random.default_rng(seed)
    truth = population.change
    found = [compare(draw_record(population, generator), "arm", "base", None, resamples) for _ in range(repetitions)]
    nested = [one.hierarchical for one in found if one.hierarchical is not None]
    return {
        "population": vars(population),
        "true_change": truth,
        "repetitions": repetitions,
        "mean_change": float(np.mean([one.change.value for one in found])),
        "coverage": float(np.mean([one.change.low <= truth <= one.change.high for one in found])),
        "coverage_hierarchical": float(np.mean([one.low <= truth <= one.high for one in nested])) if nested else None,
        "mean_half_width": float(np.mean([(one.change.high - one.change.low) / 2 for one in found])),
        "shown": float(np.mean([one.shown for one in found])),
        "shown_without_boots": float(np.mean([one.change.shown for one in found])),
        "no_difference_shown": float(np.mean([phrase(one).startswith("no difference") for one in found])),
        "minimum_detectable_effect": minimum_detectable_effect(
            population.prompts * len(population.gains), population.boots, population.spread, population.boot_noise
        ),
    }


CASES = {
    "known effect": Population(),
    "known effect, few prompts": Population(prompts=20),
    "known effect, one worker": Population(concurrency=1),
    "A/A": Population().equal(),
    "A/A, boots differ by 2%": Population(boot_noise=0.02, boots=2).equal(),
    "known effect, 3 boots that differ by 5%": Population(boot_noise=0.05, boots=3, runs=1),
    "known effect, 5 boots that differ by 5%": Population(boot_noise=0.05, boots=5, runs=1),
    "A/A, 3 boots that differ by 2%": Population(boot_noise=0.02, boots=3, runs=1).equal(),
    "A/A, 5 boots that differ by 2%": Population(boot_noise=0.02, boots=5, runs=1).equal(),
    "A/A, 10 boots that differ by 2%": Population(boot_noise=0.02, boots=10, runs=1).equal(),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"kind": "statistics_check", "schema": 1, "versions": versions(), "seed": args.seed}
    record |= {"resamples": args.resamples, "cases": {}}
    for name, population in CASES.items():
        began = time.perf_counter()
        record["cases"][name] = one = check(population, args.repetitions, args.resamples, args.seed)
        nested = one["coverage_hierarchical"]
        told = "" if nested is None else f", with boots {nested:.1%}"
        seconds = time.perf_counter() - began
        print(
            f"{name:45} coverage {one['coverage']:.1%}{told}; shown {one['shown']:.1%}  ({seconds:.0f} s)", flush=True
        )
    if args.out is not None:
        write_record(args.out, record)


if __name__ == "__main__":
    main()
