"""The record of `dscale evaluate drafter`, and the tables and plots made from it."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np

from dscale.evaluate.acceptance_curves import Counts, Curves, full_depth, interval, resamples, variable_depth
from dscale.evaluate.answer_shards import read_workload
from dscale.evaluate.conversations import Answered, Conversation, count_ways
from dscale.evaluate.length_bias import length_bias
from dscale.train.artifacts import Stage

ALL = "all"  # every workload pooled, token for token


def build_record(stage: Stage, environment: dict[str, Any]) -> dict[str, Any]:
    """The record of a stage whose shards are all there; environment: versions and device."""
    depth, seed = stage.inputs["width"] - 1, stage.inputs["seed"]
    names = sorted({shard.part.split(" ", 1)[1] for shard in stage.shards})
    read = {name: read_workload(stage, name) for name in names}
    workloads = {name: summary([talks], depth, stage.inputs["resamples"], seed) for name, (_, talks) in read.items()}
    if len(names) > 1:
        everything = [talks for _, talks in read.values()]
        workloads[ALL] = summary(everything, depth, stage.inputs["resamples"], seed)
    rows = [row for name, (served, talks) in read.items() for row in raw_rows(name, served, talks, depth)]
    return {
        "schema": stage.schema,
        **environment,
        "config": stage.inputs,
        "workloads": workloads,
        "conversations": rows,
    }


def summary(groups: list[list[Conversation]], depth: int, count: int, seed: int) -> dict[str, Any]:
    """Everything about some workloads' conversations; the bootstrap resamples conversations within each workload."""
    talks = [talk for group in groups for talk in group]
    ways = count_ways(talks, depth)
    weights = resamples(np.repeat(np.arange(len(groups)), list(map(len, groups))), count, seed)
    tokens = np.array([talk.tokens for talk in talks])
    walked = np.array([len(talk.walk()) for talk in talks])
    steps = {"re-anchored": walked}
    if "served" in ways:
        steps["served"] = np.array([len(talk.served) for talk in talks if talk.served is not None])
    out: dict[str, Any] = {
        "conversations": len(talks),
        "tokens": int(tokens.sum()),
        "ways": {
            name: _way(counts, weights, tokens, steps.get(name), name != "served") for name, counts in ways.items()
        },
        "differences": _differences(ways, weights),
        "length_bias": length_bias(talks),
    }
    if "served" in ways:
        out["agreement"] = agreement(talks)
    return out


def _way(
    counts: Counts, weights: np.ndarray, tokens: np.ndarray, steps: np.ndarray | None, whole_blocks: bool
) -> dict[str, Any]:
    """Both cohorts of one way; whole_blocks: matches beyond the first miss are known, so marginals mean something."""
    resampled = counts.weighted(weights)
    out = {
        "full_depth": _cohort(full_depth(counts.total()), full_depth(resampled), whole_blocks),
        "variable_depth": _cohort(variable_depth(counts.total()), variable_depth(resampled), whole_blocks),
    }
    if steps is not None:
        progress = interval((weights @ tokens) / (weights @ steps))
        out["progress"] = {"tokens": int(tokens.sum()), "steps": int(steps.sum())}
        out["progress"] |= {"value": float(tokens.sum() / steps.sum()), "interval": progress}
    return out


def _cohort(curves: Curves, resampled: Curves, whole_blocks: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "expected": float(curves.expected),
        "expected_interval": interval(resampled.expected),
        "blocks": curves.blocks.tolist(),
        "survival": curves.survival.tolist(),
        "survival_interval": [interval(one) for one in resampled.survival.T],
        "hazard": curves.hazard.tolist(),
        "hazard_interval": [interval(one) for one in resampled.hazard.T],
    }
    if whole_blocks:
        out |= {"marginal": curves.marginal.tolist(), "proxy_retired": float(curves.proxy)}
    return out


def _differences(ways: dict[str, Counts], weights: np.ndarray) -> dict[str, Any]:
    """Full-depth E[L] of one way less another's, on the same resamples."""
    out = {}
    for left, right in (("uniform", "re-anchored"), ("re-anchored", "served")):
        if left in ways and right in ways:
            value = full_depth(ways[left].total()).expected - full_depth(ways[right].total()).expected
            spread = full_depth(ways[left].weighted(weights)).expected
            spread = spread - full_depth(ways[right].weighted(weights)).expected
            out[f"{left} - {right}"] = {"value": float(value), "interval": interval(spread)}
    return out


def agreement(talks: list[Conversation]) -> dict[str, int]:
    """Engine against teacher-forced pass: steps of the engine in which the accepted drafts differ, and conversations
    with any such step."""
    differing = [talk.differing() for talk in talks]
    return {
        "steps": sum(map(len, differing)),
        "differing_steps": int(sum(one.sum() for one in differing)),
        "differing_conversations": int(sum(one.any() for one in differing)),
    }


