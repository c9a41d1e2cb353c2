"""The whole decoder in one native call gives, bit for bit, what its layers give one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dscale.config import DecoderConfig
from dscale.engine.placement import pack_weights
from dscale.kernels import native
from dscale.kernels.attention import RaggedBatch
from dscale.layers.attention import PagedAttention
from dscale.layers.rotary import rotary_table
from dscale.models.decoder import Target
from tests.conftest import tiny_config


def ragged(counts: list[int], contexts: list[int], pages: int) -> RaggedBatch:
    table = torch.randperm(pages - 1)[: 4 * len(counts)].view(len(counts), 4).int() + 1
    positions = torch.cat([torch.arange(c, c + n) for n, c in zip(counts, contexts, strict=True)])
    lanes = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = table[lanes, positions // 16].long() * 16 + positions % 16
    starts = torch.tensor([0, *counts]).cumsum(0)
    return RaggedBatch(
        positions, slots, table, torch.arange(len(counts)), starts, torch.tensor(contexts), max(counts), 64
    )


def rows(config: DecoderConfig, dtype: torch.dtype) -> tuple[RaggedBatch, Tensor, Tensor, Tensor]:
    """A batch of 27 rows: what it is, rotary table, a cache full of something, token ids."""
    batch = ragged([3, 1, 7, 16], [20, 0, 33, 5], pages=40)
    table = rotary_table(config.rope, config.head_dim, 64, torch.device("cpu"))
    cache = torch.randn(config.num_layers, 2, 40, config.num_kv_heads, 16, config.head_dim).to(dtype)
    return batch, table, cache, torch.randint(0, config.vocab_size, (27,))


@pytest.mark.skipif(not native.status().startswith("loaded"), reason=f"native kernels: {native.status()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2", {"output_bias": True}), ("qwen3", {"windows": (None, 8, None, 5, None)})],
)
def test_stack_equals_its_layers(family, changes, dtype, tiny_target):
    torch.manual_seed(1)
    target: Target = tiny_target(family, **changes).to(dtype)
    config: DecoderConfig = tiny_config(family, **changes).decoder
    pack_weights(target, None)
    assert target.stack.native is not None
    batch, table, cache, ids = rows(config, dtype)
    with torch.inference_mode():
        first, second = cache.clone(), cache.clone()
        hidden, taps = target(ids, PagedAttention(config, first, table, batch), (0, 2, 3))
        target.stack.native = None
        plain_hidden, plain_taps = target(ids, PagedAttention(config, second, table, batch), (0, 2, 3))
    assert torch.equal(hidden, plain_hidden)
    assert torch.equal(taps, plain_taps)
    assert torch.equal(first, second)
    assert not torch.equal(first, cache)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.skipif(
    not native.status().startswith("loaded"), reason=f"native kernels: {native.status()}"))])  # fmt: skip
@pytest.mark.parametrize("taps", [(), (0, 2, 3), (1, 4)], ids=["no taps", "taps before", "the last layer tapped"])
def test_filling_the_cache_leaves_out_what_only_hidden_rows_need(packed, taps, tiny_target):
    torch.manual_seed(2)
    target: Target = tiny_target("qwen3")
    config: DecoderConfig = tiny_config("qwen3").decoder
    assert config.num_layers == 5
    if packed:
        pack_weights(target, None)
        assert target.stack.native is not None
    batch, table, cache, ids = rows(config, torch.float32)
    fed: list[int] = []
    target.stack.blocks[-1].down.register_forward_hook(lambda *_: fed.append(1))
    with torch.inference_mode():
        first, second = cache.clone(), cache.clone()
        filled = target.fill(ids, PagedAttention(config, first, table, batch), taps)
        assert fed == ([1] if taps[-1:] == (4,) and not packed else [])
        _, tapped = target(ids, PagedAttention(config, second, table, batch), taps)
    assert torch.equal(first, second)
    assert not torch.equal(first[-1], cache[-1])
    assert (filled is None and tapped is None) if not taps else torch.equal(filled, tapped)
