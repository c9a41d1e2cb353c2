"""What the host decides before a step: which lanes run and how large the step is. No device value is read for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dscale.speculation.transfer import place


@dataclass(frozen=True)
class StepShape:
    """Size of a step, known before it starts.

    width: rows of a full block, anchor included (1: nothing is drafted). head: draft positions whose logits are wanted,
    at most width - 1. rows: M, verification rows in all. share: rows a lane that M was made from. spare: fewer lanes
    than M has rows for may be live, and how many is known on the device alone (captured steps). scored: drafts get
    their survival q where the policy has a scorer; where all rows are verified nothing depends on it.
    """

    width: int
    head: int
    rows: int
    share: float = 0.0
    spare: bool = False
    scored: bool = True

    def over(self, lanes: int) -> StepShape:
        """The same block and share for `lanes` captured lanes, M_bs rows, whatever number of them will be live."""
        rows = min(max(round(self.share * lanes), lanes), lanes * self.width)
        return replace(self, rows=rows, spare=True)

    def budget(self, live: Tensor) -> Tensor | int:
        """Rows to share out among live [N]: M, or with spare lanes M_live = share · Σ live, int64 on the device."""
        if not self.spare:
            return self.rows
        if float(self.share).is_integer():
            return live.sum() * int(self.share)
        return (live.sum() * self.share).round().long()


@dataclass
class Workspace:
    """Inputs of one step of a request bucket.

    lanes int64 [N] maps lanes to state rows; live bool [N]. max_context bounds, on the host, a lane's committed length
    plus its block. logprobs: alternatives wanted per token, None when nobody asks. edited: lanes with logit edits.
    late: results of an earlier step may not have been read yet, so a lane may have ended without the host's knowing.
    arrivals: of RaggedBatch. compared: of several ranks, all draw the same tokens (edits are known to the first alone).
    """

    lanes: Tensor
    live: Tensor
    max_context: int
    all_greedy: bool = True
    logprobs: int | None = None
    edited: tuple[int, ...] = ()
    late: bool = False
    arrivals: Tensor | None = None
    compared: bool = True

    @property
    def count(self) -> int:
        """N, lanes of this step."""
        return self.lanes.shape[0]

    @classmethod
    def of(cls, rows: Sequence[int], max_context: int, device: torch.device | str = "cpu") -> Workspace:
        """A workspace in which every lane is live."""
        lanes = place(rows, torch.int64, device)
        return cls(lanes, torch.ones(len(rows), dtype=torch.bool, device=device), max_context)

    @classmethod
    def fixed(
        cls, lanes: int, scratch_row: int, max_context: int, arrivals: Tensor | None, device: torch.device | str
    ) -> Workspace:
        """Memory for the largest captured bucket, every lane on the scratch row and not live; `load` fills it."""
        rows = torch.full((lanes,), scratch_row, dtype=torch.int64, device=device)
        live = torch.zeros(lanes, dtype=torch.bool, device=device)
        return cls(rows, live, max_context, late=True, arrivals=arrivals)

    def view(self, lanes: int, all_greedy: bool) -> Workspace:
        """The same memory seen by a bucket of the first `lanes` lanes."""
        return replace(self, lanes=self.lanes[:lanes], live=self.live[:lanes], all_greedy=all_greedy)

    def load(self, rows: Sequence[int], scratch_row: int) -> None:
        """Put state rows on the first lanes, in place and in stream order; lanes behind them get the scratch row."""
        padded = [*rows, *[scratch_row] * (self.count - len(rows))]
        self.lanes.copy_(place(padded, torch.int64, self.lanes.device))
        torch.ne(self.lanes, scratch_row, out=self.live)

    def running(self, remaining: Tensor) -> Tensor:
        """Lanes in use, bool [N]: those live, less those that ended in a step not read yet. remaining [state rows]."""
        return self.live & (remaining[self.lanes] > 0) if self.late else self.live
