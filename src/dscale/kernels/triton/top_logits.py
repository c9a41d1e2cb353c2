"""The 16 highest logits, log-sum-exp and entropy of rows, and argmax, in Triton; see kernels/top_logits.py.

A logit and its id make one 64-bit key, (logit in an order of integers) · 2^32 + (2^31 - 1 - id): the larger key is the
higher logit, the lower id among equals. Pass 1 reads each logit once, a tile of a row a program: the highest key of
every group of 128 neighbours, and the tile's part of the sums. The 16 highest logits lie in the 16 groups with the
highest keys (any other group's best is beaten 16 times), so pass 2 reads only those groups again. Exact for any input.
Tiles depend on the vocabulary alone: a row's sums are the same whatever other rows there are.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKS = 16
GROUP = 128  # neighbours that share one key
TILE_GROUPS = 64  # groups of a program of pass 1
TILE = GROUP * TILE_GROUPS
LAST = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def ordered(x):
    """Float32 → int32 of the same order; both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LAST)


@triton.jit
def unordered(code):
    """The float32 of an `ordered` int32."""
    return (code ^ ((code >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(x, ids):
    """int64 keys of logits x float32 with int32 ids."""
    return (ordered(x).to(tl.int64) << 32) | (ids ^ LAST).to(tl.int64)


@triton.jit
def id_of(key):
    """The int32 id in a key."""
    return (key & LAST).to(tl.int32) ^ LAST


@triton.jit
def value_of(key):
    """The float32 logit in a key."""
    return unordered((key >> 32).to(tl.int32))


@triton.jit
def _tile_groups(logits, keys, sums, stride, vocab, groups, tiles, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, member = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    ids = (tile * GROUPS + group)[:, None] * GROUP + member[None, :]
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=1)
    where = tl.min(tl.where(x == best[:, None], ids, LAST), axis=1)
    tl.store(keys + row * groups + tile * GROUPS + group, key_of(best, where))

    highest = tl.max(best, axis=0)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    below = tl.maximum(x - origin, -1e4)  # a logit of -inf must add 0, and 0 · -inf is NaN
    weight = tl.exp(below)
    at = sums + (row * tiles + tile) * 3
    tl.store(at, highest)
    tl.store(at + 1, tl.sum(tl.sum(weight, axis=1), axis=0))
    tl.store(at + 2, tl.sum(tl.sum(weight * below, axis=1), axis=0))


@triton.jit
def _merge_groups(
    logits, keys, sums, values, top_ids, log_sum_exp, entropy, stride, vocab, groups, tiles,
    RANKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    every = tl.arange(0, GROUPS)
    own = tl.load(keys + row * groups + every, mask=every < groups, other=LOWEST)
    chosen = tl.zeros([RANKS], tl.int32)
    for index in range(RANKS):
        best = tl.max(own, axis=0)
        at = tl.min(tl.where(own == best, every, GROUPS - 1), axis=0)
        chosen = tl.where(rank == index, at, chosen)
        own = tl.where(every == at, LOWEST, own)

    ids = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    pool = tl.where(ids < vocab, key_of(x, ids), LOWEST)
    found = tl.full([RANKS], LOWEST, tl.int64)
    for index in range(RANKS):
        best = tl.max(tl.max(pool, axis=1), axis=0)
        found = tl.where(rank == index, best, found)
        pool = tl.where(pool == best, LOWEST, pool)
    tl.store(values + row * RANKS + rank, value_of(found))
    tl.store(top_ids + row * RANKS + rank, tl.minimum(id_of(found), vocab - 1).to(tl.int64))

    part = tl.arange(0, TILES)
    inside = part < tiles
    at = sums + (row * tiles + part) * 3
    top = tl.load(at, mask=inside, other=float("-inf"))
    weight = tl.load(at + 1, mask=inside, other=0.0)
    moment = tl.load(at + 2, mask=inside, other=0.0)
    highest = tl.max(top, axis=0)
    shift = tl.maximum(top - highest, -1e4)
    factor = tl.exp(shift)
    total = tl.sum(factor * weight, axis=0)
    mean = tl.sum(factor * (moment + shift * weight), axis=0) / total
    log_total = tl.log(total)
    tl.store(log_sum_exp + row, highest + log_total)
    tl.store(entropy + row, log_total - mean)


@triton.jit
def tile_best(logits, keys, stride, vocab, tiles, TILE: tl.constexpr):
    """The highest key of one tile of one row: grid (rows, tiles), keys [rows, tiles]."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    where = tl.min(tl.where(x == best, ids, LAST), axis=0)
    tl.store(keys + row * tiles + tile, key_of(best, where))


@triton.jit
def _best_of_row(keys, out, vocab, tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILES)
    best = tl.max(tl.load(keys + row * tiles + part, mask=part < tiles, other=LOWEST), axis=0)
    tl.store(out + row, tl.minimum(id_of(best), vocab - 1).to(tl.int64))  # a row of NaN has no best: any valid id


def top_logits(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of logits [R, V], V at least 16: as `top_logits_torch`; among equal logits the lower id first."""
    logits = as_rows(logits)
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    groups = tiles * TILE_GROUPS
    device = logits.device
    keys = torch.empty(rows, groups, dtype=torch.int64, device=device)
    sums = torch.empty(rows, tiles, 3, dtype=torch.float32, device=device)
    values = torch.empty(rows, RANKS, dtype=torch.float32, device=device)
    ids = torch.empty(rows, RANKS, dtype=torch.int64, device=device)
    log_sum_exp, entropy = torch.empty(2, rows, dtype=torch.float32, device=device).unbind()
    if rows > 0:
        _tile_groups[(rows, tiles)](
            logits, keys, sums, logits.stride(0), vocab, groups, tiles,
            GROUPS=TILE_GROUPS, GROUP=GROUP, num_warps=8,
        )  # fmt: skip
        _merge_groups[(rows,)](
            logits, keys, sums, values, ids, log_sum_exp, entropy, logits.stride(0), vocab, groups, tiles,
            RANKS=RANKS, GROUPS=triton.next_power_of_2(groups), GROUP=GROUP, TILES=triton.next_power_of_2(tiles),
            num_warps=4,
        )  # fmt: skip
    return values, ids, log_sum_exp, entropy


def argmax(logits: Tensor) -> Tensor:
    """Index of the highest logit of each row [R, V] → [R] int64, the lowest among equals."""
    logits = as_rows(logits)
    keys = best_keys(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0] > 0:
        tiles = keys.shape[1]
        _best_of_row[(logits.shape[0],)](
            keys, out, logits.shape[1], tiles, TILES=triton.next_power_of_2(tiles), num_warps=1
        )
    return out


def best_keys(logits: Tensor) -> Tensor:
    """Highest key of every tile of rows [R, V] whose columns are contiguous: int64 [R, tiles]."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    keys = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    if rows > 0:
        tile_best[(rows, tiles)](logits, keys, logits.stride(0), vocab, tiles, TILE=TILE, num_warps=8)
    return keys


def as_rows(logits: Tensor) -> Tensor:
    """The same logits with contiguous columns."""
    return logits if logits.stride(1) == 1 else logits.contiguous()
