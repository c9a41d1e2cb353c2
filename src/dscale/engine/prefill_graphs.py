"""Prefill captured as CUDA graphs, one a capacity of rows: hundreds of small launches become one.

A graph reads its rows from fixed memory: token ids, positions and page-table rows, and up to LANES pieces by starts and
contexts. Rows past the pieces are sentinels on the scratch row, whose page is the scratch page; lanes without a piece
own no rows. Nothing is drawn in a prefill, so the same graph serves every request and policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dscale.config import PAGE_SIZE
from dscale.engine.graphs import CaptureBackend, GraphCounters
from dscale.kernels.attention import RaggedBatch
from dscale.speculation.decode_step import prefill
from dscale.speculation.state import DeviceState, Models
from dscale.speculation.transfer import place_tensor

Piece = tuple[int, int, int]  # of a prefill: row of the state, position of its first token, tokens
LANES = 8  # pieces of one replay
LEAST = 64  # rows of the smallest graph


def capacities(most: int) -> list[int]:
    """Captured numbers of rows: powers of two from LEAST and, from 256 on, their halves between, up to `most`."""
    sizes = [LEAST << power for power in range(24)]
    sizes = sorted(sizes + [size * 3 // 2 for size in sizes if size >= 256])
    return [size for size in sizes if size < most] + [most]


@dataclass
class PrefillInput:
    """Fixed memory of one capacity: rows [3, R] int64 are ids, positions, page-table rows; lanes [LANES], starts
    [LANES + 1], contexts [LANES] int64 describe the pieces."""

    rows: Tensor
    lanes: Tensor
    starts: Tensor
    contexts: Tensor
    everything: Tensor

    @classmethod
    def of(cls, capacity: int, device: torch.device) -> PrefillInput:
        """All of it lies in one tensor, which one copy fills."""
        everything = torch.zeros(3 * capacity + 3 * LANES + 1, dtype=torch.int64, device=device)
        return cls(*_parts(everything, capacity), everything)

    def load(self, ids: Sequence[int], pieces: Sequence[Piece], scratch: int) -> None:
        """Describe these pieces with the token ids of all of them, in stream order."""
        host = torch.zeros(self.everything.shape, dtype=torch.int64)
        # numpy writes a few numbers several times faster
        rows, lanes, starts, contexts = (part.numpy() for part in _parts(host, self.rows.shape[1]))
        rows[2] = lanes[:] = scratch
        rows[0, : len(ids)] = ids
        end = 0
        for index, (row, start, length) in enumerate(pieces):
            first, end = end, end + length
            rows[1, first:end] = np.arange(start, start + length)
            rows[2, first:end] = row
            lanes[index], contexts[index] = row, start
            starts[index + 1 :] = end
        place_tensor(host, self.everything)

    def batch(self, state: DeviceState, models: Models, max_context: int) -> RaggedBatch:
        """What the kernels read; slots are computed on the device."""
        positions = self.rows[1]
        return RaggedBatch(
            positions=positions,
            slots=state.slots(self.rows[2], positions),
            page_table=state.page_table,
            lanes=self.lanes,
            starts=self.starts,
            contexts=self.contexts,
            max_rows=self.rows.shape[1],
            max_context=max_context,
            path="prefill",
            options=models.attention,
        )


Captured = tuple[PrefillInput, Tensor, Callable[[], None]]  # with its hidden rows and its replay


@dataclass
class PrefillRunner:
    """Replays the prefill that fits, capturing it first where it was never needed before. most: rows of a replay."""

    state: DeviceState
    models: Models
    most: int
    backend: CaptureBackend
    counters: GraphCounters = field(default_factory=GraphCounters)

    def __post_init__(self) -> None:
        self.sizes = capacities(self.most)
        self._captured: dict[tuple[int, bool], Captured] = {}

    @torch.inference_mode()
    def run(self, ids: Sequence[int], pieces: Sequence[Piece], scored: bool = False) -> list[Tensor]:
        """Hidden rows [length, H] of each piece where scored, valid until the next run; else nothing. Pieces hold at
        most `most` rows together."""
        hidden: list[Tensor] = []
        done = 0
        for first in range(0, len(pieces), LANES):
            some = pieces[first : first + LANES]
            lengths = [length for _, _, length in some]
            total = sum(lengths)
            given, rows, replay = self._find(next(size for size in self.sizes if size >= total), scored)
            given.load(ids[done : done + total], some, self.state.scratch_row)
            done += total
            replay()
            if not scored:
                continue
            parts = rows[:total].split(lengths)
            hidden += parts if len(pieces) <= LANES else [part.clone() for part in parts]
        return hidden

    def prepare(self) -> GraphCounters:
        """Capture every capacity, the largest first; those with hidden rows when they are first needed."""
        self._capture((size, False) for size in reversed(self.sizes))
        logging.getLogger("dscale").info("prefill: %s", self.counters)
        return self.counters

    def _find(self, capacity: int, scored: bool) -> Captured:
        if (capacity, scored) not in self._captured:
            self._capture([(capacity, scored)])
        return self._captured[capacity, scored]

    @torch.inference_mode()
    def _capture(self, keys: Iterable[tuple[int, bool]]) -> None:
        missing = [key for key in keys if key not in self._captured]
        if not missing:
            return
        with self.counters.counting(self.backend, len(missing)):
            for capacity, scored in missing:
                self._captured[capacity, scored] = self._capture_one(capacity, scored)

    def _capture_one(self, capacity: int, scored: bool) -> Captured:
        given = PrefillInput.of(capacity, self.state.length.device)
        given.load([], [], self.state.scratch_row)
        longest = self.state.page_table.shape[1] * PAGE_SIZE

        def run() -> Tensor:
            batch = given.batch(self.state, self.models, longest)
            return prefill(self.state, self.models, given.rows[0], batch, scored)

        return given, *self.backend.capture(run)


def _parts(everything: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, lanes, starts, contexts = everything.split([3 * capacity, LANES, LANES + 1, LANES])
    return rows.view(3, capacity), lanes, starts, contexts
