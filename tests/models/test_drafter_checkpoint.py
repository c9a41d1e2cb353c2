"""Drafter folders: round trips in both written dialects, copies of target tensors, hashes, known sizes, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, InputError
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import drafter_hash, load_drafter, save_drafter, target_hashes

Pair = Callable[..., object]


def rewrite(folder: Path, **changes: object) -> None:
    """Change top-level keys of a saved config; None removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("dialect", ["z-lab", "deepspec"])
@pytest.mark.parametrize("layout", list(AnchorLayout))
def test_saved_drafter_loads_equal(tiny_pair, tmp_path: Path, dialect: str, layout: AnchorLayout) -> None:
    pair = tiny_pair("llama", layout=layout)
    save_drafter(pair.drafter, tmp_path, dialect, target_hashes(pair.target), dtype=torch.float32)
    loaded = load_drafter(tmp_path, pair.target, torch.float32)
    expected = replace(pair.drafter.config, dialect=dialect, target_hashes=target_hashes(pair.target))
    assert loaded.config == expected
    for (name, one), (_, other) in zip(loaded.named_parameters(), pair.drafter.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_stored_tensor_names_are_those_of_the_released_checkpoints(tiny_pair, tmp_path: Path) -> None:
    pair = tiny_pair()
    save_drafter(pair.drafter, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 + 11 * pair.drafter.config.decoder.num_layers
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert not any("embed" in name or "lm_head" in name for name in tensors)


def test_fused_rows_come_back_as_q_k_v(tiny_pair, tmp_path: Path) -> None:
    pair = tiny_pair()
    save_drafter(pair.drafter, tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    qkv = pair.drafter.stack.layers[0].qkv.weight
    assert torch.equal(tensors["layers.0.self_attn.v_proj.weight"], qkv[48:])
    assert torch.equal(tensors["layers.0.mlp.up_proj.weight"], pair.drafter.stack.layers[0].gate_up.weight[48:])


@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "kv", "head_dim", "parameters"),
    [
        (4096, 12288, 32, 8, 128, 1_048_626_432),
        (2560, 9728, 32, 8, 128, 537_427_200),
        (2560, 7680, 24, 2, 256, 498_106_880),
    ],
)
def test_parameter_counts_of_known_drafters(
    hidden: int, inner: int, heads: int, kv: int, head_dim: int, parameters: int
) -> None:
    decoder = DecoderConfig(151936, hidden, inner, 5, heads, kv, head_dim, qk_norm=True)
    config = DrafterConfig(decoder, 16, (1, 9, 17, 25, 33), 151669, AnchorLayout.MASKED)
    with torch.device("meta"):
        drafter = Drafter(config)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == parameters


def test_hash_ignores_dialect_and_load_dtype_but_not_weights(tiny_pair, tmp_path: Path) -> None:
    pair = tiny_pair()
    one = save_drafter(pair.drafter, tmp_path / "a", "z-lab")
    two = save_drafter(pair.drafter, tmp_path / "b", "deepspec")
    expected = drafter_hash(one)
    assert drafter_hash(two) == expected
    assert drafter_hash(load_drafter(one, pair.target, torch.float32)) == expected
    assert drafter_hash(load_drafter(one, pair.target, torch.bfloat16)) == expected
    with torch.no_grad():
        pair.drafter.fc.weight[0, 0] += 1.0
    assert drafter_hash(save_drafter(pair.drafter, tmp_path / "c")) != expected


def add_copies(folder: Path, **copies: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in copies.items()}, file)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_equal_copies_of_embedding_and_head_are_dropped(tiny_pair, tmp_path: Path, stored: torch.dtype) -> None:
    pair = tiny_pair("qwen3")
    save_drafter(pair.drafter, tmp_path)
    copies = {"embed_tokens__weight": pair.target.embedding, "lm_head__weight": pair.target.head.weight}
    add_copies(tmp_path, **{name: tensor.detach().to(stored) for name, tensor in copies.items()})
    load_drafter(tmp_path, pair.target, torch.float32)


