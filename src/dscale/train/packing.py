"""Conversations into rows of one length: best fit over a few open rows, in random order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dscale.train.generation import Conversations
from dscale.train.rows import PackedRows


def pack(
    talks: Conversations, chosen: np.ndarray, prompt: np.ndarray, length: int, seed: int = 0, bins: int = 64
) -> PackedRows:
    """The conversations numbered `chosen` in rows of `length` tokens; prompt int64 [N]: the prompt's id of each."""
    order = np.random.default_rng(seed).permutation(chosen)
    ends = talks.end
    room = np.full(bins, length, np.int64)
    open_rows: list[list[int]] = [[] for _ in range(bins)]
    filled: list[list[int]] = []
    for one in order.tolist():
        need = int(ends[one])
        left = np.where(room >= need, room, length + 1)
        at = int(left.argmin())
        if left[at] > length:
            at = int(room.argmin())
            filled.append(open_rows[at])
            open_rows[at], room[at] = [], length
        open_rows[at].append(one)
        room[at] -= need
    filled += [row for row in open_rows if row]
    return _lay_out(talks, filled, prompt, length)


def in_pieces(rows: PackedRows, size: int) -> Iterator[PackedRows]:
    """Packed rows, `size` at a time, in order."""
    starts = np.diff(rows.answer.view(np.int8), axis=1, prepend=0) == 1
    bounds = np.concatenate([[0], np.cumsum(starts.sum(1))])
    for first in range(0, len(rows), size):
        some = slice(first, min(first + size, len(rows)))
        held = slice(int(bounds[some.start]), int(bounds[some.stop]))
        yield PackedRows(rows.ids[some], rows.first[some], rows.answer[some], rows.prompt[held], rows.greedy[held])


def _lay_out(talks: Conversations, filled: list[list[int]], prompt: np.ndarray, length: int) -> PackedRows:
    ids = np.zeros((len(filled), length), np.int32)
    first = np.tile(np.arange(length, dtype=np.int32), (len(filled), 1))
    answer = np.zeros((len(filled), length), bool)
    for row, members in enumerate(filled):
        at = 0
        for member in members:
            begin, stop = int(talks.bounds[member]), int(talks.bounds[member + 1])
            end = at + stop - begin
            ids[row, at:end] = talks.tokens[begin:stop]
            first[row, at:end] = at
            answer[row, at + int(talks.start[member]) : end] = True
            at = end
    order = np.array([member for members in filled for member in members], np.int64)
    return PackedRows(ids, first, answer, prompt[order], talks.temperature[order] == 0)
