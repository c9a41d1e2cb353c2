"""Our draft network, over paged caches, against the plain one of plain_dflash.py; and the plain loop against itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dscale.config import PAGE_SIZE, AnchorLayout, DecoderConfig, DrafterConfig, RopeConfig
from dscale.kernels.attention import RaggedBatch
from dscale.layers.attention import PagedAttention
from dscale.layers.rotary import rotary_table
from dscale.models.drafter import Drafter
from tests.models.plain_dflash import PlainDrafter, decode, greedy

HIDDEN, PAGES = 48, 24
DECODER = DecoderConfig(
    vocab_size=97,
    hidden_size=HIDDEN,
    intermediate_size=80,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    qk_norm=True,
    rope=RopeConfig(theta=1000.0),
)
CONFIG = DrafterConfig(DECODER, block_size=8, taps=(0, 2, 3), mask_token_id=96, layout=AnchorLayout.MASKED)

VARIANTS = {
    "plain": CONFIG,
    "anchor-first": replace(CONFIG, layout=AnchorLayout.ANCHOR_FIRST),
    "no head norms": replace(CONFIG, decoder=replace(DECODER, qk_norm=False)),
    "interleaved": replace(CONFIG, decoder=replace(DECODER, rope=RopeConfig(theta=1000.0, style="interleaved"))),
    "one kv head": replace(CONFIG, decoder=replace(DECODER, num_kv_heads=1)),
    "windows": replace(CONFIG, decoder=replace(DECODER, windows=(5, None, 11))),
    "causal": replace(CONFIG, causal=True),
    "mixed": replace(CONFIG, decoder=replace(DECODER, windows=(9, None, 9), causal_layers=(True, False, True))),
    "causal windows": replace(CONFIG, causal=True, decoder=replace(DECODER, windows=(3, 20, None))),
}


def random_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """A drafter with every tensor random, norms included, so that a norm left out shows."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 2.0 / parameter.shape[1] ** 0.5)
    return drafter


