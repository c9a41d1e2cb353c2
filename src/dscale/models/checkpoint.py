"""Tensors of a checkpoint by name, read lazily, and the map from checkpoint names to a decoder's fused parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dscale.config import DecoderConfig, InputError, require
from dscale.models.shares import Share, stacked

Pieces = dict[str, tuple[str, ...]]  # parameter of ours → checkpoint tensors, stacked along the first dimension


class TensorSource(Protocol):
    """Where tensors come from: a safetensors folder or a GGUF file, under Hugging Face names."""

    name: str

    def names(self) -> set[str]:
        """All tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""

    def stored_type(self, name: str) -> str:
        """Name of the type a tensor is stored in, e.g. BF16 or Q4_1."""

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU in its stored dtype (float32 if it was quantised)."""


class SafetensorsCheckpoint:
    """A folder with one safetensors file, or with shards (with or without an index). Files are mapped, not read."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._files: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        for path in _weight_files(folder):
            for name in self._handle(path).keys():  # noqa: SIM118 (not a dict)
                self._files[name] = path

    def _handle(self, path: Path) -> safe_open:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                raise InputError(f"{path}: not a complete safetensors file ({reason}); fetch it again") from None
        return self._open[path]

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(self._files[name]).get_slice(name).get_shape())

    def stored_type(self, name: str) -> str:
        return str(self._handle(self._files[name]).get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        return self._handle(self._files[name]).get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted({folder / shard for shard in read_json(index).get("weight_map", {}).values()})
        for shard in shards:
            require(shard.is_file(), f"{shard}: missing, but {index.name} lists it; fetch it again")
        require(len(shards) > 0, f"{index}: lists no shards under weight_map")
        return shards
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return [folder / "model.safetensors"]
    require(len(files) > 0, f"{folder}: has no *.safetensors file; allowed are safetensors folders and GGUF files")
    return files


def read_json(path: Path) -> dict:
    """A JSON object from a file; InputError when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not readable as JSON ({' '.join(str(error).split())})") from None
    require(isinstance(value, dict), f"{path}: holds {type(value).__name__}, expected a JSON object")
    return value


def decoder_pieces(config: DecoderConfig, prefix: str = "") -> Pieces:
    """Parameters of a DecoderStack (named from `stack.`) and the Hugging Face tensors they are stacked from."""
    pieces: Pieces = {"stack.norm.weight": (f"{prefix}norm.weight",)}
    for index in range(config.num_layers):
        ours, theirs = f"stack.layers.{index}", f"{prefix}layers.{index}"
        pieces[f"{ours}.input_norm.weight"] = (f"{theirs}.input_layernorm.weight",)
        pieces[f"{ours}.post_norm.weight"] = (f"{theirs}.post_attention_layernorm.weight",)
        for name, sources, bias in (
            ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
            ("output", ("self_attn.o_proj",), config.output_bias),
            ("gate_up", ("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
            ("down", ("mlp.down_proj",), config.mlp_bias),
        ):
            for kind in ("weight", "bias") if bias else ("weight",):
                pieces[f"{ours}.{name}.{kind}"] = tuple(f"{theirs}.{source}.{kind}" for source in sources)
        if config.qk_norm:
            pieces[f"{ours}.q_norm.weight"] = (f"{theirs}.self_attn.q_norm.weight",)
            pieces[f"{ours}.k_norm.weight"] = (f"{theirs}.self_attn.k_norm.weight",)
    return pieces


def piece_rows(parameter: str, pieces: tuple[str, ...], total: int, config: DecoderConfig) -> list[int]:
    """Rows of each checkpoint tensor that is stacked into a parameter of `total` rows."""
    if parameter.endswith((".qkv.weight", ".qkv.bias")):
        return [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    return [total // len(pieces)] * len(pieces)


def load_parameters(
    model: nn.Module,
    pieces: Pieces,
    source: TensorSource,
    share: Share,
    dtype: torch.dtype,
    device: str,
    whole: nn.Module | None = None,
) -> None:
    """Fill a model built on the meta device from a source, cast to dtype, on device, with this rank's share of it.

    whole: the undivided model on the meta device, where the share is not all of it. InputError for a missing tensor, a
    wrong shape, or a weight in the source that the model would leave out.
    """
    problems = tensor_problems(whole or model, pieces, source, share.whole)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    require(not problems, f"{source.name}: {problems[0] if problems else ''}{more}")
    for parameter, names in pieces.items():
        parts = share.cut(parameter, [source.read(name) for name in names])
        put_parameter(model, parameter, stacked(parts, dtype, device))


def put_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Make a tensor, without gradient, a parameter of the model."""
    module_path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module_path), attribute, nn.Parameter(value, requires_grad=False))


def tensor_problems(model: nn.Module, pieces: Pieces, source: TensorSource, config: DecoderConfig) -> list[str]:
    """Tensors that are missing, have the wrong shape, or would be left out; one line each, empty when all fit."""
    names, wanted, problems = source.names(), set(), []
    for parameter, parts in pieces.items():
        shape = model.get_parameter(parameter).shape
        for name, rows in zip(parts, piece_rows(parameter, parts, shape[0], config), strict=True):
            wanted.add(name)
            expected = [rows, *shape[1:]]
            if name not in names:
                problems.append(f"tensor {name} is missing")
            elif list(source.shape(name)) != expected:
                problems.append(f"tensor {name} has shape {list(source.shape(name))}, expected {expected}")
    surplus = sorted(name for name in names - wanted if _changes_output(name))
    return problems + [f"tensor {name} has no place in the model its config describes" for name in surplus]


def _changes_output(name: str) -> bool:
    """False for buffers that are recomputed here, and for the copy of a tied head that some exporters write."""
    return not name.endswith(("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")) and name != "lm_head.weight"


def tensors_of(model: nn.Module, pieces: Pieces, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """The inverse of load_parameters: (checkpoint name, tensor) for every stacked part, contiguous on the CPU."""
    for parameter, names in pieces.items():
        value = model.get_parameter(parameter).detach()
        for name, part in zip(names, value.split(piece_rows(parameter, names, value.shape[0], config)), strict=True):
            yield name, part.cpu().contiguous()
