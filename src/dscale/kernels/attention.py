"""Attention of ragged query rows over a paged cache: verification, draft blocks and prefill by one kernel.

Request i owns rows starts[i] … starts[i+1]-1; they stand at positions contexts[i], contexts[i]+1, … and their own keys
are already in the cache, perhaps in eight bits: all that attends reads the rounded rows. With n_i rows, row j sees the
keys of positions
    causal:         0 … contexts[i] + j
    bidirectional:  0 … contexts[i] + n_i - 1           (a draft block: every row sees the whole block)
and with a window w only those greater than (its own position - w). Rows from starts[N] on are sentinels: zeros.

    out_r = softmax(scale · q_r · Kᵀ) · V               (softmax in float32)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from dscale.config import ATTENTION_LAYOUTS, require
from dscale.kernels import native, triton

if TYPE_CHECKING:
    from dscale.kernels.triton.attention import Tile

Path = Literal["auto", "verify", "draft", "prefill"]


@dataclass(frozen=True)
class AttentionOptions:
    """How the GPU kernels tile; results differ by rounding only.

    layout of verification and draft blocks: packed (the query heads of a KV head share a tile of up to 128 rows), or
    the two of the paper with a query head a tile: narrow (16 rows) and wide (128 rows). deterministic: the bits of a
    row depend on its own keys alone, not on other rows, lanes or path. tile overrides the choice (tuning).
    """

    layout: str = "packed"
    deterministic: bool = False
    tile: Tile | None = None

    def __post_init__(self) -> None:
        allowed = ", ".join(ATTENTION_LAYOUTS)
        require(self.layout in ATTENTION_LAYOUTS, f"attention layout is {self.layout!r}: allowed are {allowed}")


@dataclass(frozen=True)
class RaggedBatch:
    """Which rows belong to which request, and where their keys lie. Integer tensors on the device of the cache.

    positions [R] int64 and slots [R] int64 are per row; page_table [rows, pages] int32 holds a request's pages in
    order; lanes [N] int64 maps a lane to its page-table row; starts [N+1] int64; contexts [N] int64, tokens before
    the lane's first row. max_rows and max_context bound, on the host, n_i and contexts[i] + n_i.

    For the GPU kernels: path says what the rows are ("auto": by max_rows), and arrivals is arrival_counters, shared by
    all layers of one stream (None: made at every call, one more launch).
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
    path: Path = "auto"
    options: AttentionOptions = AttentionOptions()
    arrivals: Tensor | None = None


def arrival_counters(lanes: int, max_rows: int, heads: int, device: torch.device) -> Tensor:
    """Counters [lanes · max_rows · heads] int32 for RaggedBatch.arrivals: zero, and zero again after every call."""
    return torch.zeros(lanes * max_rows * heads, dtype=torch.int32, device=device)


def paged_attention_torch(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
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
        padded, keys, values, attn_mask=mask, scale=scale * key_scale, enable_gqa=heads != kv
    ).transpose(1, 2)
    result = torch.zeros_like(q)
    result[rows[live]] = out[live] if value_scale == 1.0 else out[live] * value_scale
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


def _widened(
    key_cache: Tensor, value_cache: Tensor, batch: RaggedBatch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, RaggedBatch]:
    """The pages that the lanes may see, copied in another dtype, and the batch over the copies."""
    lanes = batch.lanes.shape[0]
    pages = batch.page_table[batch.lanes, : -(-batch.max_context // key_cache.shape[2])].long().flatten()
    table = torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device).view(lanes, -1)
    keys, values = (cache[pages].to(dtype) for cache in (key_cache, value_cache))
    return keys, values, replace(batch, page_table=table, lanes=torch.arange(lanes, device=pages.device))


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Attend rows q [R, heads, d] over the paged cache; see the module's text for what each row sees.

    The cache holds keys / key_scale and values / value_scale (for an fp8 cache; elsewhere 1).
    """
    if native.usable(q):
        if key_cache.dtype is not q.dtype:
            key_cache, value_cache, batch = _widened(key_cache, value_cache, batch, q.dtype)
        out = native.paged_attention(q, key_cache, value_cache, batch, scale * key_scale, window)
        return out if value_scale == 1.0 else out * value_scale
    if triton.usable(q):
        from dscale.kernels.triton import attention as fast

        if fast.supports(q, key_cache, value_cache):
            return fast.paged_attention(q, key_cache, value_cache, batch, scale, window, key_scale, value_scale)
    return paged_attention_torch(q, key_cache, value_cache, batch, scale, window, key_scale, value_scale)
