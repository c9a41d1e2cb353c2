"""What a checkpoint is and what would be wrong with it, without loading its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dscale.config import DecoderConfig, DrafterConfig, InputError
from dscale.models.aliases import ALIASES
from dscale.models.checkpoint import TensorSource, read_json, tensor_problems
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import (
    EMBEDDING_COPIES,
    HEAD_COPIES,
    DrafterTensors,
    drafter_hash,
    drafter_pieces,
    read_drafter,
    tensor_hash,
)
from dscale.models.drafter_config import fit_problems, is_drafter_config
from dscale.models.families import target_pieces
from dscale.models.loader import OpenedTarget, open_target, resolve_path

Record = dict[str, Any]


def inspect_checkpoint(checkpoint: str, target: str | None = None, layout: str | None = None) -> Record:
    """A record of a target or a drafter: kind, family or dialect, sizes, parameters, rope, problems.

    target: for a drafter, the target it shall serve; then `fits` is set and misfits join the problems. layout: an
    explicit anchor layout. InputError when the config itself cannot be read or is not supported.
    """
    against = None if target is None else open_target(target)
    if checkpoint in ALIASES and not Path(checkpoint).exists():
        return _target_record(checkpoint, open_target(checkpoint))
    path = resolve_path(checkpoint)
    if path.is_dir() and is_drafter_config(read_json(path / "config.json")):
        return _drafter_record(checkpoint, path, against, layout)
    return _target_record(checkpoint, open_target(checkpoint))


def _target_record(checkpoint: str, opened: OpenedTarget) -> Record:
    config = opened.config
    with torch.device("meta"):
        model = Target(config)
    problems = tensor_problems(model, target_pieces(config), opened.tensors, config.decoder)
    chat = False
    try:
        chat = opened.tokenizer().has_chat_template
    except InputError as error:
        problems.append(str(error))
    return {
        "kind": "target",
        "checkpoint": checkpoint,
        "family": config.family,
        **_sizes(config.decoder),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "stored_types": _stored_types(opened.tensors),
        "tied_head": config.tie_embeddings,
        "end_tokens": list(config.eos_token_ids),
        "chat_template": chat,
        "problems": problems,
    }


def _drafter_record(checkpoint: str, path: Path, target: OpenedTarget | None, layout: str | None) -> Record:
    layers = None if target is None else target.config.decoder.num_layers
    reading = read_drafter(path, layout, layers)
    config, source = reading.config, DrafterTensors(path)
    with torch.device("meta"):
        model = Drafter(config)
    problems = tensor_problems(model, drafter_pieces(config), source, config.decoder)
    misfits = [] if target is None else [*fit_problems(config, target.config), *_weight_misfits(config, source, target)]
    return {
        "kind": "drafter",
        "checkpoint": checkpoint,
        "dialect": config.dialect,
        **_sizes(config.decoder),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "stored_types": _stored_types(source),
        "anchor_layout": str(config.layout),
        "layout_told_by": reading.layout_reason,
        "block_size": config.block_size,
        "width": config.width,
        "taps": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "target_layers": config.target_layers,
        "causal": list(config.decoder.causal_layers) or config.causal,
        "hash": None if problems else drafter_hash(path),
        "fits": None if target is None else not (problems or misfits),
        "problems": problems + misfits,
    }


def _weight_misfits(config: DrafterConfig, source: DrafterTensors, target: OpenedTarget) -> list[str]:
    """Tensors the drafter knows of its target, against those of this target."""
    tensors, misfits = target.tensors, []
    for name, expected in config.target_hashes.items():
        known = name in tensors.names()
        if known and tensor_hash(tensors.read(name).to(torch.bfloat16)) != expected:
            misfits.append(f"was trained on other target weights: {name} differs")
    embedding = "model.embed_tokens.weight"
    head = "lm_head.weight" if "lm_head.weight" in tensors.names() else embedding
    for names, own_name in ((EMBEDDING_COPIES, embedding), (HEAD_COPIES, head)):
        copy = source.copy_of(names)
        if copy is not None and not _same(source, copy, tensors, own_name):
            misfits.append(f"its copy {copy} differs from the target's {own_name}")
    return misfits


def _same(source: DrafterTensors, name: str, tensors: TensorSource, own_name: str) -> bool:
    if source.shape(name) != tensors.shape(own_name):
        return False
    return torch.equal(source.read(name).to(torch.bfloat16), tensors.read(own_name).to(torch.bfloat16))


def _sizes(decoder: DecoderConfig) -> Record:
    return {
        "layers": decoder.num_layers,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "heads": decoder.num_heads,
        "kv_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        "context": decoder.max_position,
        "rope": asdict(decoder.rope),
        "windows": list(decoder.windows),
    }


def _stored_types(source: TensorSource) -> dict[str, int]:
    return dict(Counter(source.stored_type(name) for name in sorted(source.names())))
