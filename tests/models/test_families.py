"""Every family's logits against transformers on tiny random checkpoints, read from disk; and what configs may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dscale.config import InputError
from dscale.kernels.attention import RaggedBatch
from dscale.layers.attention import DenseAttention, PagedAttention
from dscale.layers.rotary import rotary_table
from dscale.models.checkpoint import SafetensorsCheckpoint
from dscale.models.decoder import Target
from dscale.models.families import target_config, to_hf_config
from dscale.models.loader import build_target, folder_config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-llama3": ("llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("qwen2", SLIDING),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_theta": 1e6, **YARN, "beta_fast": 16.0}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-sliding": ("qwen3", {"head_dim": 16, **SLIDING}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "qwen3-yarn": ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_theta": 1e6, **YARN, "truncate": False}}),
}


def oracle(family: str, changes: dict[str, Any]) -> torch.nn.Module:
    """transformers' own model, random, with biases and norms that are not at their trivial starting values."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    torch.manual_seed(3)
    model = model_class(config_class(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + float("norm" in name))
    return model


def load(folder: Path) -> Target:
    """Our model from a saved folder."""
    return build_target(folder_config(folder), SafetensorsCheckpoint(folder), torch.float32, "cpu")


def dense_logits(target: Target, ids: Tensor) -> Tensor:
    """Logits [S, V] over one whole sequence."""
    decoder = target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, len(ids), ids.device)
    hidden, _ = target(ids, DenseAttention(decoder, table, 1, len(ids)))
    return target.logits(hidden)


def paged_logits(target: Target, ids: Tensor, chunks: tuple[int, ...]) -> Tensor:
    """Logits [S, V] through a paged cache, in chunks, over pages that lie out of order."""
    decoder = target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, len(ids), ids.device)
    cache = torch.full((decoder.num_layers, 2, 8, decoder.num_kv_heads, 16, decoder.head_dim), float("nan")).nan_to_num(
        9
    )
    pages = torch.tensor([[5, 1, 6, 3]], dtype=torch.int32)
    done, parts = 0, []
    for count in chunks:
        positions = torch.arange(done, done + count)
        batch = RaggedBatch(
            positions=positions,
            slots=pages[0, positions // 16].long() * 16 + positions % 16,
            page_table=pages,
            lanes=torch.tensor([0]),
            starts=torch.tensor([0, count]),
            contexts=torch.tensor([done]),
            max_rows=count,
            max_context=done + count,
        )
        hidden, _ = target(ids[done : done + count], PagedAttention(decoder, cache, table, batch))
        parts.append(target.logits(hidden))
        done += count
    return torch.cat(parts)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert difference < 1e-4, f"logits differ by {difference:.2e} relative"


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = oracle(family, changes)
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    ids = torch.randint(0, 96, (45,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
        assert_close(dense_logits(target, ids), theirs)
        assert_close(paged_logits(target, ids, (21, 1, 16, 7)), theirs)
    assert target.config.family == family
    assert (target.head.weight is target.embedding) == target.config.tie_embeddings


def test_taps_are_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    model = oracle("qwen3", {"head_dim": 16})
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    ids = torch.arange(20)
    decoder = target.config.decoder
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
        table = rotary_table(decoder.rope, decoder.head_dim, 20, ids.device)
        hidden, taps = target(ids, DenseAttention(decoder, table, 1, 20), taps=(0, 2))
    assert taps is not None
    torch.testing.assert_close(taps[:, :32], states[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(taps[:, 32:], states[3][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden, states[4][0], rtol=1e-4, atol=1e-5)


def test_sharded_checkpoint_equals_single_file(tmp_path: Path) -> None:
    model = oracle("qwen2", {})
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    for (name, left), (_, right) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def base(**changes: Any) -> dict[str, Any]:
    """A llama config.json in the form before transformers 5."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    return {key: value for key, value in (SIZES | config | changes).items() if value is not None}


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3", **{key: value for key, value in LLAMA3.items() if key != "rope_type"}},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_both_forms_of_rope_scaling_read_the_same(scaling: dict[str, Any]) -> None:
    old = target_config(base(rope_scaling=scaling))
    kind = scaling.get("rope_type") or scaling["type"]
    plain = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
    new = target_config(base(rope_theta=None, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **plain}))
    assert old == new
    assert (old.decoder.rope.scaling, old.decoder.rope.theta) == (kind, 5e5)


def test_yarn_reaches_its_stretched_context() -> None:
    config = target_config(base(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}))
    assert config.decoder.max_position == 256


def test_head_size_follows_the_family_when_the_config_is_silent() -> None:
    assert target_config(base()).decoder.head_dim == 8
    assert target_config(base(model_type="qwen3", architectures=["Qwen3ForCausalLM"])).decoder.head_dim == 128


def test_windows_only_where_the_config_switches_them_on() -> None:
    qwen = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "max_window_layers": 2}
    assert target_config(base(**qwen, use_sliding_window=False)).decoder.windows == ()
    assert target_config(base(**qwen, use_sliding_window=True)).decoder.windows == (None, None, 9, 9)


def test_end_tokens_join_both_files_without_repeats() -> None:
    config = target_config(base(eos_token_id=[5, 7]), "here", {"eos_token_id": [7, 11]})
    assert config.eos_token_ids == (5, 7, 11)


def test_written_config_reads_back(tmp_path: Path) -> None:
    for family, changes in CASES.values():
        model = oracle(family, changes)
        config = target_config(json.loads(model.config.to_json_string(use_diff=False)))
        assert target_config(to_hf_config(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "'qwen3_moe' is not supported"),
        ({"model_type": "mamba"}, "'mamba' is not supported; allowed are the dense families llama, qwen2, qwen3"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        ({"model_type": "qwen3"}, "contradicts architectures 'LlamaForCausalLM'"),
        ({"num_experts": 8}, "num_experts means mixture of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config means quantised"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; allowed is silu"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling linear needs factor"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta .* differs"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "yarn", "factor": 2}},
            r"rope_parameters \(yarn\) contradicts rope_scaling \(linear\)",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor below 1 is not supported"),
        ({"num_key_value_heads": 3}, "num_heads: 4 is not a multiple of num_kv_heads 3"),
    ],
)
def test_unsupported_configs_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        target_config(base(**changes), "here")
    assert "\n" not in str(caught.value)
