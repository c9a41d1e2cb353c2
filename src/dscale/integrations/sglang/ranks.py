"""Do all ranks make the same of a step? DSCALE_CHECK_RANKS=1 asks after every one; knows no SGLang.

Ranks that differ in a token go on with different texts, of which only the first rank's is seen. So what a step starts
from is compared too: an anchor that differs need not show in what is emitted, since sums over ranks are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dscale.integrations.sglang.stages import Lanes, Settled

COLUMNS = ("row", "anchor", "context", "seed", "emitted", "next anchor", "length")  # then the tokens


class Group(Protocol):
    """What is needed of SGLang's group of ranks."""

    world_size: int

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, one after the other along dim."""
        ...


class RanksDiffer(RuntimeError):
    """One line: the step, the request, the rank and in what it differs from rank 0."""


class RankCheck:
    """Compares steps among the ranks of a group; `steps` were the same. The host waits for each."""

    def __init__(self, group: Group) -> None:
        self.group, self.steps = group, 0

    def compare(self, requests: Sequence[str], lanes: Lanes, settled: Settled) -> None:
        """RanksDiffer, on every rank, unless all started from the same lanes and settled on the same."""
        own = step_table(lanes, settled)
        tables = self.group.all_gather(own, dim=0).view(self.group.world_size, *own.shape)
        if not torch.equal(tables, tables[:1].expand_as(tables)):
            raise RanksDiffer(difference(tables.cpu(), self.steps + 1, requests))
        self.steps += 1


def step_table(lanes: Lanes, settled: Settled) -> Tensor:
    """All that makes a step, int64 [N, 7 + W]: COLUMNS, then tokens."""
    before = (lanes.rows, lanes.anchor, lanes.context, lanes.seeds)
    after = (settled.emitted, settled.anchor, settled.length)
    return torch.cat([torch.stack([part.long() for part in (*before, *after)], dim=1), settled.tokens.long()], dim=1)


def difference(tables: Tensor, step: int, requests: Sequence[str]) -> str:
    """The first request and rank that differ, in one line; tables [ranks, N, 7 + W]."""
    lane, rank, column = (tables != tables[:1]).transpose(0, 1).nonzero()[0].tolist()
    slot = column - len(COLUMNS)
    name = COLUMNS[column] if slot < 0 else f"token {slot}"
    found, expected = int(tables[rank, lane, column]), int(tables[0, lane, column])
    told = f"rank {rank} has {name} {found}, rank 0 has {expected}"
    return f"DSCALE: ranks differ in compared step {step}, request {requests[lane]} (lane {lane}): {told}"
