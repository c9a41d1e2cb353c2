"""The ranks that share one model: which of them this process is, and the collectives they need.

Every rank holds a slice of each projection (models/shares.py) and the whole residual stream. Sums of a layer are taken
over all ranks; logits are joined from slices of the vocabulary, so they are the same bits everywhere. What a step
decides – drafts, lengths, tokens – is the first rank's, whatever the others made of it: `agree`.

A process alone has size 1, and nothing here is called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dscale.layers.linear import Linear


@dataclass(eq=False)
class Ranks:
    """This process among those that share a model. group: a process group of torch (gloo on CPUs, NCCL on GPUs).

    differing: where it is set, `agree` counts in it (int64 [1] on the device) the entries in which ranks differed.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    differing: Tensor | None = None

    @property
    def leads(self) -> bool:
        """True on the rank whose decisions count."""
        return self.rank == 0

    def tokens(self, vocabulary: int) -> range:
        """Tokens whose rows of the LM head are here: ceil(V / size) a rank, the last one what is left."""
        most = -(-vocabulary // self.size)
        return range(min(most * self.rank, vocabulary), min(most * (self.rank + 1), vocabulary))

    def sum(self, x: Tensor) -> Tensor:
        """x added up over the ranks, in place, in stream order."""
        _finish(self.group.allreduce([x], _plain("AllreduceOptions")))
        return x

    def join(self, x: Tensor) -> Tensor:
        """Equal columns of all ranks side by side: [R, n] → [R, size · n]."""
        return self.gather(x).transpose(0, 1).reshape(x.shape[0], -1)

    def gather(self, x: Tensor) -> Tensor:
        """What every rank holds: [...] → [size, ...]."""
        x = x.contiguous()
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _finish(self.group._allgather_base(out, x, _plain("AllgatherOptions")))
        return out.view(self.size, *x.shape)

    def share(self, x: Tensor) -> Tensor:
        """The first rank's x, in place on the others."""
        _finish(self.group.broadcast([x], _plain("BroadcastOptions")))
        return x

    def agree(self, x: Tensor, compare: bool = True) -> Tensor:
        """The first rank's integers x. Where differences are counted (unless `compare` says they are meant), count."""
        if self.differing is None or not compare:
            return self.share(x)
        everyone = self.gather(x)
        self.differing += (everyone != everyone[0]).sum()
        return everyone[0]

    def stack_rows(self, own: Tensor) -> Tensor:
        """The rows [n, …] of all ranks, one rank after the other; n may differ between them."""
        counts = self.gather(torch.tensor([own.shape[0]], device=own.device)).flatten().tolist()
        padded = functional.pad(own, (0,) * (2 * own.dim() - 1) + (max(counts) - own.shape[0],))
        return torch.cat([rows[:count] for rows, count in zip(self.gather(padded), counts, strict=True)])

    def least(self, value: int, device: torch.device | str) -> int:
        """The lowest of the ranks' values."""
        return int(self.gather(torch.tensor([value], device=device)).min())

    def abort(self) -> None:
        """Give up what is under way, so that a host that waits for it comes back; for when a rank is gone."""
        if self.group is not None and hasattr(self.group, "abort"):
            self.group.abort()


ALONE = Ranks()


def connect(rank: int, size: int, store: str, device: torch.device, seconds: float, check: bool) -> Ranks:
    """Join the group that meets at the file `store`; no collective may take longer than `seconds`.

    check: count where ranks differ.
    """
    import torch.distributed as dist

    meeting = dist.FileStore(store, size)
    limit = timedelta(seconds=seconds)
    differing = torch.zeros(1, dtype=torch.int64, device=device) if check else None
    if device.type == "cuda":
        # A capture must not meet event queries of torch's error handling, and a dead rank is noticed by its process.
        for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
            os.environ.setdefault(f"TORCH_NCCL_{name}", "0")
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = limit
        return Ranks(rank, size, nccl(meeting, rank, size, options), differing)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], limit
    return Ranks(rank, size, gloo(meeting, rank, size, options), differing)


def _finish(work: Any) -> None:
    """Wait for a collective, in stream order on a GPU; one on the current stream is nothing to wait for."""
    if work is not None:
        work.wait()


def _plain(name: str) -> Any:
    """Options of a collective that is issued on the current stream, as a capture wants it, not on a side stream."""
    from torch._C import _distributed_c10d as c10d

    options = getattr(c10d, name)()
    options.asyncOp = False
    return options


class SummedLinear(Linear):
    """A projection of which every rank holds some columns: y = Σ over ranks of x · weightᵀ, then the bias once."""

    def __init__(self, in_features: int, out_features: int, bias: bool, ranks: Ranks) -> None:
        super().__init__(in_features, out_features, bias)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.sum(self.apply_weight(x, None))
        return y if self.bias is None else y + self.bias


class JoinedHead(Linear):
    """An LM head of which every rank holds the rows of some tokens, as of `Ranks.tokens`."""

    def __init__(self, in_features: int, vocabulary: int, ranks: Ranks) -> None:
        self.held, self.most = ranks.tokens(vocabulary), -(-vocabulary // ranks.size)
        super().__init__(in_features, len(self.held))
        self.vocabulary, self.ranks = vocabulary, ranks

    def forward(self, x: Tensor) -> Tensor:
        own = self.apply_weight(x, None)
        missing = self.most - own.shape[1]
        joined = self.ranks.join(functional.pad(own, (0, missing)) if missing else own)
        return joined if joined.shape[1] == self.vocabulary else joined[:, : self.vocabulary].contiguous()


def head_rows(head: nn.Module) -> Tensor:
    """The weight [V, H] of an LM head, gathered where ranks share it."""
    own = cast(Tensor, head.weight).detach()
    return head.ranks.stack_rows(own) if isinstance(head, JoinedHead) else own
