"""How target and drafter attend over packed rows when training; masks come from anchors.py.

Both take a mask of one of two kinds: a boolean tensor (any device, for small sizes) or a flex BlockMask (CUDA).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dscale.config import DecoderConfig
from dscale.kernels.rotary import rotate, split_rotate
from dscale.layers.attention import Attention, HeadNorms, head_shape
from dscale.models.drafter import Drafter

Mask = Tensor | BlockMask


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """q [R, heads, Q, d], k and v [R, kv, K, d] → [R, heads, Q, d]; a boolean mask is [R, Q, K]."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=grouped)


def _heads_first(x: Tensor, rows: int) -> Tensor:
    """[R·S, heads, d] → [R, heads, S, d]."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2)


class PackedAttention(Attention):
    """The target over packed rows [R, L]; angles [R·L, d] are rotary rows of positions inside the conversations."""

    def __init__(self, config: DecoderConfig, angles: Tensor, rows: int, mask: Mask) -> None:
        self.shape, self.angles, self.rows, self.mask = head_shape(config), angles, rows, mask

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms) -> Tensor:
        q, k, v = split_rotate(qkv, self.angles, self.shape, norms.q, norms.k)
        r = self.rows
        out = masked_attention(_heads_first(q, r), _heads_first(k, r), _heads_first(v, r), self.mask)
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)


class BlockAttention(Attention):
    """The drafter over blocks [R, A·W]: keys are the context rows [R, L] (features c [R·L, H]), then the block rows."""

    def __init__(
        self, drafter: Drafter, context: Tensor, context_angles: Tensor, block_angles: Tensor, rows: int, mask: Mask
    ) -> None:
        self.drafter, self.context, self.rows, self.mask = drafter, context, rows, mask
        self.shape = head_shape(drafter.config.decoder)
        self.context_angles, self.block_angles = context_angles, block_angles

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms) -> Tensor:
        q, k, v = split_rotate(qkv, self.block_angles, self.shape, norms.q, norms.k)
        context_k, context_v = self.drafter.layer_context_kv(layer, self.context)
        context_k = rotate(context_k, self.context_angles, self.shape.interleaved)
        r = self.rows
        keys = torch.cat([_heads_first(context_k, r), _heads_first(k, r)], dim=2)
        values = torch.cat([_heads_first(context_v.to(v.dtype), r), _heads_first(v, r)], dim=2)
        out = masked_attention(_heads_first(q, r), keys, values, self.mask)
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)
