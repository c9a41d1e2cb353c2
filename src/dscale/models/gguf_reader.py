"""GGUF files of the llama, qwen2 and qwen3 architectures: config, and dequantised tensors by Hugging Face name.

Tensors are dequantised to float32 by the `gguf` package, one at a time. Files of the llama architecture hold the rows
of q and k in interleaved order (neighbouring rows rotate together); they are put back in halves order when read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from dscale.config import FAMILIES, DecoderConfig, InputError, RopeConfig, TargetConfig, require
from dscale.layers.rotary import inverse_frequencies

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # per-pair frequency divisors: how converters store llama3 scaling
NOT_WEIGHTS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")


def open_gguf(path: Path) -> GGUFReader:
    """The mapped file; InputError when it is not a complete GGUF file."""
    require(path.is_file(), f"{path}: no such file")
    try:
        return GGUFReader(path)
    except Exception as error:  # the package raises whatever its parsing runs into
        raise InputError(f"{path}: not a complete GGUF file ({' '.join(str(error).split())})") from None


class GGUFCheckpoint:
    """A GGUF file as a TensorSource: Hugging Face names, float32 tensors, halves order of q and k rows."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._reader = open_gguf(path)
        self.architecture = str(self.value("general.architecture", ""))
        if self.architecture not in FAMILIES:
            raise InputError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; allowed are {', '.join(FAMILIES)}"
            )
        self._tensors = {
            hf_name(tensor.name, self.name): tensor for tensor in self._reader.tensors if tensor.name not in NOT_WEIGHTS
        }
        self.rope_factors = self._rope_factors()

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python, or default where the key is absent."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A metadata value of this architecture, e.g. `block_count` for `llama.block_count`."""
        return self.value(f"{self.architecture}.{key}", default)

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def stored_type(self, name: str) -> str:
        return str(self._tensors[name].tensor_type.name)

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise InputError(f"{self.name}: tensor {name} has type {kind}, which gguf cannot dequantise") from None
        value = torch.from_numpy(np.array(array, dtype=np.float32, copy=True)).view(self.shape(name))
        return self._halves_order(name, value)

    def _halves_order(self, name: str, value: Tensor) -> Tensor:
        if self.architecture != "llama" or not ("q_proj" in name or "k_proj" in name):
            return value
        heads = int(self.of_architecture("attention.head_count"))
        if "k_proj" in name:
            heads = int(self.of_architecture("attention.head_count_kv", heads))
        pairs = value.view(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
        return pairs.transpose(1, 2).reshape(value.shape)

    def _rope_factors(self) -> Tensor | None:
        for tensor in self._reader.tensors:
            if tensor.name == ROPE_FACTORS:
                return torch.from_numpy(np.array(tensor.data, dtype=np.float32, copy=True)).flatten()
        return None


def hf_name(name: str, where: str) -> str:
    """The Hugging Face name of a GGUF tensor, e.g. blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    known = len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES
    require(known, f"{where}: tensor {name} is not part of the llama, qwen2 or qwen3 architectures")
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"


def gguf_config(checkpoint: GGUFCheckpoint) -> TargetConfig:
    """The TargetConfig a GGUF file describes. A missing output tensor means a tied head."""
    names = checkpoint.names()
    require("model.embed_tokens.weight" in names, f"{checkpoint.name}: tensor token_embd.weight is missing")
    vocab, hidden = checkpoint.shape("model.embed_tokens.weight")
    heads = _need(checkpoint, "attention.head_count")
    require(not isinstance(heads, list), f"{checkpoint.name}: head counts that differ by layer are not supported")
    require(not checkpoint.of_architecture("expert_count"), f"{checkpoint.name}: mixture of experts is not supported")
    head_dim = int(checkpoint.of_architecture("attention.key_length", hidden // heads))
    rotated = int(checkpoint.of_architecture("rope.dimension_count", head_dim))
    require(rotated == head_dim, f"{checkpoint.name}: rope.dimension_count {rotated} differs from head size {head_dim}")
    decoder = DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=int(_need(checkpoint, "feed_forward_length")),
        num_layers=int(_need(checkpoint, "block_count")),
        num_heads=int(heads),
        num_kv_heads=int(checkpoint.of_architecture("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_eps=_short_float(_need(checkpoint, "attention.layer_norm_rms_epsilon")),
        max_position=int(_need(checkpoint, "context_length")),
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        output_bias="model.layers.0.self_attn.o_proj.bias" in names,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in names,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
        rope=gguf_rope(checkpoint, head_dim),
    )
    ends = [checkpoint.value(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return TargetConfig(
        family=checkpoint.architecture,
        decoder=decoder,
        tie_embeddings="lm_head.weight" not in names,
        eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        bos_token_id=checkpoint.value("tokenizer.ggml.bos_token_id"),
    )


def gguf_rope(checkpoint: GGUFCheckpoint, head_dim: int) -> RopeConfig:
    """Rotary settings from the file's keys, or from its table of frequency divisors (llama3 scaling)."""
    theta = float(checkpoint.of_architecture("rope.freq_base", 10000.0))
    if checkpoint.rope_factors is not None:
        return _llama3_rope(checkpoint, theta, head_dim)
    kind = str(checkpoint.of_architecture("rope.scaling.type", "none"))
    factor = checkpoint.of_architecture("rope.scaling.factor", checkpoint.of_architecture("rope.scale_linear"))
    if kind == "none" or not factor or float(factor) == 1.0:
        return RopeConfig(theta)
    parameters: dict[str, Any] = {"factor": float(factor)}
    if kind == "yarn":
        original = checkpoint.of_architecture("rope.scaling.original_context_length")
        parameters["original_max_position_embeddings"] = int(original or _need(checkpoint, "context_length"))
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = checkpoint.of_architecture(f"rope.scaling.{theirs}")
            if value is not None:
                parameters[ours] = float(value)
        extra = checkpoint.of_architecture("rope.scaling.yarn_attn_factor")
        if extra is not None and float(extra) != 1.0:
            parameters["attention_factor"] = float(extra) * (1.0 + 0.1 * math.log(float(factor)))
    return RopeConfig(theta, kind, parameters)


def _llama3_rope(checkpoint: GGUFCheckpoint, theta: float, head_dim: int) -> RopeConfig:
    """The llama3 parameters whose frequencies reproduce the file's divisors; InputError when none of the known do."""
    factors = checkpoint.rope_factors
    assert factors is not None
    base, _ = inverse_frequencies(RopeConfig(theta), head_dim)
    parameters = {
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = RopeConfig(theta, "llama3", parameters)
    fits = factors.numel() == base.numel() and torch.allclose(
        base / factors, inverse_frequencies(rope, head_dim)[0], rtol=1e-3
    )
    require(fits, f"{checkpoint.name}: {ROPE_FACTORS} does not follow llama3 scaling over 8192 tokens; not supported")
    return rope


def _need(checkpoint: GGUFCheckpoint, key: str) -> Any:
    value = checkpoint.of_architecture(key)
    require(value is not None, f"{checkpoint.name}: metadata {checkpoint.architecture}.{key} is missing")
    return value


def _short_float(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05 for a stored 9.999999747378752e-06."""
    return float(str(np.float32(value)))
