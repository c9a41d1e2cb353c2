"""DScale's engine against the plain loop of tests/models/plain_dflash.py: tokens, and accepted drafts step by step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dscale import LLM, SamplingParams
from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, RopeConfig
from dscale.models.drafter_checkpoint import random_drafter, save_drafter
from dscale.speculation.noise import gumbel_noise
from tests.models.plain_dflash import Choose, PlainDrafter, decode, greedy
from tests.oracle.make_pair import save_tokenizer

VOCABULARY, TOKENS = 6, 40  # few tokens, so that random drafts are accepted now and then
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "num_hidden_layers": 4,
}
PROMPTS = [[1, 3, 2], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1], [3] * 33]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random transformers model saved as a folder with a tokenizer."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return folder


def drafter_of(layout: AnchorLayout) -> DrafterConfig:
    decoder = DecoderConfig(VOCABULARY, 48, 64, 2, 4, 2, 16, max_position=128, qk_norm=True, rope=RopeConfig(5000.0))
    return DrafterConfig(decoder, 8, (0, 2), VOCABULARY - 1, layout)


def noisy(seed: int, temperature: float, logits: Tensor, position: int) -> int:
    """Gumbel-max with the engine's noise."""
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.arange(len(logits)))[0]
    return int((logits / temperature + noise).argmax())


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("layout", list(AnchorLayout))
def test_engine_takes_the_same_steps_as_the_plain_loop(
    target_folder: Path, tmp_path: Path, layout: AnchorLayout, width: int, sampled: bool
) -> None:
    """The engine starts with the last prompt token as its anchor and the plain loop with the first new token, so the
    engine is given that token too."""
    drafter = random_drafter(drafter_of(layout), seed=8)
    folder = save_drafter(drafter, tmp_path, dtype=torch.float32)
    plain = PlainDrafter(load_file(folder / "model.safetensors"), drafter.config)
    oracle = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    choose: Choose = partial(noisy, 21, 0.8) if sampled else greedy
    expected = [decode(oracle, plain, prompt, TOKENS, width, choose) for prompt in PROMPTS]

    llm = LLM(
        str(target_folder), drafter=str(folder), predictor=None, policy="full", width=width, dtype="float32",
        device="cpu", num_pages=32, max_requests=2,
    )  # fmt: skip
    params = SamplingParams(temperature=0.8 if sampled else 0.0, seed=21, max_tokens=TOKENS - 1, ignore_eos=True)
    extended = [[*prompt, result.tokens[0]] for prompt, result in zip(PROMPTS, expected, strict=True)]
    outputs = llm.generate(prompt_token_ids=extended, sampling_params=params)

    for output, result in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == result.tokens[1:]
        records = output.metrics.records
        assert [record.drafted for record in records] == result.drafted
        assert [record.accepted for record in records[:-1]] == result.accepted[:-1]
        assert records[-1].accepted == min(result.accepted[-1], records[-1].emitted)
        assert 1 + sum(record.emitted for record in records) == TOKENS
    assert sum(sum(result.accepted) for result in expected) > 10  # else the comparison says little
