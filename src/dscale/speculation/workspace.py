"""What the host decides before a step: which lanes run and how large the step is. No device value is read for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepShape:
    """Size of a step, known before it starts.

    width: rows of a full block, anchor included (1: nothing is drafted). head: draft positions whose logits are wanted,
    at most width - 1. rows: M, verification rows in all.
    """

    width: int
    head: int
    rows: int


@dataclass
class Workspace:
    """Inputs of one step of a request bucket.

    lanes int64 [N] maps lanes to state rows; live bool [N]. max_context bounds, on the host, a lane's committed length
    plus its block. logprobs: alternatives wanted per token, None when nobody asks. edited: lanes with logit edits.
    """

    lanes: Tensor
    live: Tensor
    max_context: int
    all_greedy: bool = True
    logprobs: int | None = None
    edited: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """N, lanes of this step."""
        return self.lanes.shape[0]

    @classmethod
    def of(cls, rows: Sequence[int], max_context: int, device: torch.device | str = "cpu") -> Workspace:
        """A workspace in which every lane is live."""
        lanes = torch.tensor(list(rows), dtype=torch.int64, device=device)
        return cls(lanes, torch.ones(len(rows), dtype=torch.bool, device=device), max_context)
