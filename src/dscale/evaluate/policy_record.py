"""Figures of policies that were replayed side by side: sums by prompt, bootstrap intervals, checks, the table.

retention  Σ min(y, k - 1) / Σ y     y: accepted drafts of the whole block
progress   Σ (1 + min(y, k - 1)) / steps of a request
slots      Σ k / steps of a request
speed      Σ tokens / Σ seconds of the steps that made them, a step's seconds shared equally by its lanes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dscale.evaluate.policy_lab import Arm
from dscale.train.traces import Traces

FIGURES = ("retention", "progress", "slots", "tokens_per_s")
ALL = "all"
Floats = NDArray[np.float64]


def summarise(traces: Traces, rows: NDArray, arms: Sequence[Arm], resamples: int, seed: int) -> list[dict[str, Any]]:
    """Per arm: policy, slots, rows a step, ceiling, objective and its figures over all records and each workload.

    Each figure is [value, low, high]: 95% intervals by bootstrap over prompts within each workload. `vs_full`: relative
    change of the speed, paired.
    """
    prompts, owner = np.unique(traces.prompt[rows.ravel()], return_inverse=True)
    workload = np.zeros(len(prompts), np.int64)
    workload[owner] = traces.workload[rows.ravel()]
    drawn = resampled(workload, resamples, seed)
    sums = [_by_prompt(traces, rows, arm, owner.ravel(), len(prompts)) for arm in arms]
    full = next(index for index, arm in enumerate(arms) if arm.policy == "full")
    groups = {ALL: np.ones(len(prompts), bool)}
    groups |= {traces.workloads[number]: workload == number for number in np.unique(workload)}
    out = []
    for arm, own in zip(arms, sums, strict=True):
        scopes = {name: _scope(own, sums[full], drawn, inside) for name, inside in groups.items()}
        used = float(arm.k.sum(1).mean())
        out.append(
            {"policy": arm.policy, "slots": arm.slots, "objective": arm.objective, "drafted": float(arm.drafted.mean())}
            | {"rows": used, "ceiling": arm.ceiling, "figures": scopes}
        )
    return out


def resampled(workload: NDArray, resamples: int, seed: int) -> Floats:
    """float64 [resamples + 1, P]: how often each prompt is drawn; the first row draws each once. Within workloads."""
    generator = np.random.default_rng(seed)
    drawn = np.ones((resamples + 1, len(workload)))
    for number in np.unique(workload):
        inside = np.flatnonzero(workload == number)
        drawn[1:, inside] = generator.multinomial(len(inside), np.full(len(inside), 1 / len(inside)), size=resamples)
    return drawn


def _by_prompt(traces: Traces, rows: NDArray, arm: Arm, owner: NDArray, prompts: int) -> Floats:
    """[P, 5]: kept drafts, drafts that the whole block would keep, slots, seconds, steps."""
    y = traces.accepted[rows].astype(np.float64)
    kept = np.minimum(y, arm.k - 1)
    seconds = np.broadcast_to(arm.seconds[:, None] / rows.shape[1], rows.shape)
    columns = (kept, y, arm.k, seconds, np.ones_like(y))
    return np.stack([np.bincount(owner, np.ravel(one), prompts) for one in columns], axis=1)


def _scope(own: Floats, full: Floats, drawn: Floats, inside: NDArray) -> dict[str, Any]:
    def figures(sums: Floats) -> dict[str, Floats]:
        kept, y, slots, seconds, steps = (drawn[:, inside] @ sums[inside]).T
        with np.errstate(invalid="ignore", divide="ignore"):
            values = (np.where(y > 0, kept / y, 1.0), 1 + kept / steps, slots / steps, (kept + steps) / seconds)
        return dict(zip(FIGURES, values, strict=True))

    made = figures(own)
    made["vs_full"] = made["tokens_per_s"] / figures(full)["tokens_per_s"] - 1
    return {name: _interval(values) for name, values in made.items()}


def _interval(values: Floats) -> list[float]:
    """[value, low, high]: of the sample itself, and 2.5% and 97.5% of the resamples that hold anything."""
    others = values[1:][np.isfinite(values[1:])]
    low, high = np.quantile(others, [0.025, 0.975]) if len(others) else (values[0], values[0])
    return [float(values[0]), float(low), float(high)]


def checks(arms: list[dict[str, Any]]) -> dict[str, bool]:
    """What must hold whatever the traces say."""
    by_name = {(arm["policy"], arm["slots"]): arm for arm in arms}
    kept = [(arm["figures"][ALL]["retention"][0], arm["ceiling"]) for arm in arms]
    full = next(arm for arm in arms if arm["policy"] == "full")
    pairs = [(by_name[("dvl exact", key[1])], arm) for key, arm in by_name.items() if key[0] == "dvl seeded"]
    return {
        "full keeps everything": full["figures"][ALL]["retention"][0] == 1.0,
        "no policy keeps more than the oracle of as many rows": all(own <= best + 1e-12 for own, best in kept),
        "exact allocation promises no less than seeded": all(
            exact["objective"] >= seeded["objective"] - 1e-6 for exact, seeded in pairs
        ),
    }


def table(record: dict[str, Any]) -> str:
    """table.md: per concurrency every policy over all records, then the speeds by workload."""
    lines = ["# Policies on the same traces", ""]
    traces, costs = record["traces"], record["costs"]
    lines.append(
        f"{traces['used']} recorded steps ({traces['part']}) of {traces['prompts']} prompts; step times of "
        f"{costs.get('model')}, {costs.get('dtype')} on {costs.get('device_name', costs.get('device'))}."
    )
    lines += [*(f"- {one}" for one in record["limits"]), ""]
    for lanes, one in record["concurrency"].items():
        lines += [f"## {lanes} requests side by side", ""]
        lines += ["| policy | slots | retention | tokens a step | modelled tokens/s | against full |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        lines += [_line(arm) for arm in one["arms"]]
        names = [name for name in one["arms"][0]["figures"] if name != ALL]
        lines += ["", f"### {lanes} requests: modelled tokens/s by workload", ""]
        lines += [f"| policy | budget | {' | '.join(names)} |", f"| --- | ---: |{' ---: |' * len(names)}"]
        for arm in one["arms"]:
            speeds = (f"{arm['figures'][name]['tokens_per_s'][0]:.1f}" for name in names)
            lines.append(f"| {arm['policy']} | {_budget(arm)} | {' | '.join(speeds)} |")
        lines.append("")
    return "\n".join(lines)


def _line(arm: dict[str, Any]) -> str:
    figures = arm["figures"][ALL]
    name = arm["policy"] if arm["slots"] is None or arm["policy"].startswith(("off", "fixed", "full")) else ""
    name = name or f"{arm['policy']}, {arm['slots']}"
    cells = [f"{figures['slots'][0]:.2f}", _percent(figures["retention"]), _plain(figures["progress"], 2)]
    cells += [_plain(figures["tokens_per_s"], 1), change(figures["vs_full"])]
    return f"| {name} | {' | '.join(cells)} |"


def _budget(arm: dict[str, Any]) -> str:
    return "own" if arm["slots"] is None else str(arm["slots"])


def _percent(figure: list[float]) -> str:
    value, low, high = (100 * one for one in figure)
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]"


def _plain(figure: list[float], digits: int) -> str:
    value, low, high = (f"{one:.{digits}f}" for one in figure)
    return f"{value} [{low}, {high}]"


def change(figure: list[float]) -> str:
    """A relative change with its interval, in words where the interval spans zero."""
    value, low, high = (100 * one for one in figure)
    if low == value == high == 0:
        return "the same"
    if low <= 0 <= high:
        return f"no difference shown [{low:+.1f}, {high:+.1f}]"
    return f"{value:+.1f}% [{low:+.1f}, {high:+.1f}]"
