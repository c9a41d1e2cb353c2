"""Answers and matches on disk: ragged lists as one flat array and their lengths; match rows as bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dscale.evaluate.conversations import Answered, Conversation
from dscale.train.artifacts import Shard, Stage, read_shard, write_shard

REASONS = ("", "stop", "length")


def write_answers(folder: Path, name: str, talks: list[Answered], part: str) -> Shard:
    """One shard of served conversations."""
    tensors: dict[str, np.ndarray] = {}
    for key, lists in (
        ("prompt", [talk.prompt for talk in talks]),
        ("answer", [talk.answer for talk in talks]),
        ("steps", [talk.steps or [] for talk in talks]),
    ):
        tensors[key] = np.array([one for row in lists for one in row], np.int32)
        tensors[f"{key}_length"] = np.array([len(row) for row in lists], np.int32)
    tensors["number"] = np.array([talk.number for talk in talks], np.int32)
    tensors["reason"] = np.array([REASONS.index(talk.reason) for talk in talks], np.int32)
    counts = {key: len(tensors[key]) for key in ("answer", "steps")} | {"conversations": len(talks)}
    return write_shard(folder, name, tensors, f"answers {part}", counts)


def read_answers(folder: Path, shard: Shard) -> list[Answered]:
    """What write_answers wrote."""
    data = read_shard(folder, shard)
    prompt, answer, steps = (_ragged(data[key], data[f"{key}_length"]) for key in ("prompt", "answer", "steps"))
    reasons = [REASONS[one] for one in data["reason"]]
    return [
        Answered(a.tolist(), b.tolist(), c.tolist(), int(number), reason)
        for a, b, c, number, reason in zip(prompt, answer, steps, data["number"], reasons, strict=True)
    ]


def write_matches(folder: Path, name: str, matches: list[np.ndarray], depth: int, part: str) -> Shard:
    """One shard of match rows, bool [n, depth] per conversation."""
    rows = np.concatenate([np.zeros((0, depth), bool), *matches])
    tensors: dict[str, np.ndarray] = {
        "bits": np.packbits(rows, axis=1),
        "length": np.array([len(match) for match in matches], np.int32),
        "depth": np.array([depth], np.int32),
    }
    counts = {"blocks": len(rows), "conversations": len(matches)}
    return write_shard(folder, name, tensors, f"matches {part}", counts)


def read_matches(folder: Path, shard: Shard) -> list[np.ndarray]:
    """What write_matches wrote."""
    data = read_shard(folder, shard)
    rows = np.unpackbits(data["bits"], axis=1, count=int(data["depth"][0])).astype(bool)
    return _ragged(rows, data["length"])


def read_workload(stage: Stage, part: str) -> tuple[list[Answered], list[Conversation]]:
    """Everything of one workload: what was served (empty for a corpus), and the conversations with their matches."""
    talks = [talk for shard in stage.of(f"answers {part}") for talk in read_answers(stage.folder, shard)]
    matches = [match for shard in stage.of(f"matches {part}") for match in read_matches(stage.folder, shard)]
    if not talks:
        return [], [Conversation(match, None) for match in matches]
    served = [np.array(talk.steps, np.int64) for talk in talks]
    return talks, [Conversation(match, steps) for match, steps in zip(matches, served, strict=True)]


def _ragged(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