def test_differing_copy_is_refused(tiny_pair, tmp_path: Path) -> None:
    pair = tiny_pair("qwen3")
    save_drafter(pair.drafter, tmp_path)
    add_copies(tmp_path, lm_head__weight=pair.target.head.weight + 0.5)
    with pytest.raises(InputError, match=r"copy lm_head\.weight differs"):
        load_drafter(tmp_path, pair.target, torch.float32)


def test_other_target_weights_are_refused(tiny_pair, tiny_target, tmp_path: Path) -> None:
    pair = tiny_pair("llama")
    save_drafter(pair.drafter, tmp_path, target_hashes=target_hashes(pair.target))
    load_drafter(tmp_path, pair.target, torch.float32)
    with pytest.raises(InputError, match="trained on other target weights"):
        load_drafter(tmp_path, tiny_target("llama", seed=9), torch.float32)


def test_target_hashes_do_not_depend_on_the_load_dtype(tiny_target) -> None:
    target = tiny_target("qwen2")
    expected = target_hashes(target)
    assert target_hashes(target.to(torch.bfloat16)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size: drafter 64, target 32"),
        ({"vocab_size": 65}, "vocab_size: drafter 65, target 64"),
        ({"num_target_layers": 9}, "num_target_layers: drafter expects 9, target has 5"),
        ({"block_size": 7}, "block_size = 7 contradicts dflash_config.block_size = 6"),
        ({"intermediate_size": 50}, "tensor layers.0.mlp.gate_proj.weight has shape"),
        ({"num_hidden_layers": 3}, "tensor layers.2"),
        ({"num_hidden_layers": 1}, "has no place in the model"),
        ({"mask_token_id": 1}, "mask_token_id = 1 contradicts dflash_config.mask_token_id = 63"),
    ],
)
def test_drafter_that_does_not_fit_is_refused(tiny_pair, tmp_path: Path, changes: dict, message: str) -> None:
    pair = tiny_pair()
    save_drafter(pair.drafter, tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(InputError, match=message.replace(".", r"\.")) as caught:
        load_drafter(tmp_path, pair.target, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("taps", "message"), [([1, 2, 5], "5 is past the target's last layer 4"), ([1, 4], "4 is the target's last layer")]
)
def test_taps_outside_the_target_are_refused(tiny_pair, tmp_path: Path, taps: list[int], message: str) -> None:
    pair = tiny_pair()
    save_drafter(pair.drafter, tmp_path, "deepspec")
    rewrite(tmp_path, target_layer_ids=taps)
    with pytest.raises(InputError, match=message):
        load_drafter(tmp_path, pair.target, torch.float32)


def test_truncated_and_missing_files_are_refused(tiny_pair, tmp_path: Path) -> None:
    pair = tiny_pair()
    save_drafter(pair.drafter, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="not a complete safetensors file"):
        load_drafter(tmp_path, pair.target, torch.float32)
    file.unlink()
    with pytest.raises(InputError, match=r"has no \*.safetensors"):
        load_drafter(tmp_path, pair.target, torch.float32)
    with pytest.raises(InputError, match="no such file"):
        load_drafter(tmp_path / "nowhere", pair.target, torch.float32)


def test_explicit_layout_beats_the_checkpoint_and_is_told(tiny_pair, tmp_path: Path, capsys) -> None:
    pair = tiny_pair()
    save_drafter(pair.drafter, tmp_path)
    assert load_drafter(tmp_path, pair.target, torch.float32).config.layout is AnchorLayout.MASKED
    assert "anchor layout 1+N (sample_from_anchor = false)" in capsys.readouterr().err
    loaded = load_drafter(tmp_path, pair.target, torch.float32, layout="anchor-first")
    assert (loaded.config.layout, loaded.config.width) == (AnchorLayout.ANCHOR_FIRST, 7)
    assert "anchor-first (explicit choice)" in capsys.readouterr().err
