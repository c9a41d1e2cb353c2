"""Split a fused qkv row, norm q and k per head where the family does, rotate both, and write k and v to the cache.

q = rotate(norm(q), angle(position)),  k = rotate(norm(k), angle(position)),  v unchanged
neox:         (a, b) = halves of the head;      rotated = (a·cos - b·sin, b·cos + a·sin)
interleaved:  (a, b) = even and odd elements;   the same formula, put back in place

The cache may be of another dtype, such as float8_e4m3fn: k and v are rounded once, as they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.kernels import native, triton
from dscale.kernels.norm import rms_norm_torch


@dataclass(frozen=True)
class HeadShape:
    """How a fused row splits into heads, and how heads are rotated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    interleaved: bool = False
    norm_eps: float = 1e-6


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate heads x [R, heads, d] by angles [R, d] (cosines then sines, float32), in float32, back in x's dtype."""
    cos, sin = angles[:, None, :].chunk(2, dim=-1)
    wide = x.float()
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def split_rotate(
    qkv: Tensor, angles: Tensor, shape: HeadShape, q_norm: Tensor | None = None, k_norm: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [R, (heads + 2·kv)·d] → q [R, heads, d], k [R, kv, d], v [R, kv, d]; norm weights are [d] or None."""
    d, heads, kv = shape.head_dim, shape.num_heads, shape.num_kv_heads
    q, k, v = qkv.view(qkv.shape[0], heads + 2 * kv, d).split([heads, kv, kv], dim=1)
    if q_norm is not None:
        q = rms_norm_torch(q, q_norm, shape.norm_eps)
    if k_norm is not None:
        k = rms_norm_torch(k, k_norm, shape.norm_eps)
    return rotate(q, angles, shape.interleaved), rotate(k, angles, shape.interleaved), v


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of this dtype holds it. float8_e4m3fn has no infinity: beyond ±448 x becomes ±448."""
    if dtype is torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def write_cache(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write rows k, v [R, kv, d] at slots [R] of caches [pages, kv, page, d]; slot = page · page size + offset."""
    page_size = key_cache.shape[2]
    pages, offsets = slots // page_size, slots % page_size
    key_cache[pages, :, offsets] = rounded(k, key_cache.dtype)
    value_cache[pages, :, offsets] = rounded(v, value_cache.dtype)


def split_rotate_write(
    qkv: Tensor,
    angles: Tensor,
    shape: HeadShape,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> Tensor:
    """split_rotate, k and v written to the cache at slots [R]; returns q [R, heads, d]."""
    if native.usable(qkv):
        if key_cache.dtype is qkv.dtype:
            return native.split_rotate_write(qkv, angles, shape, key_cache, value_cache, slots, q_norm, k_norm)
        k, v = qkv.new_empty(2, qkv.shape[0], shape.num_kv_heads, 1, shape.head_dim)  # pages of one row
        rows = torch.arange(qkv.shape[0])
        q = native.split_rotate_write(qkv, angles, shape, k, v, rows, q_norm, k_norm)
        write_cache(k[:, :, 0], v[:, :, 0], key_cache, value_cache, slots)
        return q
    if triton.usable(qkv) and (q_norm is None) == (k_norm is None):
        from dscale.kernels.triton import rotary

        return rotary.split_rotate_write(qkv, angles, shape, key_cache, value_cache, slots, q_norm, k_norm)
    q, k, v = split_rotate(qkv, angles, shape, q_norm, k_norm)
    write_cache(k, v, key_cache, value_cache, slots)
    return q


def write_context_torch(
    kv: Tensor, angles: Tensor, shape: HeadShape, cache: Tensor, slots: Tensor, k_norms: Sequence[Tensor] | None
) -> None:
    """The plain version of write_context, a layer at a time."""
    for layer in range(kv.shape[1]):
        k, v = kv[:, layer].unbind(1)
        if k_norms is not None:
            k = rms_norm_torch(k, k_norms[layer], shape.norm_eps)
        write_cache(rotate(k, angles, shape.interleaved), v, cache[layer, 0], cache[layer, 1], slots)


def write_context(
    kv: Tensor,
    angles: Tensor,
    shape: HeadShape,
    cache: Tensor,
    slots: Tensor,
    k_norms: Sequence[Tensor] | None = None,
) -> None:
    """Norm and rotate the keys of all layers and write keys and values to their caches at slots [R].

    kv [R, layers, 2, kv, d], keys at index 0; angles [R, d]; cache [layers, 2, pages, kv, page, d]; k_norms: [d] each.
    """
    if native.usable(kv):
        if cache.dtype is kv.dtype:
            native.write_context(kv, angles, shape, cache, slots, k_norms)
            return
        rows, layers, _, heads, size = kv.shape
        made = kv.new_empty(layers, 2, rows, heads, 1, size)  # pages of one row
        native.write_context(kv, angles, shape, made, torch.arange(rows), k_norms)
        for (k, v), (keys, values) in zip(made[..., 0, :], cache, strict=True):
            write_cache(k, v, keys, values, slots)
    elif triton.usable(kv):
        from dscale.kernels.triton import rotary

        rotary.write_context(kv, angles, shape, cache, slots, k_norms)
    else:
        write_context_torch(kv, angles, shape, cache, slots, k_norms)
