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

from dscale.train.anchors import Anchors, block_labels, valid_anchors
from dscale.train.forward import BlockForward
from dscale.train.rows import PackedRows, answers


class Walked(NamedTuple):
    """Answer tokens and steps of one conversation."""

    tokens: int
    steps: int


@torch.no_grad()
def accepted_everywhere(forward: BlockForward, rows: PackedRows) -> np.ndarray:
    """int16 [R, L]: accepted drafts at every valid anchor of packed rows as long as the pass's, -1 elsewhere.

    Anchors go side by side, as many of a row at a time as the pass takes.
    """
    out = np.full(rows.ids.shape, -1, np.int16)
    count, step, length = forward.config.anchors, forward.config.rows, forward.config.length
    for start in range(0, len(out), step):
        real = min(step, len(out) - start)
        picked = np.minimum(np.arange(start, start + step), len(out) - 1)
        batch = (torch.from_numpy(part[picked]).to(forward.device) for part in (rows.ids, rows.first, rows.answer))
        ids, first, answer = batch
        taps = forward.taps(ids, first)
        for left in range(0, length, count):
            accepted = _accepted_at(forward, ids, first, answer, taps, left)[:real, : length - left]
            out[start : start + real, left : left + count] = accepted.to(torch.int16).cpu().numpy()
    return out


def _accepted_at(forward: BlockForward, ids: Tensor, first: Tensor, answer: Tensor, taps: Tensor, left: int) -> Tensor:
    """Accepted drafts [R, A] of the anchors left … left + A - 1, -1 where that is no valid anchor."""
    last = forward.config.length - 1
    position = torch.arange(left, left + forward.config.anchors, device=ids.device).clamp(max=last)
    position = position.expand(len(ids), -1).contiguous()
    live = valid_anchors(answer, first).gather(1, position)
    anchors = Anchors(position, first.gather(1, position).long(), live)
    labels = block_labels(ids, answer, first, anchors, forward.width)
    drafts = top_drafts(forward, forward.hidden(ids, first, anchors, taps))
    same = (drafts == labels.token) & labels.supervised
    return torch.where(live, same.int().cumprod(-1).sum(-1), -1)


def top_drafts(forward: BlockForward, hidden: Tensor, chunk: int = 16384) -> Tensor:
    """The head's best token at every hidden row: [..., H] → int64 [...], the vocabulary `chunk` rows at a time."""
    head = forward.target.head.weight
    flat = hidden.flatten(0, -2).to(head.dtype)
    return torch.cat([(part @ head.t()).argmax(-1) for part in flat.split(chunk)]).view(hidden.shape[:-1])


def walk(accepted: np.ndarray, start: int, end: int) -> Walked:
    """accepted [L] at every position of the row; the answer is start … end - 1."""
    at, steps = start - 1, 0
    while at < end - 1:
        at += int(accepted[at]) + 1
        steps += 1
    return Walked(end - start, steps)


def walk_rows(accepted: np.ndarray, answer: np.ndarray) -> list[Walked]:
    """Every conversation of packed rows [R, L]."""
    return [walk(accepted[row], *edges) for row in range(len(accepted)) for edges in answers(answer[row])]


def mean_progress(walked: list[Walked]) -> float:
    """Tokens a step over all conversations, token-weighted."""
    return sum(w.tokens for w in walked) / max(1, sum(w.steps for w in walked))
