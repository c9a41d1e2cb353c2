"""Small GGUF files for tests, written with the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from dscale.config import TargetConfig
from dscale.models.gguf_reader import LAYER_NAMES, TOP_NAMES

GGUF_NAMES = {theirs: ours for ours, theirs in LAYER_NAMES.items()} | {
    theirs: ours for ours, theirs in TOP_NAMES.items()
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


def interleaved_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as files of the llama architecture hold them: element i of a head's halves side by side."""
    head = tensor.shape[0] // heads
    order = [h * head + half * head // 2 + i for h in range(heads) for i in range(head // 2) for half in (0, 1)]
    return tensor[order]


def write_gguf(
    path: Path,
    config: TargetConfig,
    tensors: Mapping[str, torch.Tensor],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Callable[[GGUFWriter], None] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write a target; two-dimensional tensors are quantised to kind. metadata adds keys (tokenizer, rope)."""
    d = config.decoder
    writer = GGUFWriter(path, architecture or config.family)
    writer.add_block_count(d.num_layers)
    writer.add_context_length(d.max_position)
    writer.add_embedding_length(d.hidden_size)
    writer.add_feed_forward_length(d.intermediate_size)
    writer.add_head_count(d.num_heads)
    writer.add_head_count_kv(d.num_kv_heads)
    writer.add_key_length(d.head_dim)
    writer.add_value_length(d.head_dim)
    writer.add_layer_norm_rms_eps(d.norm_eps)
    writer.add_rope_freq_base(d.rope.theta)
    if metadata is not None:
        metadata(writer)
    for name, tensor in tensors.items():
        value = tensor.detach().float()
        if config.family == "llama" and ("q_proj" in name or "k_proj" in name):
            value = interleaved_rows(value, d.num_heads if "q_proj" in name else d.num_kv_heads)
        array = np.ascontiguousarray(value.numpy())
        if array.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_vocabulary() -> list[str]:
    """The 256 byte symbols of byte-level BPE, in the order of tokenizers."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def add_byte_level_tokenizer(writer: GGUFWriter, pre: str = "smollm", chat_template: str | None = None) -> list[str]:
    """A gpt2 tokenizer: two control tokens, all bytes, and a few merges. Returns its tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    joined = ["he", "ll", "hell", "hello", "Ġw", "12"]
    tokens = ["<|start|>", "<|end|>", *byte_level_vocabulary(), *joined]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    return tokens


def add_key(key: str, value: Any) -> Callable[[GGUFWriter], None]:
    """A metadata callback that adds one key by its Python type."""

    def add(writer: GGUFWriter) -> None:
        method = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        method[type(value)](key, value)

    return add
