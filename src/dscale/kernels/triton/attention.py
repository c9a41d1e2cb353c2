"""Choice of tiles and launch of the Triton attention kernels (formulas in attention_kernels.py).

Everything that varies from step to step is read on the device. Host numbers fix the grid and the scratch: lanes, rows a
lane and, when deterministic, max_context. So a launch captured in a graph serves every later content of starts,
contexts, lanes and page table within these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from dscale.kernels.triton import dense
from dscale.kernels.triton.attention_kernels import decode_kernel, prefill_kernel

if TYPE_CHECKING:
    from dscale.kernels.attention import AttentionOptions, RaggedBatch

FIXED_KEYS = 512  # deterministic: keys of a chunk
FIXED_ROWS = 64  # deterministic: rows of a tile, whatever the path
SLACK = 8  # lengths of equal chunks that are tried, each a sixteenth of a perfect balance longer
LEAST = 2  # key tiles of a piece
FEW_HEADS = 132  # of all lanes: about one for each multiprocessor
DECODE_ROWS = 32  # path "auto": at most so many rows a lane are a decode step
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tile:
    """rows of a query tile (token · head), keys of a turn, warps, pipeline stages, programs per multiprocessor."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 2


def supports(q: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the kernels can serve these tensors: head sizes that are powers of two, contiguous caches."""
    size = q.shape[-1]
    same = key_cache.is_contiguous() and value_cache.is_contiguous() and key_cache.dtype is value_cache.dtype
    known = key_cache.dtype in (*_DTYPES, torch.float8_e4m3fn)
    return same and known and q.dtype in _DTYPES and 16 <= size <= 256 and size & (size - 1) == 0


def is_prefill(batch: RaggedBatch) -> bool:
    """Which kernel serves the batch: by its path where that is told."""
    return batch.path == "prefill" or (batch.path == "auto" and batch.max_rows > DECODE_ROWS)


def packed_heads(options: AttentionOptions, group: int, prefill: bool) -> int:
    """Query heads of a KV head that share a tile."""
    return group if options.layout == "packed" or prefill else 1


def choose_tile(
    options: AttentionOptions,
    rows: int,
    head_dim: int,
    q_dtype: torch.dtype,
    prefill: bool,
    heads: int = 1 << 30,
    cache: torch.dtype | None = None,
) -> Tile:
    """The tile for lanes of at most `rows` rows (token · packed head). Deterministic: the same for all rows.

    heads: tiles of all lanes. Where they do not fill the chip one program a multiprocessor is faster than two
    (measured on an H200, benchmarks/gpu_attention.py --sweep), but for chunks of a fixed length. cache: its dtype,
    where it is not that of q.
    """
    if options.tile is not None:
        return options.tile
    if q_dtype is torch.float32:
        return Tile(rows=16, keys=32, warps=4, stages=2, programs=4)
    if options.deterministic:
        height = FIXED_ROWS
    elif prefill or options.layout == "wide":
        height = 128
    elif options.layout == "narrow":
        height = 16
    else:
        height = min(max(triton.next_power_of_2(rows), 16), 128 if head_dim <= 128 else 64)
    few = heads <= FEW_HEADS and not options.deterministic
    large = height == 128 or head_dim > 128  # registers and shared memory: one program on a multiprocessor
    keys, warps = 64 if head_dim <= 128 else 32, 8 if height == 128 else 4
    stages = 2 if height == 128 and head_dim > 128 and not prefill else 3  # what fits into shared memory
    if cache is torch.float8_e4m3fn:
        stages += 2  # loads are half as large, and a buffer less is used: copies of them are what is multiplied
    return Tile(height, keys, warps, stages, programs=1 if large or few else 2)


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
    """`paged_attention` of kernels/attention.py on a CUDA device (or in Triton's interpreter)."""
    prefill = is_prefill(batch)
    group = q.shape[1] // key_cache.shape[1]
    packed = packed_heads(batch.options, group, prefill)
    heads = batch.lanes.shape[0] * q.shape[1] // packed
    tile = choose_tile(batch.options, batch.max_rows * packed, q.shape[2], q.dtype, prefill, heads, key_cache.dtype)
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scales = (scale * math.log2(math.e), 0 if window is None else window, key_scale, value_scale)
    launch = _prefill if prefill else _decode
    launch(q, key_cache, value_cache, out, batch, scales, tile, packed, window is not None)
    return out


def _prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    batch: RaggedBatch,
    scales: tuple[float, int, float, float],
    tile: Tile,
    packed: int,
    windowed: bool,
) -> None:
    rows, heads, size = q.shape
    lanes, kv = batch.lanes.shape[0], key_cache.shape[1]
    prefill_kernel[(triton.cdiv(batch.max_rows * packed, tile.rows), heads // packed, lanes)](
        q, key_cache, value_cache, out, batch.page_table, *dense(batch.lanes, batch.starts, batch.contexts),
        rows, lanes, batch.page_table.stride(0), q.stride(0), q.stride(1), *scales,
        KV=kv, GROUP=heads // kv, P=packed, PAGE=key_cache.shape[2], D=size, ROWS=tile.rows, KEYS=tile.keys,
        FIXED=FIXED_KEYS // tile.keys if batch.options.deterministic else 0, CAUSAL=batch.causal, WINDOW=windowed,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    batch: RaggedBatch,
    scales: tuple[float, int, float, float],
    tile: Tile,
    packed: int,
    windowed: bool,
) -> None:
    rows, heads, size = q.shape
    lanes, kv, page = batch.lanes.shape[0], key_cache.shape[1], key_cache.shape[2]
    tiles = triton.cdiv(batch.max_rows * packed, tile.rows)
    each = tiles * heads // packed  # units of a lane
    programs, fixed = multiprocessors(q.device) * tile.programs, batch.options.deterministic
    slots = each * lanes * triton.cdiv(batch.max_context, FIXED_KEYS) if fixed else 2 * programs
    partial = torch.empty(slots, tile.rows, size, dtype=torch.float32, device=q.device)
    stats = torch.empty(slots, 2, tile.rows, dtype=torch.float32, device=q.device)
    arrivals = batch.arrivals
    if arrivals is None:
        arrivals = torch.zeros(lanes * each, dtype=torch.int32, device=q.device)
    elif arrivals.numel() < lanes * each:
        raise ValueError(f"arrivals has {arrivals.numel()} entries, {lanes * each} are needed (arrival_counters)")
    decode_kernel[(min(programs, slots),)](
        q, key_cache, value_cache, out, batch.page_table, *dense(batch.lanes, batch.starts, batch.contexts),
        partial, stats, arrivals, rows, lanes, batch.page_table.stride(0), q.stride(0), q.stride(1), *scales,
        KV=kv, GROUP=heads // kv, P=packed, PAGE=page, D=size, ROWS=tile.rows, TILES=tiles, KEYS=tile.keys,
        LANES=max(triton.next_power_of_2(lanes), 32),
        FIXED=FIXED_KEYS // tile.keys if fixed else 0, CAUSAL=batch.causal, WINDOW=windowed, SLACK=SLACK, LEAST=LEAST,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter has four."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
