"""Which slice of a model's weights each rank holds.

    qkv              rows of its query heads and of the key/value heads that they read
    gate_up          rows of its part of the inner size, of both halves
    output, down     the columns that belong to these rows; the results are summed over ranks
    head             rows of its part of the vocabulary; the logits are joined
    everything else  whole: embedding, norms, the drafter's fc, biases of output and down

Key/value heads are dealt out as evenly as they go, each with its query heads (three over two ranks: 1 and 2). Where
there are fewer of them than ranks, ranks hold copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dscale.config import DecoderConfig, require
from dscale.layers.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Share:
    """What one rank holds of a decoder. whole: its config; the ranges are of heads, key/value heads and inner size."""

    ranks: Ranks
    whole: DecoderConfig
    heads: range
    kv: range
    inner: range

    @classmethod
    def of(cls, config: DecoderConfig, ranks: Ranks) -> Share | None:
        """This rank's share, or None when the heads cannot be dealt out."""
        size, kv, group = ranks.size, config.num_kv_heads, config.group
        inner = _part(config.intermediate_size, ranks)
        if kv >= size:
            held = _part(kv, ranks)
            return cls(ranks, config, range(held.start * group, held.stop * group), held, inner)
        if size % kv or config.num_heads % size:
            return None
        first = ranks.rank * kv // size
        return cls(ranks, config, _part(config.num_heads, ranks), range(first, first + 1), inner)

    @classmethod
    def must(cls, config: DecoderConfig, ranks: Ranks, what: str) -> Share:
        """This rank's share; InputError when there is none."""
        share, kv = cls.of(config, ranks), config.num_kv_heads
        require(
            share is not None,
            f"tensor_parallel: {ranks.size} ranks cannot share the {config.num_heads} query and {kv} key/value heads "
            f"of {what}; allowed are up to {kv}, and multiples of {kv} that divide {config.num_heads}",
        )
        assert share is not None
        return share

    @property
    def local(self) -> DecoderConfig:
        """The config with this rank's heads and inner size."""
        if self.ranks.size == 1:
            return self.whole
        heads, kv, inner = len(self.heads), len(self.kv), len(self.inner)
        return replace(self.whole, num_heads=heads, num_kv_heads=kv, intermediate_size=inner)

    def cut(self, parameter: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's slices of the tensors that are stacked into a parameter; views."""
        if self.ranks.size == 1:
            return list(parts)
        (*_, name, kind), d = ["", *parameter.split(".")], self.whole.head_dim
        if name == "qkv":
            ranges = [range(one.start * d, one.stop * d) for one in (self.heads, self.kv, self.kv)]
            return [_rows(part, held) for part, held in zip(parts, ranges, strict=True)]
        if name == "gate_up":
            return [_rows(part, self.inner) for part in parts]
        if name == "output" and kind == "weight":
            return [part[:, self.heads.start * d : self.heads.stop * d] for part in parts]
        if name == "down" and kind == "weight":
            return [part[:, self.inner.start : self.inner.stop] for part in parts]
        if name == "head":
            return [_rows(part, self.ranks.tokens(part.shape[0])) for part in parts]
        return list(parts)


def undivided(config: DecoderConfig) -> Share:
    """The share of a process that holds the whole decoder."""
    share = Share.of(config, ALONE)
    assert share is not None
    return share


def stacked(parts: Sequence[Tensor], dtype: torch.dtype, device: str) -> Tensor:
    """Slices in one contiguous tensor. A single one that needs no cast stays the mapped file: no time, no memory."""
    moved = [part.to(device, dtype) for part in parts]
    return moved[0].contiguous() if len(moved) == 1 else torch.cat(moved)


def _part(count: int, ranks: Ranks) -> range:
    return range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def _rows(part: Tensor, held: range) -> Tensor:
    return part[held.start : held.stop]
