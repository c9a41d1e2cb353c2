"""The model card of a tuned drafter, written from the records of the stages and from nothing else.

It says what the drafter is good and bad at, workload by workload, and what nobody measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dscale.train.artifacts import MANIFEST, read_json
from dscale.train.rows import PARTS

GRADES = (
    (1.5, "hardly worth drafting for"),
    (2.5, "weak"),
    (3.5, "fair"),
    (5.0, "good"),
    (float("inf"), "very good"),
)
ALWAYS_MISSING = (
    "Served speed: the table of policies models it from recorded acceptance and the step times of one machine.",
    "Sampled text (temperature above 0), penalties, grammars, tool calls, more than one user turn.",
    "Languages and kinds of prompts that are not listed above; contexts beyond the lengths of the corpus.",
)
SHOWN = ("off", "full", "confidence", "dvl seeded", "dvl exact", "auto", "oracle")


@dataclass(frozen=True)
class Records:
    """What the stages left: manifests of corpus and training (None for a drafter that was given), the predictor's
    metrics, records of the drafter's evaluation, of the policies and of the feature check."""

    target: str
    corpus: dict[str, Any]
    training: dict[str, Any] | None
    history: list[dict[str, Any]]
    predictor: dict[str, Any]
    drafter: dict[str, Any]
    policies: dict[str, Any]
    features: dict[str, Any] | None
    commands: list[str]

    @classmethod
    def read(cls, folder: Path, target: str, commands: list[str]) -> Records:
        """The records of a tuning folder."""
        training = folder / "training" / MANIFEST
        features = folder / "features.json"
        history = folder / "training" / "history.jsonl"
        return cls(
            target,
            read_json(folder / "corpus" / MANIFEST, "a corpus manifest"),
            read_json(training, "a training manifest") if training.is_file() else None,
            [json.loads(line) for line in history.read_text().splitlines()] if history.is_file() else [],
            read_json(folder / "predictor" / "metrics.json", "a predictor's metrics"),
            read_json(folder / "drafter" / "record.json", "a record of dscale evaluate drafter"),
            read_json(folder / "policies" / "record.json", "a record of dscale evaluate policies"),
            read_json(features, "a record of dscale check features") if features.is_file() else None,
            commands,
        )


def card(records: Records) -> str:
    """The card as Markdown."""
    parts = [_head(records), _acceptance(records.drafter), _made(records), _predictor(records.predictor)]
    parts += [_policies(records.policies), _missing(records), _commands(records.commands)]
    return "\n\n".join(parts) + "\n"


def grade(progress: float) -> str:
    """A word for tokens a step."""
    return next(word for limit, word in GRADES if progress < limit)


def _head(records: Records) -> str:
    config = records.drafter["config"]
    lines = [
        f"# Drafter and predictor for {Path(records.target).name}",
        "",
        f"A DFlash block drafter (W = {config['width']}, {config['drafter_hash'][:12]}…) and its acceptance predictor.",
        "Bound to the target's weights: loading it with others is refused. Every figure here was written by",
        "`dscale tune` from its own records.",
    ]
    if records.features is not None:
        one = records.features
        lines.append(f"The engine's taps against transformers: {one['verdict']}, top-1 {one['top1']['score']:.4f}.")
    return "\n".join(lines)


def progress_of(workload: dict[str, Any]) -> tuple[float, list[float | None], str]:
    """(tokens a step, its interval, how it was measured) of one workload: served where that is known, else walked."""
    way = "served" if "served" in workload["ways"] else "re-anchored"
    found = workload["ways"][way]["progress"]
    return found["value"], found["interval"], way


