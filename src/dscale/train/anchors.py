"""Where draft blocks are put in packed rows, and which keys a block may see.

    valid(p)      p + 1 is supervised in the same conversation, and p is supervised or the last token before the answer
    context       keys of positions first(p) … p - 1 of the same row, strictly before the anchor
    block         all W rows of the anchor's own block, in both directions; of other blocks nothing

Serving puts its first anchor on the last token of the prompt,
so that position is trained as well (dflash.md asks for p and
p + 1 supervised; this is the one position more).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # rows and keys of one tile of the block mask


class Anchors(NamedTuple):
    """Anchors of packed rows, ascending: position [R, A] in the row, first [R, A] of its conversation, live [R, A]."""

    position: Tensor
    first: Tensor
    live: Tensor


class Labels(NamedTuple):
    """What the slots of every block should say: token [R, A, W-1] and supervised [R, A, W-1], a prefix of each "
    "block."""

    token: Tensor
    supervised: Tensor


def valid_anchors(answer: Tensor, first: Tensor) -> Tensor:
    """answer bool [R, L], first [R, L] → bool [R, L]: p + 1 is a supervised token of p's conversation."""
    following = torch.zeros_like(answer)
    following[:, :-1] = answer[:, 1:] & (first[:, 1:] == first[:, :-1])
    return following


def sample_anchors(answer: Tensor, first: Tensor, count: int, keys: Tensor) -> Anchors:
    """`count` valid positions of each row, uniform without replacement: those with the largest keys [R, L] (random)."""
    valid = valid_anchors(answer, first)
    drawn = torch.where(valid, keys, keys - 2.0).topk(count, dim=1).indices
    last = answer.shape[1] - 1
    position = torch.where(valid.gather(1, drawn), drawn, last + 1).sort(dim=1).values
    live, position = position <= last, position.clamp(max=last)
    return Anchors(position, first.gather(1, position).long(), live)


def block_labels(ids: Tensor, answer: Tensor, first: Tensor, anchors: Anchors, width: int) -> Labels:
    """Labels of slots 1 … W-1: the tokens after the anchor, as far as they are supervised without a gap."""
    length = ids.shape[1]
    ahead = anchors.position[:, :, None] + torch.arange(1, width, device=ids.device)
    at = ahead.clamp(max=length - 1).flatten(1)
    same = first.gather(1, at).view(ahead.shape) == anchors.first[:, :, None]
    supervised = answer.gather(1, at).view(ahead.shape) & same & (ahead < length) & anchors.live[:, :, None]
    token = ids.gather(1, at).view(ahead.shape).long()
    return Labels(token, supervised.int().cumprod(-1).bool())


def block_inputs(ids: Tensor, anchors: Anchors, width: int, mask_token: int) -> tuple[Tensor, Tensor]:
    """Input ids [R, A, W] (the anchor, then masks) and positions [R, A, W] in the conversation."""
    inputs = torch.full((*anchors.position.shape, width), mask_token, dtype=torch.long, device=ids.device)
    inputs[:, :, 0] = ids.gather(1, anchors.position)
    steps = torch.arange(width, device=ids.device)
    return inputs, (anchors.position - anchors.first)[:, :, None] + steps


def dense_block_mask(anchors: Anchors, length: int, width: int) -> Tensor:
    """Boolean [R, A·W, L + A·W]: which of the L context keys and A·W block keys a block row sees."""
    count = anchors.position.shape[1]
    key = torch.arange(length, device=anchors.position.device)
    context = (key < anchors.position[:, :, None]) & (key >= anchors.first[:, :, None])
    own = torch.eye(count, dtype=torch.bool, device=key.device).repeat_interleave(width, 0).repeat_interleave(width, 1)
    return torch.cat([context.repeat_interleave(width, 1), own.expand(len(context), -1, -1)], dim=2)


class Tiles(NamedTuple):
    """Which tiles of keys a tile of queries sees, and the other way round: numbers [R, 1, t] and lists [R, 1, t, "
    "t'], int32."""

    key_number: Tensor
    key_list: Tensor
    query_number: Tensor
    query_list: Tensor


def _tiles(number: Tensor, listed: Tensor) -> Tiles:
    """From how many key tiles [R, t] each query tile sees and which, in front of listed [R, t, t']."""
    mask = BlockMask.from_kv_blocks(number[:, None].int(), listed[:, None].int(), BLOCK_SIZE=(TILE, TILE))
    return Tiles(mask.kv_num_blocks, mask.kv_indices, mask.q_num_blocks, mask.q_indices)  # type: ignore[arg-type]


def block_tiles(anchors: Anchors, length: int, width: int) -> Tiles:
    """Tiles of dense_block_mask: a tile of block rows sees its own tile and the context tiles that its anchors need.

    Needs length and A·W to be multiples of TILE and W a divisor of it.
    """
    position, first = anchors.position, anchors.first
    rows, count = position.shape
    per_tile, context_tiles = TILE // width, length // TILE
    tiles = count * width // TILE
    low = first.view(rows, tiles, per_tile).amin(-1) // TILE
    high = (position.view(rows, tiles, per_tile).amax(-1) - 1).clamp(min=0) // TILE
    context = (high - low + 1).clamp(min=0)
    column = torch.arange(context_tiles + tiles, device=position.device)
    own = context_tiles + torch.arange(tiles, device=position.device)
    listed = torch.where(column < context[..., None], low[..., None] + column, own[None, :, None])
    return _tiles(context + 1, torch.where(column <= context[..., None], listed, 0))


def row_tiles(first: Tensor) -> Tiles:
    """Tiles of dense_row_mask; the row length must be a multiple of TILE."""
    tiles = first.shape[1] // TILE
    low = first[:, ::TILE].long() // TILE
    column = torch.arange(tiles, device=first.device)
    number = column[None, :] - low + 1
    return _tiles(number, torch.where(column < number[..., None], low[..., None] + column, 0))


def flex_mask(tiles: Tiles, lengths: tuple[int, int], visible: Callable) -> BlockMask:
    """Tiles and a predicate (batch, head, query, key) as a mask of flex attention for (queries, keys).

    Made inside the compiled function, from tensors that are its inputs: a new predicate does not compile anew.
    """
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=tiles.key_number,
        kv_indices=tiles.key_list,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=tiles.query_number,
        q_indices=tiles.query_list,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=visible,
    )


def flex_block_mask(tiles: Tiles, anchors: Anchors, length: int, width: int) -> BlockMask:
    """dense_block_mask for flex attention."""
    position, first = anchors.position, anchors.first

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block = row // width
        seen = (key < position[batch, block]) & (key >= first[batch, block])
        return seen | ((key >= length) & ((key - length) // width == block))

    queries = position.shape[1] * width
    return flex_mask(tiles, (queries, length + queries), visible)


def flex_row_mask(tiles: Tiles, first: Tensor) -> BlockMask:
    """dense_row_mask for flex attention."""

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (key >= first[batch, row])

    return flex_mask(tiles, (first.shape[1], first.shape[1]), visible)


def dense_row_mask(first: Tensor) -> Tensor:
    """Boolean [R, L, L] of packed rows for the target: causal inside a conversation. first [R, L]."""
    at = torch.arange(first.shape[1], device=first.device)
    return (at[None, None, :] <= at[None, :, None]) & (at[None, None, :] >= first[:, :, None])
