"""Ratios of tokens per second between arms that took turns, paired by repetition: both met the same requests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

REPETITION = 10_000  # request numbers from one repetition to the next
T_95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t by degrees of freedom


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