def raw_rows(name: str, served: list[Answered], talks: list[Conversation], depth: int) -> list[dict[str, Any]]:
    """One row per conversation from which every table can be made again: accepted drafts of each walk in order, and
    the counts of uniform anchors by depth."""
    rows = []
    for index, talk in enumerate(talks):
        counts = count_ways([Conversation(talk.match, None)], depth)["uniform"]
        row: dict[str, Any] = {"workload": name, "tokens": talk.tokens}
        if served:
            one = served[index]
            row |= {"prompt": one.number, "prompt_tokens": len(one.prompt), "ended": one.reason, "served": one.steps}
        row["re-anchored"] = talk.accepted[talk.walk()].tolist()
        row["uniform"] = {one.name: getattr(counts, one.name)[0].astype(int).tolist() for one in fields(Counts)}
        row["uniform"]["full"] = row["uniform"]["full"][0]
        rows.append(row)
    return rows


def finite(value: Any) -> Any:
    """The value with plain numbers, and None for what is not finite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, digits: int = 3) -> str:
    """A number of a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def spanned(value: float | None, span: list[float | None], digits: int = 2) -> str:
    """A number with its interval."""
    return f"{number(value, digits)} ({number(span[0], digits)}…{number(span[1], digits)})"


def table(record: dict[str, Any]) -> str:
    """table.md of a record as it is on disk."""
    config = record["config"]
    lines = [
        "# Accepted length three ways",
        "",
        f"Target {config['target']}, drafter {config['drafter_hash'][:12]}, W = {config['width']}, {config['dtype']} "
        f"on {record['device']}, greedy, answers up to {config['max_tokens']} tokens. E[L] of full-depth blocks, bonus "
        "token included, 95% intervals by bootstrap over conversations. Progress: tokens / steps, truncated "
        "last blocks included.",
        "",
        *_headline(record),
    ]
    for name, one in record["workloads"].items():
        lines += ["", f"## {name}", "", *_by_depth(one), "", *_bias(one)]
    return "\n".join(lines) + "\n"


def _headline(record: dict[str, Any]) -> list[str]:
    rows = [
        "| workload | conversations | uniform | re-anchored | served | progress re-anchored | progress served | "
        "uniform − re-anchored | proxy (retired; uniform) | differing steps |",
        "| --- " * 10 + "|",
    ]
    for name, one in record["workloads"].items():
        ways = one["ways"]
        cells = [name, str(one["conversations"])]
        for way in ("uniform", "re-anchored", "served"):
            whole = ways.get(way, {}).get("full_depth")
            cells.append(spanned(whole["expected"], whole["expected_interval"]) if whole else "–")
        for way in ("re-anchored", "served"):
            cells.append(number(ways[way]["progress"]["value"], 2) if way in ways else "–")
        gap = one["differences"]["uniform - re-anchored"]
        cells.append(spanned(gap["value"], gap["interval"]))
        cells.append(number(ways["uniform"]["full_depth"]["proxy_retired"], 2))
        same = one.get("agreement")
        cells.append(f"{same['differing_steps']} of {same['steps']}" if same else "–")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _by_depth(one: dict[str, Any]) -> list[str]:
    ways = {name: way["full_depth"] for name, way in one["ways"].items()}
    columns = [f"{what} {name}" for what in ("S", "h") for name in ways] + ["m uniform"]
    rows = ["| depth | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for k in range(len(ways["uniform"]["survival"])):
        cells = [number(way[what][k]) for what in ("survival", "hazard") for way in ways.values()]
        rows.append("| " + " | ".join([str(k + 1), *cells, number(ways["uniform"]["marginal"][k])]) + " |")
    return rows


def _bias(one: dict[str, Any]) -> list[str]:
    bias = one["length_bias"]
    if not bias:
        return ["No block has text at every depth."]
    named = bias["visited_by_previous"] | {"jumped over": bias["jumped_over"]}
    at = ", ".join(f"{name} {number(cell['expected'], 2)} ({cell['blocks']})" for name, cell in named.items())
    cells = bias["around_rejection"].items()
    around = ", ".join(f"{distance} {number(cell['expected'], 2)}" for distance, cell in cells)
    return [
        f"Uniform − re-anchored = {bias['difference']:+.2f}: length bias {bias['from_length_bias']:+.2f}, inside steps "
        f"{bias['from_inside']:+.2f}. Uniform would be {bias['expected_if_memoryless']:.2f} if drafts failed by chance "
        f"and {bias['expected_if_hard_tokens_fixed']:.2f} if the tokens that stopped the walk stopped every block and "
        f"nothing else did. E[L] by where the anchor lies: {at}.",
        "",
        f"Harmonic mean over conversations {bias['harmonic']['conversation']:.2f}, over stretches of 64 positions "
        f"{bias['harmonic']['64']:.2f}, of 32 {bias['harmonic']['32']:.2f}. E[L] around the tokens that stopped the "
        f"walk, by distance: {around}.",
    ]
