"""The decoder that every supported family shares, as a target and as the body of a drafter.

Families differ by flags of DecoderConfig (qkv bias, per-head norms, windows, rotary scaling), not by code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from dscale.config import DecoderConfig, TargetConfig
from dscale.kernels import native
from dscale.kernels.activation import silu_mul
from dscale.kernels.native.stack import NativeStack
from dscale.kernels.norm import add_rms_norm, rms_norm
from dscale.layers.attention import Attention, HeadNorms, PagedAttention
from dscale.layers.linear import Linear
from dscale.layers.ranks import ALONE, JoinedHead, Ranks, SummedLinear


class Norm(nn.Module):
    """RMS norm weight [size] and its epsilon."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP, projections fused: qkv is [q | k | v], gate_up is [gate | up].

    ranks: those that share the layer; config then has the heads and the inner size of this rank. Norms and the gate may
    hand on rows in eight bits (models/fp8.py), which the projections then take.
    """

    def __init__(self, config: DecoderConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()

        def writes(inputs: int, bias: bool) -> Linear:
            """A projection into the residual stream."""
            return SummedLinear(inputs, h, bias, ranks) if ranks.size > 1 else Linear(inputs, h, bias)

        h, d, inner = config.hidden_size, config.head_dim, config.intermediate_size
        heads, kv = config.num_heads, config.num_kv_heads
        self.input_norm = Norm(h, config.norm_eps)
        self.qkv = Linear(h, (heads + 2 * kv) * d, bias=config.qkv_bias)
        self.q_norm = Norm(d, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(d, config.norm_eps) if config.qk_norm else None
        self.output = writes(heads * d, config.output_bias)
        self.post_norm = Norm(h, config.norm_eps)
        self.gate_up = Linear(h, 2 * inner, bias=config.mlp_bias)
        self.down = writes(inner, config.mlp_bias)
        self.gate: Callable[[Tensor], Any] = silu_mul

    def head_norms(self) -> HeadNorms:
        """Weights of the per-head norms, None where the family has none."""
        if self.q_norm is None or self.k_norm is None:
            return HeadNorms()
        return HeadNorms(self.q_norm.weight, self.k_norm.weight)

    def linears(self) -> dict[str, Linear]:
        """The four projections by name."""
        return {"qkv": self.qkv, "output": self.output, "gate_up": self.gate_up, "down": self.down}

    def native_weights(self) -> dict[str, Tensor | None]:
        """Packed weights, biases and norms, as NativeStack names them."""
        norms = self.head_norms()
        weights: dict[str, Tensor | None] = {"input_norm": self.input_norm.weight, "post_norm": self.post_norm.weight}
        weights |= {"q_norm": norms.q, "k_norm": norms.k}
        for name, linear in self.linears().items():
            assert linear.packed is not None
            weights |= {name: linear.packed.data, f"{name}_bias": linear.bias}
        return weights

    def attend_and_feed(self, index: int, normed: Tensor, residual: Tensor, attend: Attention) -> tuple[Tensor, Tensor]:
        """From normed rows [R, H] and the residual stream to (MLP output, residual before it is added)."""
        attended = self.output(attend(index, self.qkv(normed), self.head_norms()))
        normed, residual = self.post_norm.add(attended, residual)
        return self.down(self.gate(self.gate_up(normed))), residual


class DecoderStack(nn.Module):
    """The layers and the final norm; each layer's residual add is fused with the next layer's norm."""

    native: NativeStack | None = None

    def __init__(self, config: DecoderConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.layers = nn.ModuleList(DecoderLayer(config, ranks) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)

    def pack(self) -> None:
        """Hand all packed layers to the CPU kernel that runs them in one call. Call after their linears are packed."""
        config, blocks = self.config, self.blocks
        if self.ranks.size > 1:  # sums over ranks come between its parts
            return
        if not all(linear.packed is not None for block in blocks for linear in block.linears().values()):
            return
        causal = [int(one) for one in config.causal_layers] or [-1] * config.num_layers
        sizes = {
            "count": config.num_layers,
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "heads": config.num_heads,
            "kv": config.num_kv_heads,
            "size": config.head_dim,
            "interleaved": int(config.rope.style == "interleaved"),
            "bf16": int(self.norm.weight.dtype is torch.bfloat16),
        }
        windows = [config.window(index) or 0 for index in range(config.num_layers)]
        weights = [block.native_weights() for block in blocks]
        self.native = NativeStack(weights, windows, causal, self.norm.weight, sizes, config.norm_eps)

    @property
    def blocks(self) -> list[DecoderLayer]:
        """The layers, typed."""
        return cast(list[DecoderLayer], list(self.layers))

    def forward(self, x: Tensor, attend: Attention, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Rows x [R, H] → (hidden [R, H] after the final norm, taps [R, T·H] side by side or None)."""
        found = self._natively(x, attend, taps)
        if found is not None:
            return found
        normed, tapped = self._through(x, attend, taps, len(self.layers))
        return normed, _side_by_side(tapped)

    def fill(self, x: Tensor, attend: PagedAttention, taps: tuple[int, ...] = ()) -> Tensor | None:
        """As forward, for the cache and the taps alone, which it returns: what the last layer makes of its keys and
        values is not computed."""
        last = len(self.layers) - 1
        if last in taps:
            return self(x, attend, taps)[1]
        found = self._natively(x, attend, taps, hidden=False)
        if found is not None:
            return found[1]
        normed, tapped = self._through(x, attend, taps, last)
        block = self.blocks[last]
        attend.write(last, block.qkv(normed), block.head_norms())
        return _side_by_side(tapped)

    def _through(self, x: Tensor, attend: Attention, taps: tuple[int, ...], count: int) -> tuple[Tensor, list[Tensor]]:
        """Rows through the first `count` layers: normed for what follows them, and the taps among them."""
        blocks, tapped = self.blocks, []
        residual, normed = x, blocks[0].input_norm(x)
        for index, layer in enumerate(blocks[:count]):
            fed, residual = layer.attend_and_feed(index, normed, residual, attend)
            following = blocks[index + 1].input_norm if index + 1 < len(blocks) else self.norm
            normed, residual = following.add(fed, residual)
            if index in taps:
                tapped.append(residual)
        return normed, tapped

    def _natively(
        self, x: Tensor, attend: Attention, taps: tuple[int, ...], hidden: bool = True
    ) -> tuple[Tensor, Tensor | None] | None:
        """What the CPU kernel makes of these rows over the cache of `attend`; None where it cannot run them."""
        if self.native is None or not isinstance(attend, PagedAttention) or not native.usable(x):
            return None
        if attend.cache.dtype is not x.dtype:  # it reads no other
            return None
        return self.native.run(x, attend.cache, attend.angles, attend.batch, taps, hidden)