def _acceptance(record: dict[str, Any]) -> str:
    rows = ["## What it is good and bad at", "", "Tokens a step (accepted drafts + 1), greedy, 95% intervals.", ""]
    rows += ["| workload | conversations | tokens a step | measured | first draft fails | uniform E[L] | verdict |"]
    rows += ["| --- " * 7 + "|"]
    named = {name: one for name, one in record["workloads"].items() if name != "all"}
    for name, one in sorted(named.items(), key=lambda item: -progress_of(item[1])[0]):
        value, span, way = progress_of(one)
        first = one["ways"][way]["variable_depth"]["survival"][0]
        uniform = one["ways"]["uniform"]["full_depth"]["expected"]
        cells = [name, str(one["conversations"]), f"{value:.2f} ({_span(span)})", way]
        cells += ["–" if first is None else f"{1 - first:.0%}", "–" if uniform is None else f"{uniform:.2f}"]
        rows.append("| " + " | ".join([*cells, grade(value)]) + " |")
    rows += ["", *_verdict(named)]
    return "\n".join(rows)


def _span(span: list[float | None]) -> str:
    return "…".join("–" if one is None else f"{one:.2f}" for one in span)


def _verdict(named: dict[str, dict[str, Any]]) -> list[str]:
    ranked = sorted(named, key=lambda name: -progress_of(named[name])[0])
    best, worst = ranked[0], ranked[-1]
    lines = [
        "Uniform E[L] is not what a server gets: it weighs easy stretches by their length. Do not quote it as speed."
    ]
    if len(ranked) > 1:
        low, high = progress_of(named[worst]), progress_of(named[best])
        apart = "apart beyond their intervals" if (low[1][1] or 0) < (high[1][0] or 0) else "not apart beyond noise"
        lines.append(f"Best on {best} ({high[0]:.2f}), worst on {worst} ({low[0]:.2f}); the two are {apart}.")
    poor = [name for name in ranked if progress_of(named[name])[0] < GRADES[1][0]]
    if poor:
        lines.append(f"Weak on {', '.join(poor)}: with several requests at a time speculation may lose there.")
    few = [name for name in ranked if named[name]["conversations"] < 30]
    if few:
        lines.append(f"Fewer than 30 conversations: {', '.join(few)}. Take those figures as hints.")
    return lines


def _made(records: Records) -> str:
    inputs, summary = records.corpus["inputs"], records.corpus["summary"]
    parts = summary["parts"]
    counts = ", ".join(f"{part} {one['conversations']:,}" for part, one in parts.items())
    sources = ", ".join(f"{name} {one['kept']:,}" for name, one in summary["sources"].items())
    lines = [
        "## How it was made",
        "",
        f"- Corpus: answered by the target itself; conversations {counts}; {summary['answer_tokens']:,} answer tokens, "
        f"{summary['greedy']:.0%} of the answers greedy. Sources: {sources}.",
    ]
    excluded = [one["name"] for one in inputs.get("exclude", [])]
    lines.append(f"- Prompts kept out of it: {', '.join(excluded) if excluded else 'none were named'}.")
    if records.training is None:
        lines.append("- The drafter was given, not trained here: whether it saw these prompts before is not known.")
    else:
        lines += _training(records.training, records.history)
    return "\n".join(lines)


def _training(manifest: dict[str, Any], history: list[dict[str, Any]]) -> list[str]:
    inputs, summary = manifest["inputs"], manifest["summary"]
    names = ("init", "rows", "anchors", "gamma", "distil", "optimizer", "rate", "schedule")
    told = ", ".join(f"{name} {inputs[f'train.{name}']}" for name in names if inputs.get(f"train.{name}") is not None)
    lines = [f"- Training: {summary['steps']:,} steps, processes {inputs.get('processes', 1)}; {told}."]
    curve = [(one["step"], one["validation_progress"]) for one in history if "validation_progress" in one]
    if len(curve) >= 2:
        tail = ", ".join(f"{value:.2f} at {step:,}" for step, value in curve[-4:])
        gain = curve[-1][1] - curve[-2][1]
        rising = "still rising: longer training would give more" if gain > 0.02 else "flat at the end"
        lines.append(f"- Validation progress: {tail} ({rising}).")
    return lines


