"""GGUF files: logits of the same weights, every quantisation, rope keys, tokenizers, bad input."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from dscale.config import InputError, RopeConfig
from dscale.layers.rotary import inverse_frequencies
from dscale.models.checkpoint import tensors_of
from dscale.models.decoder import Target
from dscale.models.families import target_pieces
from dscale.models.gguf_reader import GGUFCheckpoint, gguf_config
from dscale.models.gguf_tokenizer import gguf_tokenizer
from dscale.models.loader import load_target
from tests.models.gguf_files import add_byte_level_tokenizer, add_key, write_gguf
from tests.models.test_families import dense_logits

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
IDS = torch.arange(30) % 64


def named(target: Target) -> dict[str, torch.Tensor]:
    """A target's tensors under Hugging Face names."""
    return dict(tensors_of(target, target_pieces(target.config), target.config.decoder))


def with_tokenizer(writer: GGUFWriter) -> None:
    add_byte_level_tokenizer(writer, chat_template=TEMPLATE)


def test_file_gives_the_logits_of_its_weights(family: str, tiny_target, tmp_path: Path) -> None:
    target = tiny_target(family, eos_token_ids=(1,))
    path = write_gguf(tmp_path / "tiny.gguf", target.config, named(target), metadata=with_tokenizer)
    loaded = load_target(str(path), torch.float32)
    assert loaded.config.decoder == target.config.decoder
    assert (loaded.config.family, loaded.config.eos_token_ids) == (family, (1,))
    torch.testing.assert_close(dense_logits(loaded.model, IDS), dense_logits(target, IDS), rtol=0, atol=0)


def test_untied_head_and_biases_are_found_by_their_tensors(tiny_target, tmp_path: Path) -> None:
    target = tiny_target("llama", tie_embeddings=False, qkv_bias=True, output_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path / "tiny.gguf", target.config, named(target), metadata=with_tokenizer)
    loaded = load_target(str(path), torch.float32)
    assert not loaded.config.tie_embeddings
    torch.testing.assert_close(dense_logits(loaded.model, IDS), dense_logits(target, IDS), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantised_weights_are_close_to_the_originals(kind: str, tiny_target, tmp_path: Path) -> None:
    target = tiny_target("llama", hidden_size=64, intermediate_size=64)
    quantisation = GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "tiny.gguf", target.config, named(target), quantisation)
    checkpoint = GGUFCheckpoint(path)
    for name, tensor in named(target).items():
        error = (checkpoint.read(name) - tensor).abs().max() / tensor.abs().max()
        assert error < {"Q4_0": 0.13, "Q4_1": 0.13, "Q5_0": 0.07, "Q5_1": 0.07}.get(kind, 0.01), name


