"""Traces by the re-anchored walk over packed greedy answers: what a greedy server would have seen, without serving.

All conversations of a batch of rows walk side by side. One pass drafts at every conversation's anchor, the drafts are
compared with the answer that the target gave, and each anchor moves by accepted + 1, to the end of its answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dscale.kernels.top_logits import top_logits
from dscale.models.decoder import Target
from dscale.speculation.features import FeatureReader
from dscale.train.anchors import Anchors, block_labels
from dscale.train.forward import BlockForward
from dscale.train.rows import PackedRows, answers
from dscale.train.traces import DTYPES, Traces, join_traces

HEAD_ROWS = 2048  # rows of logits at once


class Talk(NamedTuple):
    """One conversation of a packed row: its answer is start … end - 1 of the row; number: its place among all."""

    start: int
    end: int
    number: int
    prompt: int


def talks_of(rows: PackedRows, wanted: np.ndarray) -> list[list[Talk]]:
    """Wanted conversations (bool [C]) of every packed row, numbered from 0 in order."""
    found: list[list[Talk]] = []
    conversation, number = 0, 0
    for row in range(len(rows)):
        talks = []
        for start, end in answers(rows.answer[row]):
            if wanted[conversation]:
                talks.append(Talk(start, end, number, int(rows.prompt[conversation])))
                number += 1
            conversation += 1
        found.append(talks)
    return found


@torch.no_grad()
def collect(
    forward: BlockForward, rows: PackedRows, reader: FeatureReader, lanes: int = 8, wanted: np.ndarray | None = None
) -> Traces:
    """Traces of packed rows as long as the pass's, in order of conversation, then position.

    lanes: live requests written into the batch context, for the walk has none. wanted bool [C]: conversations to walk,
    default all; those that were sampled are left out anyway, for only of greedy ones is the walk what a server does.
    Their requests are numbered from 0; the only workload is "corpus".
    """
    talks = talks_of(rows, rows.greedy if wanted is None else wanted & rows.greedy)
    step, device = forward.config.rows, forward.device
    compiled = device.type == "cuda"  # for passes of one size
    parts = [Traces.empty(reader.groups, forward.width, ("corpus",))]
    for start in range(0, len(rows), step):
        picked = np.arange(start, start + step if compiled else min(start + step, len(rows))).clip(max=len(rows) - 1)
        members = [talks[row] if start + place < len(rows) else [] for place, row in enumerate(picked)]
        if not any(members):
            continue
        ids, first, answer = (torch.from_numpy(part[picked]).to(device) for part in (rows.ids, rows.first, rows.answer))
        batch = Batch(ids, first, answer, forward.taps(ids, first))
        most = max(map(len, members))
        count = forward.config.anchors if compiled else min(most, forward.config.anchors)
        for left in range(0, most, count):
            parts += walk_batch(forward, batch, [row[left : left + count] for row in members], count, reader, lanes)
    traces = join_traces(parts)
    return traces.select(np.lexsort((traces.position, traces.request)))


class Batch(NamedTuple):
    """Packed rows on the device: ids, first, answer [R, L] and the target's taps [R·L, T·H] of them."""

    ids: Tensor
    first: Tensor
    answer: Tensor
    taps: Tensor


def walk_batch(
    forward: BlockForward, batch: Batch, members: list[list[Talk]], count: int, reader: FeatureReader, lanes: int
) -> Iterator[Traces]:
    """Walk at most `count` conversations of every row; one piece of traces for each pass."""
    rows, last = len(members), forward.config.length - 1
    at, stop = np.full((rows, count), last, np.int64), np.zeros((rows, count), np.int64)
    table = np.array([(t.start, t.end, t.number, t.prompt) for row in members for t in row], np.int64)
    live = np.array([[place < len(row) for place in range(count)] for row in members])
    at[live], stop[live] = table[:, 0] - 1, table[:, 1] - 1
    about = np.zeros((rows, count, 3), np.int64)
    about[live] = table[:, [0, 2, 3]]
    while live.any():
        start, number, prompt = about[live].T
        position = at[live] + 1 - start
        features, drafts, accepted, known = _draft(forward, batch, at, live, position == 0, reader, lanes)
        full = (accepted < known) | (known == forward.width - 1)
        made = {
            "features": features,
            "drafts": drafts,
            "accepted": accepted,
            "slots": np.where(full, forward.width, known + 1),  # all that was left was accepted: at least that many
            "request": number,
            "prompt": prompt,
            "position": position,
            "workload": np.zeros(len(number)),
        }
        arrays = {name: made[name].astype(dtype) for name, dtype in DTYPES.items()}
        yield Traces(**arrays, groups=reader.groups, width=forward.width, workloads=("corpus",))
        at[live] = np.minimum(at[live] + accepted + 1, stop[live])
        live = live & (at < stop)


def _draft(
    forward: BlockForward, batch: Batch, at: np.ndarray, live: np.ndarray, initial: np.ndarray, reader: FeatureReader,
    lanes: int,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Features [n, F], drafts [n, D], accepted [n] and labels known [n] at the live anchors of at [R, A]."""
    device = forward.device
    position, alive = torch.from_numpy(at).to(device), torch.from_numpy(live).to(device)
    anchors = Anchors(position, batch.first.gather(1, position).long(), alive)
    labels = block_labels(batch.ids, batch.answer, batch.first, anchors, forward.width)
    hidden = forward.hidden(batch.ids, batch.first, anchors, batch.taps)[alive]
    flags, size = torch.from_numpy(initial).to(device), max(1, HEAD_ROWS // hidden.shape[1])
    pieces = zip(hidden.split(size), flags.split(size), strict=True)
    read = [read_blocks(forward.target, blocks, first, reader, lanes) for blocks, first in pieces]
    features, drafts = (torch.cat(column) for column in zip(*read, strict=True))
    supervised = labels.supervised[alive]
    same = (drafts == labels.token[alive]) & supervised
    made = (features, drafts, same.int().cumprod(-1).sum(-1), supervised.sum(-1))
    return tuple(one.cpu().numpy() for one in made)


def read_blocks(
    target: Target, hidden: Tensor, initial: Tensor, reader: FeatureReader, lanes: int
) -> tuple[Tensor, Tensor]:
    """Features float16 [n, F] and drafts int64 [n, D] of the drafter's hidden rows [n, D, H]."""
    rows = hidden.to(target.head.weight.dtype)
    top = top_logits(target.logits(rows.flatten(0, 1)).view(*hidden.shape[:2], -1))
    return reader.read(top, rows, lanes, initial), top.ids[..., 0]
