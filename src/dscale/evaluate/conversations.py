"""The three ways of placing anchors in the same greedy answers, and what each block makes of the text there.

    uniform       every position from the last prompt token on that has answer tokens after it, each once
    re-anchored   the positions a server would stop at: the last prompt token, then accepted + 1 further each time
    served        the blocks that the engine really made (policy `full`), from its step records

Uniform and re-anchored are taken from one teacher-forced pass over all positions. A block whose anchor has r answer
tokens after it is valid at min(D, r) depths, whichever way it came about; the last step of an answer accepts
min(prefix, r) drafts and emits min(prefix + 1, r) tokens, as the engine does at the end token or the cap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dscale.config import require
from dscale.evaluate.acceptance_curves import Counts, count_blocks, prefixes
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.train.anchors import Anchors, block_labels, valid_anchors
from dscale.train.forward import BlockForward
from dscale.train.rows import PackedRows, answers
from dscale.train.walk import top_drafts

WAYS = ("uniform", "re-anchored", "served")


@dataclass(frozen=True)
class Answered:
    """One greedy conversation: prompt and answer token ids, and for every step of the engine the drafts accepted.

    steps None: it was not served (it comes from a corpus).
    """

    prompt: list[int]
    answer: list[int]
    steps: list[int] | None
    number: int = 0  # of its prompt in the file
    reason: str = ""  # why it ended


@dataclass(frozen=True)
class Conversation:
    """What the blocks of one answer of n tokens match: match bool [n, D], block i anchored i tokens into the answer.

    Block 0 is anchored at the last prompt token. served: accepted drafts of the engine's steps, None if not served.
    """

    match: np.ndarray
    served: np.ndarray | None

    @property
    def tokens(self) -> int:
        """Answer tokens."""
        return len(self.match)

    @property
    def valid(self) -> np.ndarray:
        """bool [n, D]: answer tokens that each block has to guess."""
        left = self.tokens - np.arange(self.tokens)
        return np.arange(self.match.shape[1]) < left[:, None]

    @property
    def accepted(self) -> np.ndarray:
        """int64 [n]: drafts accepted at every position."""
        return prefixes(self.match, self.valid)

    def walk(self) -> np.ndarray:
        """Positions of the re-anchored walk, int64 [steps]."""
        accepted, at, visited = self.accepted, 0, []
        while at < self.tokens:
            visited.append(at)
            at += int(accepted[at]) + 1
        return np.array(visited, np.int64)

    def served_anchors(self) -> np.ndarray:
        """Positions that the engine drafted at, int64 [steps]."""
        assert self.served is not None
        moved = np.concatenate([[0], np.cumsum(self.served + 1)])
        return moved[:-1].astype(np.int64)

    def differing(self) -> np.ndarray:
        """bool [steps]: steps of the engine in which the teacher-forced pass accepts another number of drafts."""
        assert self.served is not None
        return self.accepted[self.served_anchors()] != self.served


def count_ways(conversations: list[Conversation], depth: int) -> dict[str, Counts]:
    """Counts [C, D] of every way, a cluster per conversation. Served blocks have no matches beyond the first miss."""
    every, walked, served = [], [], []
    for one in conversations:
        valid, visited = one.valid, one.walk()
        every.append((one.match, valid))
        walked.append((one.match[visited], valid[visited]))
        if one.served is not None:
            at = one.served_anchors()
            served.append((np.arange(depth) < one.served[:, None], valid[at]))
    ways = {"uniform": every, "re-anchored": walked}
    if len(served) == len(conversations):
        ways["served"] = served
    return {name: _count(blocks, depth) for name, blocks in ways.items()}


def _count(blocks: list[tuple[np.ndarray, np.ndarray]], depth: int) -> Counts:
    owner = np.repeat(np.arange(len(blocks)), [len(match) for match, _ in blocks])
    none = np.zeros((0, depth), bool)
    match = np.concatenate([none, *(match for match, _ in blocks)])
    valid = np.concatenate([none, *(valid for _, valid in blocks)])
    return count_blocks(match, valid, owner, len(blocks))


def check_offline(target: Target, drafter: Drafter, length: int) -> None:
    """InputError when the teacher-forced pass does not attend as the engine does: it knows full attention only."""
    for name, decoder in (("target", target.config.decoder), ("drafter", drafter.config.decoder)):
        for layer in range(decoder.num_layers):
            window = decoder.window(layer)
            require(
                window is None or window >= length,
                f"{name}: layer {layer} attends over a window of {window} tokens, conversations have up to {length}; "
                "offline evaluation knows full attention only (give --max-tokens so that they fit the window)",
            )
    causal = drafter.config.causal or any(drafter.config.decoder.causal_layers or ())
    require(not causal, "drafter: its blocks attend causally; offline evaluation knows bidirectional blocks only")


def one_per_row(talks: list[Answered], length: int) -> PackedRows:
    """Conversations as rows of `length` tokens, one each; padding positions stand alone."""
    ids = np.zeros((len(talks), length), np.int32)
    first = np.tile(np.arange(length, dtype=np.int32), (len(talks), 1))
    answer = np.zeros((len(talks), length), bool)
    for row, talk in enumerate(talks):
        start, end = len(talk.prompt), len(talk.prompt) + len(talk.answer)
        ids[row, :end] = talk.prompt + talk.answer
        first[row, :end] = 0
        answer[row, start:end] = True
    return PackedRows.plain(ids, first, answer)


@torch.no_grad()
def match_rows(forward: BlockForward, rows: PackedRows) -> list[np.ndarray]:
    """For every answer of packed rows, in order: bool [n, D], which drafts of a block at each position equal the text.

    Drafts beyond the end of the answer count as no match. Rows go `forward.config.rows` at a time, their anchors
    `forward.config.anchors` at a time.
    """
    step, found = forward.config.rows, []
    for start in range(0, len(rows), step):
        real = min(step, len(rows) - start)
        picked = np.minimum(np.arange(start, start + step), len(rows) - 1)
        ids, first, answer = (
            torch.from_numpy(part[picked]).to(forward.device) for part in (rows.ids, rows.first, rows.answer)
        )
        table = _match_table(forward, ids, first, answer)
        for row in range(real):
            found += [table[row, a - 1 : b - 1] for a, b in answers(rows.answer[start + row])]
    return found


def _match_table(forward: BlockForward, ids: torch.Tensor, first: torch.Tensor, answer: torch.Tensor) -> np.ndarray:
    """bool [R, L, D] for the rows of one pass; all False where no block can be anchored."""
    taps = forward.taps(ids, first)
    where = valid_anchors(answer, first).cpu().numpy()
    positions = [np.flatnonzero(row) for row in where]
    out = np.zeros((*where.shape, forward.width - 1), bool)
    count = forward.config.anchors
    for left in range(0, max(map(len, positions)), count):
        chosen = np.zeros((len(positions), count), np.int64)
        live = np.zeros((len(positions), count), bool)
        for row, at in enumerate(positions):
            part = at[left : left + count]
            chosen[row, : len(part)], live[row, : len(part)] = part, True
            chosen[row, len(part) :] = part[-1] if len(part) else 0  # ascending, as the masks want it
        same = _match(forward, ids, first, answer, taps, chosen, live)
        for row in range(len(positions)):
            out[row, chosen[row, live[row]]] = same[row, live[row]]
    return out


def _match(
    forward: BlockForward, ids: torch.Tensor, first: torch.Tensor, answer: torch.Tensor, taps: torch.Tensor,
    chosen: np.ndarray, live: np.ndarray,
) -> np.ndarray:  # fmt: skip
    position = torch.from_numpy(chosen).to(forward.device)
    anchors = Anchors(position, first.gather(1, position).long(), torch.from_numpy(live).to(forward.device))
    labels = block_labels(ids, answer, first, anchors, forward.width)
    drafts = top_drafts(forward, forward.hidden(ids, first, anchors, taps))
    return ((drafts == labels.token) & labels.supervised).cpu().numpy()
