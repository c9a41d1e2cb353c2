"""Drafter weights read and written, and the hashes that bind a drafter to its target and a predictor to a drafter."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dscale.config import DrafterConfig, InputError, require
from dscale.layers.ranks import ALONE, Ranks, head_rows
from dscale.models.checkpoint import (
    Pieces,
    SafetensorsCheckpoint,
    decoder_pieces,
    load_parameters,
    read_json,
    tensors_of,
)
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.drafter_config import DrafterReading, check_fits, read_drafter_config, write_drafter_config
from dscale.models.loader import LoadedTarget, resolve_path
from dscale.models.shares import Share, undivided

EMBEDDING_COPIES = ("embed_tokens.weight", "model.embed_tokens.weight")
HEAD_COPIES = ("lm_head.weight",)
# Only used in training, or only by heads that the plain drafter does not have: they change no draft.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t", "confidence_head.")


def drafter_pieces(config: DrafterConfig) -> Pieces:
    """Parameters of a Drafter and the checkpoint tensors they are stacked from."""
    own: Pieces = {"fc.weight": ("fc.weight",), "hidden_norm.weight": ("hidden_norm.weight",)}
    return own | decoder_pieces(config.decoder)


class DrafterTensors(SafetensorsCheckpoint):
    """A drafter's tensors without a `model.` prefix and without those that are the target's or unused."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._stored = {name.removeprefix("model."): name for name in super().names()}

    def names(self) -> set[str]:
        copies = {*EMBEDDING_COPIES, *HEAD_COPIES}
        return {name for name in self._stored if name not in copies and not name.startswith(UNUSED)}

    def copy_of(self, names: Iterable[str]) -> str | None:
        """The name under which the file carries a copy of a target tensor, or None."""
        return next((name for name in names if name in self._stored), None)

    def shape(self, name: str) -> tuple[int, ...]:
        return super().shape(self._stored[name])

    def stored_type(self, name: str) -> str:
        return super().stored_type(self._stored[name])

    def read(self, name: str) -> Tensor:
        return super().read(self._stored[name])


def read_drafter(path: str | Path, layout: str | None = None, target_layers: int | None = None) -> DrafterReading:
    """The config of a drafter folder (or hub id) and how its anchor layout was told."""
    folder = drafter_folder(path)
    file = folder / "config.json"
    return read_drafter_config(read_json(file), str(file), layout, target_layers)


def drafter_folder(path: str | Path) -> Path:
    """The local folder of a drafter; hub ids are fetched. InputError when it is not a folder with a config."""
    folder = resolve_path(str(path))
    require(folder.is_dir(), f"{path}: is a file; a drafter is a folder with config.json and safetensors")
    return folder


def load_drafter(
    path: str | Path,
    target: LoadedTarget | Target,
    dtype: torch.dtype,
    device: str = "cpu",
    layout: str | None = None,
    ranks: Ranks = ALONE,
) -> Drafter:
    """Load a drafter for a target, checked against it, with its context projection prepared; of several ranks each
    loads its share (all of it where the heads cannot be dealt out).

    layout overrides the checkpoint's anchor layout. The layout in force is printed on stderr, because a wrong one makes
    no error, only bad drafts. InputError when anything is missing, contradictory or does not fit.
    """
    model = target.model if isinstance(target, LoadedTarget) else target
    folder = drafter_folder(path)
    reading = read_drafter(folder, layout, model.config.decoder.num_layers)
    config = reading.config
    check_fits(config, model.config, str(path))
    if config.target_layers is None:
        config = replace(config, target_layers=model.config.decoder.num_layers)
    source = DrafterTensors(folder)
    _check_copies(source, model, str(path))
    check_target_hashes(config, model, str(path))
    drafter, share, whole = empty_drafter(config, ranks)
    load_parameters(drafter, drafter_pieces(config), source, share, dtype, device, whole)
    drafter.eval().requires_grad_(False)
    drafter.prepare()
    if ranks.leads:
        print(f"drafter {path}: anchor layout {config.layout} ({reading.layout_reason})", file=sys.stderr)
    return drafter