@pytest.mark.parametrize("kind", sorted(kind.name for kind in gguf.quants._type_traits))
def test_every_type_of_the_package_is_read(kind: str, tmp_path: Path) -> None:
    quantisation = GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    raw = np.random.default_rng(1).integers(0, 100, (3, 512 // block * size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "one.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    value = GGUFCheckpoint(tmp_path / "one.gguf").read("model.embed_tokens.weight")
    expected = gguf.quants.dequantize(raw, quantisation)
    assert value.shape == (3, 512)
    np.testing.assert_array_equal(value.numpy(), expected)


def rope_of(tmp_path: Path, target: Target, metadata) -> RopeConfig:
    path = write_gguf(tmp_path / "tiny.gguf", target.config, named(target), metadata=metadata)
    return gguf_config(GGUFCheckpoint(path)).decoder.rope


def test_rope_scaling_keys(tiny_target, tmp_path: Path) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    target = tiny_target("qwen3")
    assert rope_of(tmp_path, target, None) == RopeConfig(10000.0)
    assert rope_of(tmp_path, target, linear) == RopeConfig(10000.0, "linear", {"factor": 2.0})
    expected = RopeConfig(10000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64})
    assert rope_of(tmp_path, target, yarn) == expected


def llama3_divisors(parameters: dict[str, float]) -> np.ndarray:
    rope = RopeConfig(500000.0, "llama3", parameters)
    plain, _ = inverse_frequencies(RopeConfig(500000.0), 64)
    return (plain / inverse_frequencies(rope, 64)[0]).numpy()


def test_llama3_scaling_is_recovered_from_its_table(tiny_target, tmp_path: Path) -> None:
    parameters = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    target = tiny_target("llama", head_dim=64, rope=RopeConfig(500000.0))

    def table(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(parameters))

    rope = rope_of(tmp_path, target, table)
    assert (rope.scaling, rope.theta) == ("llama3", 500000.0)
    assert rope.parameters == pytest.approx(parameters)

    def other(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(parameters | {"original_max_position_embeddings": 2048}))

    with pytest.raises(InputError, match="does not follow llama3 scaling"):
        rope_of(tmp_path, target, other)


def test_tokenizer_and_chat_template_come_from_the_file(tiny_target, tmp_path: Path) -> None:
    target = tiny_target("llama")
    path = write_gguf(tmp_path / "tiny.gguf", target.config, named(target), metadata=with_tokenizer)
    tokenizer = gguf_tokenizer(GGUFCheckpoint(path), (1,))
    names = tokenizer.backend.convert_ids_to_tokens(tokenizer.encode("hello w 12"))
    assert names == ["hello", "Ġw", "Ġ", "1", "2"]  # smollm splits digits before merging
    assert tokenizer.render([{"role": "user", "content": "hello"}]) == "<|start|>hello<|end|><|start|>"
    ids = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert (ids[0], ids[-2:]) == (0, [1, 0])
    assert tokenizer.decode(ids) == "hello"
    text = "naïve café\n\n\t東京 🎉 don't 3.14"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_word_rules_differ_where_the_models_do(tiny_target, tmp_path: Path) -> None:
    target = tiny_target("qwen2")

    def tokens(pre: str, text: str) -> list[str]:
        path = tmp_path / f"{pre}.gguf"
        write_gguf(
            path, target.config, named(target), metadata=lambda writer: add_byte_level_tokenizer(writer, pre) and None
        )
        tokenizer = gguf_tokenizer(GGUFCheckpoint(path))
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return tokenizer.backend.convert_ids_to_tokens(tokenizer.encode(text))

    assert tokens("gpt-2", "12") == ["12"]
    assert tokens("llama-bpe", "12") == ["12"]
    assert tokens("qwen2", "12") == ["1", "2"]
    with pytest.raises(InputError, match=r"tokenizer.ggml.pre 'strange' is not known"):
        tokens("strange", "12")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("mamba", "architecture 'mamba' is not supported; allowed are llama, qwen2, qwen3"), ("qwen3moe", "'qwen3moe'")],
)
def test_unknown_architecture_is_refused(architecture: str, message: str, tiny_target, tmp_path: Path) -> None:
    target = tiny_target("qwen2")
    path = write_gguf(tmp_path / "x.gguf", target.config, named(target), architecture=architecture)
    with pytest.raises(InputError, match=message) as caught:
        load_target(str(path), torch.float32)
    assert "\n" not in str(caught.value)


def test_damaged_and_odd_files_are_refused(tiny_target, tmp_path: Path) -> None:
    target = tiny_target("qwen2")
    path = write_gguf(tmp_path / "x.gguf", target.config, named(target), metadata=with_tokenizer)
    whole = path.read_bytes()
    for size in (20, 700, len(whole) - 4000):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="not a complete GGUF file") as caught:
            load_target(str(path), torch.float32)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"PK" + whole)
    with pytest.raises(InputError, match="not a GGUF file"):
        load_target(str(path), torch.float32)
    write_gguf(path, target.config, named(target))
    with pytest.raises(InputError, match="carries no tokenizer"):
        load_target(str(path), torch.float32)
    short = {name: tensor for name, tensor in named(target).items() if "layers.2.mlp.up" not in name}
    write_gguf(path, target.config, short, metadata=with_tokenizer)
    with pytest.raises(InputError, match=r"model.layers.2.mlp.up_proj.weight is missing"):
        load_target(str(path), torch.float32)
    write_gguf(path, target.config, named(target), metadata=add_key("qwen2.expert_count", 4))
    with pytest.raises(InputError, match="mixture of experts"):
        load_target(str(path), torch.float32)