def zlab_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The fused modules taken apart into the names of a z-lab checkpoint."""
    decoder = drafter.config.decoder
    q, kv = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    tensors = {
        "fc.weight": drafter.fc.weight,
        "hidden_norm.weight": drafter.hidden_norm.weight,
        "norm.weight": drafter.stack.norm.weight,
    }
    for index, layer in enumerate(drafter.stack.layers):
        parts = dict(zip("qkv", layer.qkv.weight.split([q, kv, kv]), strict=True))
        tensors |= {f"layers.{index}.self_attn.{name}_proj.weight": part for name, part in parts.items()}
        tensors[f"layers.{index}.self_attn.o_proj.weight"] = layer.output.weight
        gate, up = layer.gate_up.weight.chunk(2)
        tensors |= {f"layers.{index}.mlp.gate_proj.weight": gate, f"layers.{index}.mlp.up_proj.weight": up}
        tensors[f"layers.{index}.mlp.down_proj.weight"] = layer.down.weight
        tensors[f"layers.{index}.input_layernorm.weight"] = layer.input_norm.weight
        tensors[f"layers.{index}.post_attention_layernorm.weight"] = layer.post_norm.weight
        if decoder.qk_norm:
            tensors[f"layers.{index}.self_attn.q_norm.weight"] = layer.q_norm.weight
            tensors[f"layers.{index}.self_attn.k_norm.weight"] = layer.k_norm.weight
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def paged_blocks(drafter: Drafter, taps: list[Tensor], blocks: list[Tensor]) -> list[Tensor]:
    """Blocks [Q, H] of several requests through our network at once, their contexts on scattered pages."""
    decoder, rows = drafter.config.decoder, blocks[0].shape[0]
    cache = torch.full((decoder.num_layers, 2, PAGES, decoder.num_kv_heads, PAGE_SIZE, decoder.head_dim), 7.0)
    table = rotary_table(decoder.rope, decoder.head_dim, decoder.max_position, torch.device("cpu"))
    per_request = PAGES // len(blocks)
    page_table = torch.randperm(PAGES)[: per_request * len(blocks)].view(len(blocks), per_request).int()

    def slots(request: int, positions: Tensor) -> Tensor:
        return page_table[request, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE

    contexts = [len(tap) for tap in taps]
    for request, tap in enumerate(taps):
        for piece in torch.arange(len(tap)).split(9):  # several writes, as prefill chunks and verified rows come
            drafter.write_context(tap[piece], cache, table[piece], slots(request, piece))
    positions = [torch.arange(context, context + rows) for context in contexts]
    batch = RaggedBatch(
        positions=torch.cat(positions),
        slots=torch.cat([slots(request, position) for request, position in enumerate(positions)]),
        page_table=page_table,
        lanes=torch.arange(len(blocks)),
        starts=torch.arange(len(blocks) + 1) * rows,
        contexts=torch.tensor(contexts),
        max_rows=rows,
        max_context=max(contexts) + rows,
        causal=drafter.config.causal,
    )
    hidden = drafter(torch.cat(blocks), PagedAttention(decoder, cache, table, batch))
    return list(hidden.split(rows))


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_block_hidden_states_match_the_plain_network(variant: str, width: int) -> None:
    config = VARIANTS[variant]
    drafter = random_drafter(config)
    plain = PlainDrafter(zlab_tensors(drafter), config)
    taps = [torch.randn(length, len(config.taps) * HIDDEN) for length in (1, 16, 37)]
    blocks = [torch.randn(config.queries(width), HIDDEN) for _ in taps]
    with torch.no_grad():
        ours = paged_blocks(drafter, taps, blocks)
    for tap, block, got in zip(taps, blocks, ours, strict=True):
        expected = plain.block(tap, block)
        assert (got - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("changed", ["windows", "mixed", "interleaved", "causal", "no head norms"])
def test_every_variant_changes_the_answer(changed: str) -> None:
    """Guards the test above: a flag that the plain network ignored would be compared with itself."""
    drafter = random_drafter(CONFIG)
    tensors, taps, block = zlab_tensors(drafter), torch.randn(37, 3 * HIDDEN), torch.randn(8, HIDDEN)
    base = PlainDrafter(tensors, CONFIG).block(taps, block)
    other = PlainDrafter(tensors, VARIANTS[changed]).block(taps, block)
    assert (base - other).norm() / base.norm() > 1e-2


def test_layer_context_kv_is_what_write_context_writes() -> None:
    drafter = random_drafter(CONFIG)
    taps = torch.randn(5, 3 * HIDDEN)
    cache = torch.zeros(3, 2, 1, 2, PAGE_SIZE, 16)
    still = torch.cat([torch.ones(5, 8), torch.zeros(5, 8)], dim=-1)  # the angles of position 0: no rotation
    with torch.no_grad():
        drafter.write_context(taps, cache, still, torch.arange(5))
        for layer in range(3):
            k, v = drafter.layer_context_kv(layer, drafter.context(taps))
            torch.testing.assert_close(cache[layer, 0, 0, :, :5], k.transpose(0, 1), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(cache[layer, 1, 0, :, :5], v.transpose(0, 1), rtol=1e-5, atol=1e-5)


def tiny_target(seed: int = 3) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).float().eval()


def seeded_draw(logits: Tensor, position: int) -> int:
    """Gumbel-max with noise of the position alone, as a seeded request draws."""
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(position))
    return int((logits - torch.log(-torch.log(noise))).argmax())


@pytest.mark.parametrize("choose", [greedy, seeded_draw])
@pytest.mark.parametrize("layout", list(AnchorLayout))
def test_plain_loop_emits_the_targets_own_tokens(layout: AnchorLayout, choose) -> None:
    config = replace(CONFIG, layout=layout)
    target = tiny_target()
    plain = PlainDrafter(zlab_tensors(random_drafter(config)), config)
    prompt = [5, 17, 3, 88, 41]
    alone = decode(target, None, prompt, 24, choose=choose)
    fast = decode(target, plain, prompt, 24, choose=choose)
    assert fast.tokens == alone.tokens
    assert set(fast.drafted) == {config.width - 1}
    assert sum(fast.accepted) + len(fast.accepted) >= 23
    if choose is greedy:
        ids = torch.tensor([prompt])
        theirs = target.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert alone.tokens == theirs[0, len(prompt) :].tolist()


def test_prepared_again_the_joined_weight_stays_where_it_is() -> None:
    """A captured step goes on reading it, and it holds the weights of now."""
    drafter = Drafter(CONFIG)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter)
    drafter.prepare()
    joined = drafter.context_projection.weight
    address, before = joined.data_ptr(), joined.clone()
    with torch.no_grad():
        drafter.stack.blocks[1].qkv.weight.mul_(2)
    drafter.prepare()
    assert drafter.context_projection.weight.data_ptr() == address
    rows = joined.shape[0] // len(drafter.stack.blocks)
    assert torch.equal(joined[:rows], before[:rows])
    assert torch.equal(joined[rows : 2 * rows], before[rows : 2 * rows] * 2)
