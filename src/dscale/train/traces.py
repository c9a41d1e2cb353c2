"""Full-width verification traces for the acceptance predictor: what a greedy server would have seen at every step.

Each conversation is walked with re-anchoring (walk.py); at every anchor the walk stops at, the draft's features, the
accepted length, the prompt and the position are kept. Prompts must be ones that the drafter was not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dscale.config import require
from dscale.kernels.top_logits import top_logits
from dscale.speculation.features import GROUPS, FeatureProjections, draft_features
from dscale.train.anchors import Anchors
from dscale.train.forward import BlockForward
from dscale.train.rows import PackedRows, answers
from dscale.train.walk import accepted_everywhere

LANES = 8  # live requests written into the features; acceptance does not depend on it


@dataclass(frozen=True)
class Traces:
    """features float16 [N, F]; accepted int16, prompt int32, position int32 [N] (tokens of the answer before the "
    "step)."""

    features: np.ndarray
    accepted: np.ndarray
    prompt: np.ndarray
    position: np.ndarray

    def save(self, path: Path) -> None:
        """Write one .npz."""
        np.savez(path, **{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Traces:
        """Read what save wrote."""
        require(path.is_file(), f"{path}: no such trace file")
        with np.load(path) as data:
            return cls(**{f.name: data[f.name] for f in fields(cls)})

    def select(self, rows: np.ndarray) -> Traces:
        """The records of these rows."""
        return Traces(*(getattr(self, f.name)[rows] for f in fields(self)))


def walk_stops(accepted: np.ndarray, rows: PackedRows) -> list[list[tuple[int, int, int]]]:
    """Per packed row: (anchor, conversation, tokens of the answer before the step) of every step of the walk."""
    stops: list[list[tuple[int, int, int]]] = []
    number = 0
    for row in range(len(accepted)):
        found = []
        for start, end in answers(rows.answer[row]):
            at = start - 1
            while at < end - 1:
                found.append((at, number, at + 1 - start))
                at += int(accepted[row, at]) + 1
            number += 1
        stops.append(found)
    return stops


def collect(
    forward: BlockForward, rows: PackedRows, projections: FeatureProjections, groups: tuple[str, ...] = GROUPS
) -> Traces:
    """Walk packed rows of greedy answers and record every step; rows must be as long as the pass's."""
    accepted = accepted_everywhere(forward, rows)
    stops = walk_stops(accepted, rows)
    count, step = forward.config.anchors, forward.config.rows
    parts: list[Traces] = []
    for start in range(0, len(stops), step):
        picked = np.minimum(np.arange(start, start + step), len(stops) - 1)
        longest = max(len(stops[row]) for row in picked)
        for left in range(0, longest, count):
            chosen = [stops[row][left : left + count] if start + i < len(stops) else [] for i, row in enumerate(picked)]
            parts.append(_record(forward, rows, picked, chosen, accepted, projections, groups))
    return Traces(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Traces)))


def _record(
    forward: BlockForward, rows: PackedRows, picked: np.ndarray, chosen: list[list[tuple[int, int, int]]],
    accepted: np.ndarray, projections: FeatureProjections, groups: tuple[str, ...],
) -> Traces:  # fmt: skip
    device = forward.device
    ids, first, answer = (torch.from_numpy(part[picked]).to(device) for part in (rows.ids, rows.first, rows.answer))
    position = np.full((len(picked), forward.config.anchors), forward.config.length - 1, np.int64)
    for row, found in enumerate(chosen):
        position[row, : len(found)] = [stop[0] for stop in found]
    at = torch.from_numpy(position).to(device)
    live = torch.zeros(position.shape, dtype=torch.bool)
    for row, found in enumerate(chosen):
        live[row, : len(found)] = True
    hidden, _, _ = forward(ids, first, answer, Anchors(at, first.gather(1, at).long(), live.to(device)))
    kept = hidden.detach()[live.to(device)]
    flat = np.array([stop for found in chosen for stop in found], np.int64).reshape(-1, 3)
    depth = np.array([accepted[picked[row], stop[0]] for row, found in enumerate(chosen) for stop in found], np.int16)
    initial = torch.from_numpy(flat[:, 2] == 0).to(device)
    features = _features(forward.target.head.weight, kept, initial, projections, groups)
    return Traces(features, depth, flat[:, 1].astype(np.int32), flat[:, 2].astype(np.int32))


@torch.no_grad()
def _features(
    head: Tensor,
    hidden: Tensor,
    initial: Tensor,
    projections: FeatureProjections,
    groups: tuple[str, ...],
    chunk: int = 256,
) -> np.ndarray:
    """hidden [N, W-1, H] → features float16 [N, F], the vocabulary in chunks of blocks."""
    made = []
    for rows, flags in zip(hidden.split(chunk), initial.split(chunk), strict=True):
        top = top_logits(rows.to(head.dtype) @ head.t())
        made.append(draft_features(top, rows, LANES, flags, projections, groups).half().cpu().numpy())
    return np.concatenate(made) if made else np.zeros((0, 0), np.float16)
