"""A plain DFlash, written from design formulas only: dense, no cache, one request, one loop. The oracle of the tests.

It reads tensors by their z-lab names and takes nothing from dscale but the configuration dataclasses. Slow on purpose:
every step runs the target over the whole text again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dscale.config import AnchorLayout, DrafterConfig

Choose = Callable[[Tensor, int], int]  # (logits [V], absolute position of the token to choose) → token id


@dataclass
class Decoded:
    """What one request produced: the new tokens, and per step how many drafts were verified and accepted."""

    tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def greedy(logits: Tensor, position: int) -> int:
    """The highest logit; position is not used."""
    return int(logits.argmax())


def read_target(target: nn.Module, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Transformers model over ids (length S) → (logits [S, V], taps [S, T·H]), float32, the whole text at once."""
    with torch.no_grad():
        out = target(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.logits[0], torch.cat([out.hidden_states[layer + 1][0] for layer in taps], dim=-1)


class PlainDrafter:
    """The draft network over a dict of z-lab tensors. default rotary scaling only."""

    def __init__(self, tensors: dict[str, Tensor], config: DrafterConfig) -> None:
        self.tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self.config = config

    def block(self, taps: Tensor, x: Tensor) -> Tensor:
        """Committed taps [S, T·H] and embedded block rows x [Q, H] → hidden [Q, H] after the last norm."""
        decoder = self.config.decoder
        context = self._norm(taps @ self.tensors["fc.weight"].T, "hidden_norm.weight")
        for layer in range(decoder.num_layers):
            prefix = f"layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm.weight")
            causal = decoder.causal_layers[layer] if decoder.causal_layers else self.config.causal
            x = x + self._attention(prefix + "self_attn.", context, normed, decoder.window(layer), causal)
            normed = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate = normed @ self.tensors[prefix + "mlp.gate_proj.weight"].T
            up = normed @ self.tensors[prefix + "mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ self.tensors[prefix + "mlp.down_proj.weight"].T
        return self._norm(x, "norm.weight")

    def _attention(self, prefix: str, context: Tensor, normed: Tensor, window: int | None, causal: bool) -> Tensor:
        decoder, length, rows = self.config.decoder, context.shape[0], normed.shape[0]
        position = torch.arange(length + rows)
        queries = self._heads(normed, prefix, "q", decoder.num_heads, position[length:])
        keys = self._heads(torch.cat([context, normed]), prefix, "k", decoder.num_kv_heads, position)
        values = torch.cat([context, normed]) @ self.tensors[prefix + "v_proj.weight"].T
        values = values.view(length + rows, decoder.num_kv_heads, decoder.head_dim)
        seen = torch.ones(rows, length + rows, dtype=torch.bool)
        if causal:
            seen &= position[None, :] <= position[length:, None]
        if window is not None:
            seen &= position[None, :] > position[length:, None] - window
        heads = []
        for head in range(decoder.num_heads):
            shared = head // decoder.group
            scores = queries[:, head] @ keys[:, shared].T / decoder.head_dim**0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            heads.append(weights @ values[:, shared])
        return torch.cat(heads, dim=-1) @ self.tensors[prefix + "o_proj.weight"].T

    def _heads(self, x: Tensor, prefix: str, which: str, count: int, position: Tensor) -> Tensor:
        """Project rows x, norm each head where the checkpoint has that norm, rotate by position: [R, count, d]."""
        projected = x @ self.tensors[f"{prefix}{which}_proj.weight"].T
        projected = projected.view(x.shape[0], count, self.config.decoder.head_dim)
        if self.config.decoder.qk_norm:
            projected = self._norm(projected, f"{prefix}{which}_norm.weight")
        return self._rotate(projected, position)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config.decoder.norm_eps) * self.tensors[name]

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate pairs (i, i + d/2), or neighbours where the style says so, as complex numbers."""
        rope, d = self.config.decoder.rope, self.config.decoder.head_dim
        assert rope.scaling == "default"
        frequency = 1.0 / rope.theta ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        turn = torch.polar(torch.ones(len(position), d // 2), (position[:, None] * frequency).float())[:, None]
        if rope.style == "interleaved":
            return torch.view_as_real(torch.complex(x[..., ::2], x[..., 1::2]) * turn).flatten(-2)
        turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)


def draft(drafter: PlainDrafter, target: nn.Module, taps: Tensor, anchor: int, width: int) -> list[int]:
    """The W-1 drafts after the anchor, which stands at position len(taps) and has no taps yet."""
    config = drafter.config
    first = 0 if config.layout is AnchorLayout.ANCHOR_FIRST else 1  # the first slot whose guess is used
    queries = width - 1 + first
    ids = torch.tensor([anchor] + [config.mask_token_id] * (queries - 1))
    with torch.no_grad():
        hidden = drafter.block(taps, target.get_input_embeddings()(ids))
        logits = target.get_output_embeddings()(hidden)
    return logits[first:].argmax(dim=-1).tolist()


def decode(
    target: nn.Module,
    drafter: PlainDrafter | None,
    prompt: list[int],
    max_tokens: int,
    width: int | None = None,
    choose: Choose = greedy,
) -> Decoded:
    """Speculative decoding of one prompt; without a drafter one token a step. End tokens are not looked at.

    A draft is accepted when it is the token that `choose` takes from the target at that position. The last step may
    overrun max_tokens: its tokens are cut, its counts are not.
    """
    taps_wanted = drafter.config.taps if drafter else (0,)
    width = (width or drafter.config.width) if drafter else 1
    text, result = list(prompt), Decoded()
    logits, taps = read_target(target, text, taps_wanted)
    anchor = choose(logits[-1], len(text))
    result.tokens.append(anchor)
    while len(result.tokens) < max_tokens:
        drafts = draft(drafter, target, taps, anchor, width) if drafter else []
        logits, taps = read_target(target, [*text, anchor, *drafts], taps_wanted)
        chosen: list[int] = []
        for row in range(width):
            chosen.append(choose(logits[len(text) + row], len(text) + row + 1))
            if row == width - 1 or chosen[-1] != drafts[row]:
                break
        text += [anchor, *chosen[:-1]]
        taps, anchor = taps[: len(text)], chosen[-1]
        result.tokens += chosen
        result.drafted.append(len(drafts))
        result.accepted.append(len(chosen) - 1)
    result.tokens = result.tokens[:max_tokens]
    return result
