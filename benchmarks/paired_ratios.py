"""Arms that take turns, and ratios of their tokens per second, paired by repetition: both met the same requests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

REPETITION = 10_000  # request numbers from one repetition to the next
T_95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t by degrees of freedom


def turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(repetition, arm) in the order of running: A B, B A, A B …"""
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else names[::-1]:
            yield repeat, name


def paired(arm: dict[str, Any], base: dict[str, Any]) -> list[float]:
    """Tokens/s of an arm over those of another, one ratio for each repetition that both have."""
    known = {run["repetition"]: run["tokens_per_s"] for run in base.get("runs", []) if "repetition" in run}
    return [run["tokens_per_s"] / known[run["repetition"]] for run in arm["runs"] if run.get("repetition") in known]


def interval(ratios: Sequence[float]) -> list[float] | None:
    """95% interval of the mean log ratio; None of fewer than two."""
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    half = T_95[min(len(logs) - 1, len(T_95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return [math.exp(statistics.fmean(logs) - half), math.exp(statistics.fmean(logs) + half)]


def compare(arms: dict[str, Any]) -> None:
    """Medians, and ratios to the base arm paired by repetition, added to each arm."""
    base = next((name for name in ("control", "off") if name in arms), next(iter(arms), ""))
    for arm in arms.values():
        rates = [run["tokens_per_s"] for run in arm["runs"]]
        if not rates:
            continue
        arm["tokens_per_s"] = statistics.median(rates)
        arm["range"] = [min(rates), max(rates)]
        if ratios := paired(arm, arms[base]):
            arm |= {"base": base, "ratio": statistics.median(ratios), "interval": interval(ratios)}


def geometric_means(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each arm's median ratios over the concurrencies that have it."""
    ratios: dict[str, list[float]] = {}
    for one in cells:
        for name, arm in one["arms"].items():
            if "ratio" in arm:
                ratios.setdefault(name, []).append(arm["ratio"])
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}
