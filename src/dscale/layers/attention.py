"""How a decoder layer attends: over a paged cache when serving, over whole dense sequences when training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dscale.config import DecoderConfig
from dscale.kernels.attention import RaggedBatch, paged_attention
from dscale.kernels.rotary import HeadShape, split_rotate, split_rotate_write


class HeadNorms(NamedTuple):
    """Per-head norm weights [d] of queries and keys, or None where the family has none."""

    q: Tensor | None = None
    k: Tensor | None = None


def head_shape(config: DecoderConfig) -> HeadShape:
    """How the fused qkv row of this decoder splits and rotates."""
    interleaved = config.rope.style == "interleaved"
    return HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, interleaved, config.norm_eps)


class Attention(ABC):
    """What a decoder layer calls with its fused projection; one object serves all layers of one forward pass."""

    @abstractmethod
    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms) -> Tensor:
        """qkv [R, (heads + 2·kv)·d] of a layer → attention output [R, heads·d]."""


class PagedAttention(Attention):
    """Writes each layer's keys and values to the cache and attends over it.

    cache [layers, 2, pages, kv, page, d]: keys at index 0, values at 1. table: rotary_table of the decoder.
    """

    def __init__(self, config: DecoderConfig, cache: Tensor, table: Tensor, batch: RaggedBatch) -> None:
        self.config, self.cache, self.batch = config, cache, batch
        self.shape = head_shape(config)
        self.angles = table[batch.positions]
        self.scale = config.head_dim**-0.5

    def write(self, layer: int, qkv: Tensor, norms: HeadNorms) -> Tensor:
        """Keys and values of a layer to the cache; returns the rotated queries [R, heads, d]."""
        keys, values = self.cache[layer]
        return split_rotate_write(qkv, self.angles, self.shape, keys, values, self.batch.slots, norms.q, norms.k)

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms) -> Tensor:
        q, (keys, values) = self.write(layer, qkv, norms), self.cache[layer]
        batch = self.batch
        if self.config.causal_layers:
            batch = replace(batch, causal=self.config.causal_layers[layer])
        out = paged_attention(q, keys, values, batch, self.scale, self.config.window(layer))
        return out.flatten(1)


class DenseAttention(Attention):
    """Causal attention over whole sequences without a cache: rows are B sequences of S positions, one after another.

    padding on the right needs no mask: a causal row never sees what comes after it.
    """

    def __init__(self, config: DecoderConfig, table: Tensor, batch: int, length: int) -> None:
        self.config, self.batch, self.length = config, batch, length
        self.shape = head_shape(config)
        self.angles = table[:length].repeat(batch, 1)

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms) -> Tensor:
        parts = split_rotate(qkv, self.angles, self.shape, norms.q, norms.k)
        q, k, v = (part.view(self.batch, self.length, *part.shape[1:]).transpose(1, 2) for part in parts)
        window = self.config.window(layer)
        grouped = self.config.group > 1
        if window is None or window >= self.length:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            mask = causal_window_mask(self.length, window, q.device)
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(self.batch * self.length, -1)


def causal_window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Boolean [S, S]: row i sees columns max(0, i-window+1) … i."""
    position = torch.arange(length, device=device)
    back = position[:, None] - position[None, :]
    return (back >= 0) & (back < window)
