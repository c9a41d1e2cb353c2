"""Random models of known shapes: sizes, sane activations, and an engine that runs on them."""

from __future__ import annotations

import pytest
import torch

from dscale import LLM, SamplingParams
from dscale.config import InputError
from dscale.layers.attention import DenseAttention
from dscale.layers.rotary import rotary_table
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.drafter_config import fit_problems
from dscale.models.shapes import SHAPES, drafter_shape, fill, random_drafter_of, random_shape


def parameters(model: torch.nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    ("name", "target", "drafter"),
    [("qwen3-8b", 8_190_735_360, 1_048_626_432), ("qwen3-4b", 4_022_468_096, 537_427_200)],
)
def test_sizes(name: str, target: int, drafter: int) -> None:
    """Drafters: dflash.md, Known sizes. Targets: as the released checkpoints count."""
    config = SHAPES[name]
    with torch.device("meta"):
        model, draft = Target(config), Drafter(drafter_shape(config))
    assert parameters(model) == target
    assert parameters(draft) == drafter
    assert draft.config.taps == (1, 9, 17, 25, 33)
    assert draft.config.mask_token_id == 151669
    assert draft.config.width == 16
    assert fit_problems(draft.config, config) == []


def test_activations_stay_sane_in_bfloat16() -> None:
    """Thirty-six layers: no growth of the stream, logits of the stated spread."""
    config = SHAPES["tiny"]
    deep = type(config)(config.family, type(config.decoder)(2000, 256, 512, 36, 4, 2, 64, qk_norm=True), False)
    with torch.device("meta"):
        model = Target(deep)
    fill(model, 36, torch.bfloat16, "cpu", seed=0)
    table = rotary_table(deep.decoder.rope, 64, 40, torch.device("cpu"))
    ids = torch.randint(2000, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden, taps = model(ids, DenseAttention(deep.decoder, table, 1, 40), taps=(5, 35))
        logits = model.logits(hidden).float()
    assert taps is not None
    early, late = taps.float().view(40, 2, 256).std(dim=(0, 2)).tolist()
    assert 0.05 < early < late < 5
    assert 1.0 < float(logits.std()) < 4.0
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_seeded_and_without_a_tokenizer() -> None:
    one, other = (random_shape("random:tiny", torch.float32, seed=seed) for seed in (0, 1))
    again = random_shape("random:tiny", torch.float32, seed=0)
    assert torch.equal(one.model.embedding, again.model.embedding)
    assert not torch.equal(one.model.embedding, other.model.embedding)
    assert one.model.head.weight is one.model.embedding
    blocks = one.model.stack.blocks
    assert not torch.equal(blocks[0].qkv.weight, blocks[1].qkv.weight)
    with pytest.raises(InputError, match="random:tiny: has no tokenizer"):
        _ = one.tokenizer
    assert random_drafter_of(one.config, torch.float32).config.taps == (1, 2, 3)


def test_unknown_shape() -> None:
    with pytest.raises(InputError, match=r"random:huge: no such shape; allowed are random:qwen3-8b"):
        LLM("random:huge")


def test_engine_from_a_name() -> None:
    """Token ids in, token ids out; speculation on random weights changes no token either."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(30))]

    def answers(policy: str) -> list[list[int]]:
        llm = LLM("random:tiny", predictor="random", policy=policy, dtype="float32", device="cpu", max_model_len=256)
        return [one.outputs[0].token_ids for one in llm.generate(prompt_token_ids=prompts, sampling_params=params)]

    plain = answers("off")
    assert answers("dvl") == answers("full") == plain
    with pytest.raises(InputError, match="has no tokenizer"):
        LLM("random:tiny", policy="off", device="cpu").generate("text", params)
