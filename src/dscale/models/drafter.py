"""The DFlash drafter (arXiv 2602.06036): a block of tokens in one pass, conditioned on hidden states of the target.

context row   c = hidden_norm(fc(taps))           one per committed token; its keys and values for every draft layer
              k = rotate(k_norm(Wk c)), v = Wv c  are projected at once, as soon as the target has seen the token
block rows    x = embed([anchor, mask, … mask])   attend over the context rows and, in both directions, each other
drafts        argmax of the target's LM head on the final norm of the block rows
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dscale.config import DrafterConfig
from dscale.kernels.norm import rms_norm_torch
from dscale.kernels.rotary import write_context
from dscale.layers.attention import Attention, head_shape
from dscale.layers.linear import Linear
from dscale.layers.ranks import ALONE, Ranks
from dscale.models.decoder import DecoderLayer, DecoderStack, Norm


class Drafter(nn.Module):
    """fc, hidden_norm and a bidirectional decoder stack; embedding and LM head are the target's.

    ranks: those that share the stack, with config as of DecoderLayer; fc is whole on each. fp8: its projections are in
    eight bits (models/fp8.py).
    """

    fp8 = False

    def __init__(self, config: DrafterConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        h = config.decoder.hidden_size
        self.fc = Linear(len(config.taps) * h, h)
        self.hidden_norm = Norm(h, config.decoder.norm_eps)
        self.stack = DecoderStack(config.decoder, ranks)
        self.context_projection: Linear | None = None

    def context(self, taps: Tensor) -> Tensor:
        """Target taps [R, T·H] → context features c [R, H]."""
        return self.hidden_norm(self.fc(taps))

    def layer_context_kv(self, layer: int, context: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, not yet rotated) and values of one layer for context rows: each [R, kv, d]."""
        decoder = self.config.decoder
        block: DecoderLayer = self.stack.layers[layer]  # type: ignore[assignment]
        queries = decoder.num_heads * decoder.head_dim
        bias = block.qkv.bias[queries:] if block.qkv.bias is not None else None
        kv = nn.functional.linear(context, block.qkv.weight[queries:], bias)
        k, v = kv.view(-1, 2, decoder.num_kv_heads, decoder.head_dim).unbind(1)
        return (k if block.k_norm is None else rms_norm_torch(k, block.k_norm.weight, block.k_norm.eps)), v

    def prepare(self) -> None:
        """Join the context key/value weights of all layers into one matrix, for `write_context`. Call after loading,
        and again when the weights have changed: it stays where it is, for steps captured before. In eight bits they
        are joined for good."""
        if self.fp8:
            return
        decoder = self.config.decoder
        queries = decoder.num_heads * decoder.head_dim
        layers: list[DecoderLayer] = list(self.stack.layers)  # type: ignore[arg-type]
        with torch.no_grad():
            weight = torch.cat([layer.qkv.weight[queries:] for layer in layers])
            joined = self.context_projection
            if joined is None or joined.weight.dtype != weight.dtype or joined.weight.device != weight.device:
                joined = Linear(weight.shape[1], weight.shape[0], bias=decoder.qkv_bias)
                joined.to(weight)
            joined.weight.copy_(weight)
            if decoder.qkv_bias:
                joined.bias.copy_(torch.cat([layer.qkv.bias[queries:] for layer in layers]))  # type: ignore[index, union-attr]
            joined.requires_grad_(False)
            joined.packed = None
        self.context_projection = joined

    def write_context(self, taps: Tensor, cache: Tensor, angles: Tensor, slots: Tensor) -> None:
        """Project the taps [R, T·H] of verified rows into every draft layer's cache at slots [R].

        cache [layers, 2, pages, kv, page, d]; angles [R, d] are the rotary rows of the positions.
        """
        if self.context_projection is None:
            self.prepare()
        assert self.context_projection is not None
        decoder = self.config.decoder
        kv = self.context_projection(self.context(taps))
        kv = kv.view(-1, decoder.num_layers, 2, decoder.num_kv_heads, decoder.head_dim)
        norms = [layer.k_norm.weight for layer in self.stack.blocks if layer.k_norm is not None]
        write_context(kv, angles, head_shape(decoder), cache, slots, norms or None)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        """Embedded block rows [R, H] → hidden [R, H] after the final norm, ready for the target's LM head."""
        hidden, _ = self.stack(x, attend)
        return hidden