def _predictor(metrics: dict[str, Any]) -> str:
    need, signals = metrics["required"], metrics["signals"]
    slots = need["slots"]
    lines = [
        "## Predictor",
        "",
        f"Holdout of {metrics['prompts']['holdout']:,} prompts, {metrics['records']['holdout']:,} steps: "
        f"R² of accepted length {metrics['holdout']['r2']:.3f}, "
        f"mean error {metrics['holdout']['mae']:.2f} drafts.",
        f"At {slots} slots a request (mean progress + 2) a shared budget keeps {need['shared_of_8']:.1%} of the "
        f"accepted drafts among 8 requests, {need['shared_of_32']:.1%} among 32; a fixed width {need['fixed']:.1%}.",
        f"Simple signals, rank correlation with accepted length: mean gap {signals['mean_gap']:.2f}, "
        f"mean entropy {signals['mean_entropy']:.2f}.",
    ]
    if metrics["holdout"]["r2"] < 0.3:
        lines.append("That is a poor predictor: prefer policy `full` or `confidence`, and fit again with more traces.")
    return "\n".join(lines)


def _policies(record: dict[str, Any]) -> str:
    where = f"{record['costs'].get('dtype')} on {record['costs'].get('device_name')}"
    lines = ["## Policies on recorded traces", "", f"Modelled with step times of {where}.", ""]
    lines += ["| requests | policy | slots | drafts kept | tokens a step | modelled tokens/s |", "| --- " * 6 + "|"]
    notes = []
    for lanes, one in sorted(record["concurrency"].items(), key=lambda item: int(item[0])):
        best = _best_arms(one["arms"])
        for arm in best:
            figures = arm["figures"]["all"]
            cells = [lanes, arm["policy"], f"{figures['slots'][0]:.1f}", f"{figures['retention'][0]:.1%}"]
            cells += [f"{figures['progress'][0]:.2f}", f"{figures['tokens_per_s'][0]:,.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
        notes.append(_advice(lanes, best))
    return "\n".join([*lines, "", "The budget shown for a policy is its fastest one.", *notes])


def _best_arms(arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest arm of every policy that is shown, and of the fixed widths."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for arm in arms:
        name = "fixed" if arm["policy"].startswith("fixed") else arm["policy"]
        if name in (*SHOWN, "fixed"):
            groups.setdefault(name, []).append(arm)
    fastest = [max(group, key=lambda arm: arm["figures"]["all"]["tokens_per_s"][0]) for group in groups.values()]
    return sorted(fastest, key=lambda arm: -arm["figures"]["all"]["tokens_per_s"][0])


def _advice(lanes: str, best: list[dict[str, Any]]) -> str:
    speed = {arm["policy"]: arm["figures"]["all"]["tokens_per_s"][0] for arm in best if arm["policy"] != "oracle"}
    if speed.get("off", 0.0) >= max(speed.values()):
        return f"With {lanes} requests no speculation is the fastest: this drafter does not pay there."
    return f"With {lanes} requests {max(speed, key=lambda name: speed[name])} is the fastest."


def _missing(records: Records) -> str:
    config = records.drafter["config"]
    lines = ["## Not measured", ""]
    if not any("served" in one["ways"] for one in records.drafter["workloads"].values()):
        lines.append("- Served acceptance: no prompts were given; the walk over the corpus's holdout stands for it.")
    if set(records.drafter["workloads"]) <= {*PARTS, "all"}:
        lines.append("- Any prompt that is not of the corpus's own kinds.")
    if records.features is None:
        lines.append("- Taps against transformers (left out).")
    if records.drafter.get("device", "").startswith("cpu"):
        lines.append("- Any GPU.")
    lines += [f"- {one}" for one in ALWAYS_MISSING]
    return "\n".join([*lines, f"- Answers beyond {config['max_tokens']} tokens."])


def _commands(commands: list[str]) -> str:
    return "\n".join(["## Commands", "", "```", *commands, "```"])
