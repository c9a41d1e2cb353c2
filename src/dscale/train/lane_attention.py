"""Attention of one new token per lane over a static cache: the decode step of corpus generation.

    write k_b, v_b at positions[b];   out_b = softmax(scale · q_b · K_b[: positions[b] + 1]ᵀ) · V_b

A cache of one layer is [B, kv, S, d]. The query heads that share a key/value head are the rows of one tile, so a key is
read once per key/value head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None


def lane_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """The plain version: q [B, heads, d], k and v [B, kv, d], caches [B, kv, S, d], positions [B] → [B, heads · d]."""
    lanes = torch.arange(q.shape[0], device=q.device)
    keys[lanes, :, positions] = k.to(keys.dtype)
    values[lanes, :, positions] = v.to(values.dtype)
    seen = torch.arange(keys.shape[2], device=q.device)[None, :] <= positions[:, None]
    grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[2])
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None], scale=scale)
    return out.reshape(q.shape[0], -1)


def lane_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """See the module's text. The Triton version runs on CUDA, the plain one elsewhere."""
    if q.is_cuda and triton is not None:
        return lane_attention_triton(q, k, v, keys, values, positions, scale)
    return lane_attention_torch(q, k, v, keys, values, positions, scale)


def lane_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """The Triton version: one program per lane and key/value head, softmax in float32 over blocks of 64 keys."""
    lanes, heads, d = q.shape
    kv, length = keys.shape[1], keys.shape[2]
    out = torch.empty(lanes, heads * d, dtype=q.dtype, device=q.device)
    rows = max(16, 1 << (heads // kv - 1).bit_length())
    _kernel()[(lanes, kv)](
        q.contiguous(), k.contiguous(), v.contiguous(), keys, values, positions, out, scale, length,
        KV=kv, GROUP=heads // kv, ROWS=rows, D=d, BLOCK=64, num_warps=2, num_stages=3,
    )  # fmt: skip
    return out


def _kernel() -> Any:
    return _lane_attention_kernel


if triton is not None:

    @triton.jit
    def _lane_attention_kernel(  # type: ignore[no-untyped-def]
        q, k, v, keys, values, positions, out, scale, length,
        KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        lane, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = tl.load(positions + lane)
        row, col, inside = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
        base = (lane * KV + head) * length * D
        new_k = tl.load(k + (lane * KV + head) * D + col)
        new_v = tl.load(v + (lane * KV + head) * D + col)
        tl.store(keys + base + at * D + col, new_k)
        tl.store(values + base + at * D + col, new_v)

        first = (lane * KV + head) * GROUP
        query = tl.load(q + (first + row[:, None]) * D + col[None, :], mask=row[:, None] < GROUP, other=0.0)
        # the new key is taken from its registers: a store is not ordered before another thread's load
        own = tl.sum(query.to(tl.float32) * new_k[None, :].to(tl.float32), axis=1) * scale
        top, total = own, tl.full([ROWS], 1.0, tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32) + new_v[None, :].to(tl.float32)
        for start in range(0, at, BLOCK):
            key = start + inside
            live = key < at
            block = base + key[:, None] * D + col[None, :]
            scores = tl.dot(query, tl.trans(tl.load(keys + block, mask=live[:, None], other=0.0))) * scale
            scores = tl.where(live[None, :], scores, -float("inf"))
            peak = tl.maximum(top, tl.max(scores, axis=1))
            weight, shrink = tl.exp(scores - peak[:, None]), tl.exp(top - peak)
            total = total * shrink + tl.sum(weight, axis=1)
            value = tl.load(values + block, mask=live[:, None], other=0.0)
            acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
            top = peak
        target = out + (first + row[:, None]) * D + col[None, :]
        tl.store(target, (acc / total[:, None]).to(new_v.dtype), mask=row[:, None] < GROUP)