def empty_drafter(config: DrafterConfig, ranks: Ranks) -> tuple[Drafter, Share, Drafter]:
    """On the meta device: a rank's Drafter, its share, and the whole Drafter. Where the heads cannot be dealt out every
    rank has the whole one."""
    share = Share.of(config.decoder, ranks) or undivided(config.decoder)
    with torch.device("meta"):
        whole = Drafter(config)
        alone = share.ranks.size == 1
        drafter = whole if alone else Drafter(replace(config, decoder=share.local), ranks)
    return drafter, share, whole


def _check_copies(source: DrafterTensors, target: Target, where: str) -> None:
    """Embedding and head come from the target; a copy in the file must be that very tensor."""
    for names, own in ((EMBEDDING_COPIES, target.embedding), (HEAD_COPIES, head_rows(target.head))):
        name = source.copy_of(names)
        if name is None:
            continue
        require(
            source.shape(name) == tuple(own.shape),
            f"{where}: its copy {name} has shape {list(source.shape(name))}, the target's is {list(own.shape)}",
        )
        copy = source.read(name)
        equal = tensor_hash(copy.to(own.dtype)) == tensor_hash(own) or tensor_hash(copy) == tensor_hash(
            own.to(copy.dtype)
        )
        require(equal, f"{where}: its copy {name} differs from the target's; it was trained for another target")


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in its own dtype."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def target_hashes(target: LoadedTarget | Target) -> dict[str, str]:
    """SHA-256 of a few target tensors, in bfloat16, by Hugging Face name: tells what a drafter was trained on.

    Enough to tell a target's weights from its fine-tuned or re-quantised relatives, and cheap enough for every load.
    """
    model = target.model if isinstance(target, LoadedTarget) else target
    chosen = {
        "model.layers.0.self_attn.q_proj.weight": _first_queries(model),
        "model.norm.weight": model.stack.norm.weight,
    }
    return {name: tensor_hash(tensor.to(torch.bfloat16)) for name, tensor in chosen.items()}


def _first_queries(model: Target) -> Tensor:
    """The query projection [heads · d, H] of layer 0, of all ranks."""
    decoder, ranks = model.config.decoder, model.stack.ranks
    own = model.stack.blocks[0].qkv.weight[: decoder.num_heads * decoder.head_dim].detach()
    return own if ranks.size == 1 else ranks.stack_rows(own)


def check_target_hashes(config: DrafterConfig, target: Target, where: str) -> None:
    """InputError when the drafter says it was trained on other weights. A float16 target cannot be compared."""
    if not config.target_hashes or target.embedding.dtype == torch.float16:
        return
    actual = target_hashes(target)
    for name, expected in config.target_hashes.items():
        require(
            actual.get(name, expected) == expected,
            f"{where}: was trained on other target weights ({name} differs); load the target it was trained on",
        )


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    dialect: str = "z-lab",
    target_hashes: dict[str, str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write config.json and model.safetensors (tensor names of dflash.md, stored in dtype). Returns the folder."""
    out, config = Path(folder), drafter.config
    if target_hashes is not None:
        config = replace(config, target_hashes=target_hashes)
    written = write_drafter_config(config, dialect) | {"dtype": str(dtype).removeprefix("torch.")}
    tensors = {name: t.to(dtype).clone() for name, t in tensors_of(drafter, drafter_pieces(config), config.decoder)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{out}: cannot write the drafter ({error})") from None
    return out


def drafter_hash(drafter: str | Path | Drafter) -> str:
    """SHA-256 over a drafter's tensors (names, shapes, values in bfloat16): what a predictor is bound to.

    The same for a folder and for a drafter loaded from it in float32 or bfloat16, in either dialect.
    """
    if isinstance(drafter, Drafter):
        parts = dict(tensors_of(drafter, drafter_pieces(drafter.config), drafter.config.decoder))
    else:
        source = DrafterTensors(drafter_folder(drafter))
        parts = {name: source.read(name) for name in source.names()}
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(f"{name} {list(parts[name].shape)} {tensor_hash(parts[name].to(torch.bfloat16))}\n".encode())
    return digest.hexdigest()


def random_drafter(
    config: DrafterConfig, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Drafter:
    """A drafter with seeded random weights, prepared, for tests."""
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        scaled = value * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else value * 0.1 + float("norm" in name)
        parameter.data = scaled
    drafter = drafter.to(device, dtype).eval().requires_grad_(False)
    drafter.prepare()
    return drafter
