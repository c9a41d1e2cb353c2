"""Per-head norm, rotation and the write to the paged cache in one pass, in Triton; formulas in kernels/rotary.py.

One program takes one row and a few of its heads. A fused row holds queries, keys and values, so the head's number
alone says what happens to it: queries are rotated and returned, keys rotated and cached, values cached.
The context rows of the drafter are the same without queries, once for each layer.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.rotary import HeadShape

HEADS = 8  # heads a program takes


@triton.jit
def _store_rounded(at, x, mask):
    """x at pointers of the cache. Eight bits hold no infinity: what is too large becomes their largest number."""
    if at.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_write(
    fused, angles, q_norm, k_norm, q_out, keys, values, slots, heads, kv, half, page_size, eps,
    row_stride, layer_stride, key_layer, key_page, key_head, key_row, value_layer, value_page, value_head, value_row,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv)
    is_v = (head >= heads + kv) & (head < heads + 2 * kv)
    whole = pair < half
    inside = (head < heads + 2 * kv)[:, None] & whole[None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half

    start = fused + row * row_stride + layer * layer_stride + head[:, None] * (2 * half)
    raw_a = tl.load(start + first[None, :], mask=inside, other=0.0)
    raw_b = tl.load(start + second[None, :], mask=inside, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)[:, None]
        norm_k = k_norm + layer * (2 * half)
        q_a = tl.load(q_norm + first, mask=whole, other=0.0).to(tl.float32)
        q_b = tl.load(q_norm + second, mask=whole, other=0.0).to(tl.float32)
        k_a = tl.load(norm_k + first, mask=whole, other=0.0).to(tl.float32)
        k_b = tl.load(norm_k + second, mask=whole, other=0.0).to(tl.float32)
        a = (a * scale * tl.where(is_q[:, None], q_a[None, :], k_a[None, :])).to(raw_a.dtype).to(tl.float32)
        b = (b * scale * tl.where(is_q[:, None], q_b[None, :], k_b[None, :])).to(raw_b.dtype).to(tl.float32)
    cos = tl.load(angles + row * (2 * half) + pair, mask=whole, other=0.0)[None, :]
    sin = tl.load(angles + row * (2 * half) + half + pair, mask=whole, other=0.0)[None, :]
    turned_a = (a * cos - b * sin).to(raw_a.dtype)
    turned_b = (b * cos + a * sin).to(raw_b.dtype)

    to_q = is_q[:, None] & whole[None, :]
    q_start = q_out + (row * heads + head[:, None]) * (2 * half)
    tl.store(q_start + first[None, :], turned_a, mask=to_q)
    tl.store(q_start + second[None, :], turned_b, mask=to_q)

    slot = tl.load(slots + row).to(tl.int64)
    page, offset = slot // page_size, slot % page_size
    key_start = keys + layer * key_layer + page * key_page + offset * key_row
    key_start = key_start + (head - heads)[:, None] * key_head
    to_k = is_k[:, None] & whole[None, :]
    _store_rounded(key_start + first[None, :], turned_a, to_k)
    _store_rounded(key_start + second[None, :], turned_b, to_k)
    value_start = values + layer * value_layer + page * value_page + offset * value_row
    value_start = value_start + (head - heads - kv)[:, None] * value_head
    to_v = is_v[:, None] & whole[None, :]
    _store_rounded(value_start + first[None, :], raw_a, to_v)
    _store_rounded(value_start + second[None, :], raw_b, to_v)


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
    """See kernels/rotary.py: fused rows [R, (heads + 2·kv)·d] → q [R, heads, d]; keys and values go to the caches.

    Both norms or neither. The caches may be of another dtype; their last dimension is contiguous.
    """
    q = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    layers = (0, 0, 0)  # strides of the layer: there is one
    _launch(qkv, angles, shape, q, key_cache, value_cache, slots, q_norm, k_norm, shape.num_heads, 1, layers)
    return q


def write_context(
    kv: Tensor, angles: Tensor, shape: HeadShape, cache: Tensor, slots: Tensor, k_norms: Sequence[Tensor] | None = None
) -> None:
    """See kernels/rotary.py: keys and values kv [R, layers, 2, kv, d] go to cache [layers, 2, pages, kv, page, d]."""
    kv = kv.contiguous()
    norms = None if k_norms is None else torch.stack(list(k_norms))
    layers = (kv.stride(1), cache.stride(0), cache.stride(0))
    _launch(kv, angles, shape, kv, cache[0, 0], cache[0, 1], slots, norms, norms, 0, kv.shape[1], layers)


def _launch(
    fused: Tensor,
    angles: Tensor,
    shape: HeadShape,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    heads: int,
    layers: int,
    layer_strides: tuple[int, int, int],
) -> None:
    rows, half = fused.shape[0], shape.head_dim // 2
    if rows == 0:
        return
    norm = k_norm is not None
    grid = (rows, triton.cdiv(heads + 2 * shape.num_kv_heads, HEADS), layers)
    _rotate_write[grid](
        fused, angles.contiguous(), q_norm if norm else fused, k_norm if norm else fused, q, keys, values,
        slots.contiguous(), heads, shape.num_kv_heads, half, keys.shape[2], shape.norm_eps, fused.stride(0),
        layer_strides[0], layer_strides[1], *keys.stride()[:3], layer_strides[2], *values.stride()[:3],
        NORM=norm, INTERLEAVED=shape.interleaved, HEADS=HEADS, HALF=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip
