"""Attention of ragged query rows over a paged cache: verification, draft blocks and prefill by one kernel.

Request i owns rows starts[i] … starts[i+1]-1; they stand at positions contexts[i], contexts[i]+1, … and their own keys
are already in the cache. With n_i rows, row j sees the keys of positions
    causal:         0 … contexts[i] + j
    bidirectional:  0 … contexts[i] + n_i - 1           (a draft block: every row sees the whole block)
and with a window w only those greater than (its own position - w). Rows from starts[N] on are sentinels: zeros.

    out_r = softmax(scale · q_r · Kᵀ) · V               (softmax in float32)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dscale.kernels import native


@dataclass(frozen=True)
class RaggedBatch:
    """Which rows belong to which request, and where their keys lie. Integer tensors on the device of the cache.

    positions [R] int64 and slots [R] int64 are per row; page_table [rows, pages] int32 holds a request's pages in
    order; lanes [N] int64 maps a lane to its page-table row; starts [N+1] int64; contexts [N] int64, tokens before
    the lane's first row. max_rows and max_context bound, on the host, n_i and contexts[i] + n_i.
    """

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    lanes: Tensor
    starts: Tensor
    contexts: Tensor
    max_rows: int
    max_context: int
    causal: bool = True


def paged_attention_torch(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: RaggedBatch, scale: float, window: int | None = None
) -> Tensor:
    """The plain version: q [R, heads, d], caches [pages, kv, page, d] → [R, heads, d]."""
    heads, kv = q.shape[1], key_cache.shape[1]
    page_size = key_cache.shape[2]
    pages = batch.page_table[batch.lanes, : -(-batch.max_context // page_size)].long()
    keys = key_cache[pages].transpose(1, 2).flatten(2, 3).to(q.dtype)  # [N, kv, S, d]
    values = value_cache[pages].transpose(1, 2).flatten(2, 3).to(q.dtype)

    column = torch.arange(batch.max_rows, device=q.device)
    counts = batch.starts[1:] - batch.starts[:-1]
    live = column[None, :] < counts[:, None]  # [N, max_rows]
    rows = (batch.starts[:-1, None] + column[None, :]).clamp(max=q.shape[0] - 1)
    padded = q[rows].transpose(1, 2)  # [N, heads, max_rows, d]
    mask = _visible(batch, column, counts, keys.shape[2], window)[:, None]
    out = functional.scaled_dot_product_attention(
        padded, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads != kv
    ).transpose(1, 2)
    result = torch.zeros_like(q)
    result[rows[live]] = out[live]
    return result


def _visible(batch: RaggedBatch, column: Tensor, counts: Tensor, keys: int, window: int | None) -> Tensor:
    """Boolean [N, max_rows, keys]: which keys a row sees. Rows past a lane's count see key 0: no softmax is empty."""
    position = batch.contexts[:, None] + column[None, :]
    last = position if batch.causal else (batch.contexts + counts - 1)[:, None].expand_as(position)
    key = torch.arange(keys, device=column.device)
    seen = key <= last[:, :, None]
    if window is not None:
        seen &= key > position[:, :, None] - window
    dead = column[None, :] >= counts[:, None]
    return torch.where(dead[:, :, None], key == 0, seen)


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: RaggedBatch, scale: float, window: int | None = None
) -> Tensor:
    """Attend rows q [R, heads, d] over the paged cache; see the module's text for what each row sees."""
    if native.usable(q) and key_cache.dtype is q.dtype:
        return native.paged_attention(q, key_cache, value_cache, batch, scale, window)
    return paged_attention_torch(q, key_cache, value_cache, batch, scale, window)
