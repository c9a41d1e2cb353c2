"""How far a drafter gets: drafts at every position of greedy answers, then the re-anchored walk a server would make.

accepted(p)   leading slots of the block anchored at p that equal the answer
walk          p = last prompt token; one step emits accepted(p) + 1 tokens and moves p there; to the end of the answer
progress      answer tokens / steps
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dscale.train.anchors import Anchors, valid_anchors
from dscale.train.corpus import PackedRows
from dscale.train.drafter import DrafterTrainer


class Walked(NamedTuple):
    """Answer tokens and steps of one conversation."""

    tokens: int
    steps: int


def accepted_everywhere(trainer: DrafterTrainer, rows: PackedRows) -> np.ndarray:
    """int8 [R, L]: accepted drafts at every valid anchor of packed rows as long as the trainer's, -1 elsewhere.

    Uses the training forward pass, compiled or not, with anchors side by side, `anchors` of a row at a time.
    """
    out = np.full(rows.ids.shape, -1, np.int8)
    count, step = trainer.config.anchors, trainer.config.rows
    for start in range(0, len(out), step):
        real = min(step, len(out) - start)
        picked = np.minimum(np.arange(start, start + step), len(out) - 1)
        device = trainer.ids.device
        ids, first, answer = (torch.from_numpy(part[picked]).to(device) for part in (rows.ids, rows.first, rows.answer))
        for left in range(0, trainer.length, count):
            accepted = _accepted_at(trainer, ids, first, answer, left)[:real, : trainer.length - left]
            out[start : start + real, left : left + count] = accepted.to(torch.int8).cpu().numpy()
    return out


def _accepted_at(trainer: DrafterTrainer, ids: Tensor, first: Tensor, answer: Tensor, left: int) -> Tensor:
    """Accepted drafts [R, A] of the anchors left … left + A - 1, -1 where that is no valid anchor."""
    config, head = trainer.config, trainer.target.head.weight
    position = torch.arange(left, left + config.anchors, device=ids.device).clamp(max=trainer.length - 1)
    position = position.expand(len(ids), -1).contiguous()
    live = valid_anchors(answer, first).gather(1, position)
    hidden, token, supervised = trainer.forward(
        ids, first, answer, Anchors(position, first.gather(1, position).long(), live)
    )
    flat = hidden.detach().flatten(0, 2).to(head.dtype)
    drafts = torch.cat([(part @ head.t()).argmax(-1) for part in flat.chunk(config.chunks)]).view(token.shape)
    same = (drafts == token) & supervised
    return torch.where(live, same.int().cumprod(-1).sum(-1), -1)


def walk(accepted: np.ndarray, start: int, end: int) -> Walked:
    """accepted [L] at every position of the row; the answer is start … end - 1."""
    at, steps = start - 1, 0
    while at < end - 1:
        at += int(accepted[at]) + 1
        steps += 1
    return Walked(end - start, steps)


def answers(supervised: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of every answer in one packed row [L]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], supervised.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def walk_rows(accepted: np.ndarray, answer: np.ndarray) -> list[Walked]:
    """Every conversation of packed rows [R, L]."""
    return [walk(accepted[row], *edges) for row in range(len(accepted)) for edges in answers(answer[row])]


def mean_progress(walked: list[Walked]) -> float:
    """Tokens a step over all conversations, token-weighted."""
    return sum(w.tokens for w in walked) / max(1, sum(w.steps for w in walked))
