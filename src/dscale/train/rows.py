"""Conversations packed into rows of one length: what training and offline evaluation read.

A packed row holds several conversations side by side; `first` says where the conversation of a position begins, so that
attention stays inside it and its positions count from 0. On disk: the shards of a corpus folder (artifacts.Stage of
schema CORPUS), parts "train", "validation" and "holdout"; no prompt is in two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from dscale.config import require
from dscale.train.artifacts import Shard, Stage, read_shard, write_shard

CORPUS = "dscale.corpus/1"
PARTS = ("train", "validation", "holdout")


@dataclass(frozen=True)
class PackedRows:
    """ids int32, first int32, answer bool, all [R, L]; prompt int64, greedy bool, both [C].

    C conversations in order of row, then position. prompt: the id of a conversation's prompt; greedy: it was answered
    at temperature 0. Padding positions are conversations of one token, not supervised; they are not counted in C.
    """

    ids: np.ndarray
    first: np.ndarray
    answer: np.ndarray
    prompt: np.ndarray
    greedy: np.ndarray

    @classmethod
    def plain(cls, ids: np.ndarray, first: np.ndarray, answer: np.ndarray) -> PackedRows:
        """Rows whose conversations are numbered in order and all greedy."""
        count = int(conversation_counts(answer).sum())
        return cls(ids, first, answer, np.arange(count, dtype=np.int64), np.ones(count, bool))

    def __len__(self) -> int:
        return len(self.ids)


def conversation_counts(answer: np.ndarray) -> np.ndarray:
    """Conversations of every packed row: answer bool [R, L] → [R]."""
    return (np.diff(answer.astype(np.int8), axis=1, prepend=0) == 1).sum(1)


def conversation_bounds(answer: np.ndarray) -> np.ndarray:
    """Row r holds the conversations bounds[r] … bounds[r + 1] - 1: [R + 1]."""
    return np.concatenate([[0], np.cumsum(conversation_counts(answer))])


def answers(supervised: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of every answer in one packed row [L]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], supervised.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def write_rows(folder: Path, name: str, rows: PackedRows, part: str) -> Shard:
    """One shard of a corpus."""
    stored: dict[str, np.ndarray] = {
        "ids": rows.ids.astype(np.int32),
        "first": rows.first.astype(np.int32),
        "answer": np.packbits(rows.answer, axis=1),
        "prompt": rows.prompt.astype(np.int64),
        "greedy": rows.greedy.astype(np.uint8),
    }
    counts = {"rows": len(rows), "conversations": len(rows.prompt), "answer_tokens": int(rows.answer.sum())}
    return write_shard(folder, name, stored, part, counts)


def read_rows(folder: Path, shard: Shard) -> PackedRows:
    """What write_rows wrote."""
    data = read_shard(folder, shard)
    answer = np.unpackbits(data["answer"], axis=1, count=data["ids"].shape[1]).astype(bool)
    return PackedRows(data["ids"], data["first"], answer, data["prompt"], data["greedy"].astype(bool))


def join_rows(parts: list[PackedRows]) -> PackedRows:
    """Rows of several shards, in order."""
    return PackedRows(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(PackedRows)))


def take_rows(rows: PackedRows, chosen: np.ndarray) -> PackedRows:
    """The packed rows numbered `chosen` [n], each conversation's prompt and greedy flag with them."""
    bounds = conversation_bounds(rows.answer)
    members = [np.arange(bounds[row], bounds[row + 1]) for row in chosen]
    at = np.concatenate([*members, np.zeros(0, np.int64)]).astype(np.int64)
    return PackedRows(rows.ids[chosen], rows.first[chosen], rows.answer[chosen], rows.prompt[at], rows.greedy[at])


def load_part(folder: Path, part: str, target_hashes: dict[str, str] | None = None) -> PackedRows:
    """One part of a finished corpus. target_hashes: the target that must have written it (drafter_checkpoint)."""
    require(part in PARTS, f"corpus part: {part!r}; allowed are {', '.join(PARTS)}")
    stage = Stage.load(folder, CORPUS, complete=True)
    made = stage.inputs.get("target_hashes")
    require(
        target_hashes is None or made == target_hashes,
        f"{folder}: the corpus was written by another target ({stage.inputs.get('target')}); its tensor hashes differ",
    )
    shards = stage.of(part)
    require(bool(shards), f"{folder}: the corpus has no {part} rows")
    return join_rows([read_rows(folder, shard) for shard in shards])
