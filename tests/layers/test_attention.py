"""Paged attention of drafters that mix causal and bidirectional layers, against a mask written out by hand."""

from __future__ import annotations

import torch

from dscale.config import DecoderConfig
from dscale.kernels.attention import RaggedBatch
from dscale.kernels.rotary import split_rotate
from dscale.layers.attention import HeadNorms, PagedAttention, head_shape
from dscale.layers.rotary import rotary_table

CONFIG = DecoderConfig(
    64, 32, 48, 2, num_heads=2, num_kv_heads=1, head_dim=16, windows=(4, None), causal_layers=(True, False)
)
CONTEXT, BLOCK = 5, 6


def test_each_layer_has_its_own_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, CONTEXT + BLOCK, (2 + 2) * 16, generator=generator)
    table = rotary_table(CONFIG.rope, 16, 32, torch.device("cpu"))
    cache = torch.zeros(2, 2, 1, 1, 16, 16)
    for start, count in ((0, CONTEXT), (CONTEXT, BLOCK)):
        positions = torch.arange(start, start + count)
        batch = RaggedBatch(
            positions=positions,
            slots=positions,
            page_table=torch.zeros(1, 1, dtype=torch.int32),
            lanes=torch.tensor([0]),
            starts=torch.tensor([0, count]),
            contexts=torch.tensor([start]),
            max_rows=count,
            max_context=start + count,
            causal=False,
        )
        attend = PagedAttention(CONFIG, cache, table, batch)
        outputs = [attend(layer, rows[layer, start : start + count], HeadNorms()) for layer in range(2)]
    for layer, output in enumerate(outputs):
        torch.testing.assert_close(output, by_hand(layer, rows[layer], table), rtol=1e-5, atol=1e-5)
    assert (outputs[0] - by_hand(1, rows[0], table)).abs().max() > 0.1


def by_hand(layer: int, qkv: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Attention of the block rows: layer 0 causal with a window of 4, layer 1 over everything."""
    q, k, v = split_rotate(qkv, table[: len(qkv)], head_shape(CONFIG))
    scores = torch.einsum("rhd,sd->hrs", q, k[:, 0]) / 4.0
    row, column = torch.arange(len(qkv))[:, None], torch.arange(len(qkv))[None, :]
    seen = ((column <= row) & (row - column < 4)) if layer == 0 else torch.ones(len(qkv), len(qkv), dtype=torch.bool)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hrs,sd->rhd", weights, v[:, 0]).flatten(1)[CONTEXT:]