def _side_by_side(tapped: list[Tensor]) -> Tensor | None:
    return torch.cat(tapped, dim=-1) if tapped else None


class Target(nn.Module):
    """A target model: embedding, decoder, LM head (tied to the embedding or its own).

    ranks: those that share it, with config as of DecoderLayer; the embedding is whole on each.
    """

    def __init__(self, config: TargetConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        hidden, vocabulary = decoder.hidden_size, decoder.vocab_size
        self.embedding = nn.Parameter(torch.empty(vocabulary, hidden))
        self.stack = DecoderStack(decoder, ranks)
        self.head = JoinedHead(hidden, vocabulary, ranks) if ranks.size > 1 else Linear(hidden, vocabulary)
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding, or this rank's rows of it, where the config says so."""
        if self.config.tie_embeddings:
            head, rows = self.head, self.embedding
            if isinstance(head, JoinedHead):
                rows = nn.Parameter(rows[head.held.start : head.held.stop], requires_grad=False)
            head.weight = rows

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] → embeddings [..., H]."""
        return nn.functional.embedding(ids, self.embedding)

    def forward(self, ids: Tensor, attend: Attention, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Ids [R] → (hidden [R, H] after the final norm, taps [R, T·H] or None). Logits: `logits(hidden)`."""
        return self.stack(self.embed(ids), attend, taps)

    def fill(self, ids: Tensor, attend: PagedAttention, taps: tuple[int, ...] = ()) -> Tensor | None:
        """Ids [R] into the cache that `attend` writes; the taps [R, T·H] or None. See DecoderStack.fill."""
        return self.stack.fill(self.embed(ids), attend, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [R, H] → logits [R, V] in the model's dtype."""
        return self.head(hidden)
