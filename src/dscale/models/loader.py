"""One way to load a target: a Hugging Face folder, a hub id, a GGUF file, or an alias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dscale.config import InputError, TargetConfig, require
from dscale.layers.ranks import ALONE, Ranks
from dscale.models.aliases import ALIASES, alias_folder, shipped_drafter, shipped_predictor
from dscale.models.bundle import Bundle, is_bundle, read_bundle
from dscale.models.checkpoint import SafetensorsCheckpoint, load_parameters, read_json
from dscale.models.decoder import Target
from dscale.models.families import target_config, target_pieces
from dscale.models.gguf_reader import GGUFCheckpoint, gguf_config
from dscale.models.gguf_tokenizer import gguf_tokenizer
from dscale.models.shares import Share, undivided
from dscale.models.tokenizer import Tokenizer

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def own_drafter(bundle: Bundle | None, alias: str | None) -> Path | None:
    """Folder of the drafter that comes with a target: the bundle's, or the one shipped for an alias."""
    return bundle.drafter if bundle else shipped_drafter(alias)


def own_predictor(bundle: Bundle | None, alias: str | None) -> Path | None:
    """Folder of the predictor that comes with a target."""
    return bundle.predictor if bundle else shipped_predictor(alias)


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run. name is what the user gave; alias and bundle are set when that was such a thing.

    config: of the whole target, also where the model is one rank's share of it (whose config is the model's own).
    own_tokenizer: None for models of random weights, whose prompts are token ids.
    """

    model: Target
    config: TargetConfig
    own_tokenizer: Tokenizer | None
    name: str
    alias: str | None = None
    bundle: Bundle | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer; InputError when it has none."""
        require(self.own_tokenizer is not None, f"{self.name}: has no tokenizer; prompts must be token ids")
        assert self.own_tokenizer is not None
        return self.own_tokenizer

    @property
    def own_drafter(self) -> Path | None:
        """Folder of the drafter that comes with it: the bundle's, or the one shipped for an alias."""
        return own_drafter(self.bundle, self.alias)

    @property
    def own_predictor(self) -> Path | None:
        """Folder of the predictor that comes with it."""
        return own_predictor(self.bundle, self.alias)


def load_target(source: str, dtype: torch.dtype, device: str = "cpu", ranks: Ranks = ALONE) -> LoadedTarget:
    """Load a target and its tokenizer, weights cast to dtype on device, in eval mode without gradients; of several
    ranks each loads its share (shares.py).

    source: a Hugging Face folder, a .gguf file, an alias (see aliases.ALIASES), a hub id `owner/name`, a bundle, or
    random:SHAPE (see shapes.py). InputError in one line for anything missing, truncated or not supported.
    """
    from dscale.models.shapes import is_shape, random_shape

    if is_shape(source):
        return random_shape(source, dtype, device, ranks=ranks)
    opened = open_target(source)
    model = build_target(opened.config, opened.tensors, dtype, device, ranks)
    return LoadedTarget(model, opened.config, opened.tokenizer(), source, opened.alias, opened.bundle)


@dataclass(frozen=True)
class OpenedTarget:
    """A target's config and its tensors, not yet read. path is a Hugging Face folder or a GGUF file."""

    config: TargetConfig
    tensors: SafetensorsCheckpoint | GGUFCheckpoint
    path: Path
    alias: str | None = None
    bundle: Bundle | None = None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that goes with it."""
        if isinstance(self.tensors, GGUFCheckpoint):
            return gguf_tokenizer(self.tensors, self.config.eos_token_ids)
        return Tokenizer.from_folder(self.path, self.config.eos_token_ids)


def open_target(source: str) -> OpenedTarget:
    """Find a target and read its config; sources as in load_target."""
    bundle = read_bundle(source) if is_bundle(source) else None
    source = bundle.target if bundle else source
    alias = source if source in ALIASES and not Path(source).exists() else None
    path = alias_folder(source) if alias else resolve_path(source)
    if path.is_file():
        checkpoint = GGUFCheckpoint(path)
        return OpenedTarget(gguf_config(checkpoint), checkpoint, path, None, bundle)
    return OpenedTarget(folder_config(path), SafetensorsCheckpoint(path), path, alias, bundle)


def resolve_path(source: str) -> Path:
    """The local folder or GGUF file that a source names; hub ids are fetched into the hub's cache."""
    path = Path(source).expanduser()
    if path.is_dir():
        require((path / "config.json").is_file(), f"{source}: has no config.json; expected a Hugging Face folder")
        return path
    if path.exists():
        with path.open("rb") as file:
            require(file.read(4) == b"GGUF", f"{source}: not a GGUF file; allowed are GGUF files and folders")
        return path
    if source.count("/") == 1 and not source.startswith((".", "/", "~")) and not source.endswith(".gguf"):
        return fetch_from_hub(source)
    aliases = ", ".join(ALIASES)
    raise InputError(f"{source}: no such file, folder or alias; known aliases are {aliases}; hub ids are owner/name")


def fetch_from_hub(repository: str) -> Path:
    """Download (or find in the hub's cache) the config, weights and tokenizer of a hub repository."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:  # network, permission and lookup errors of several libraries
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{repository}: no such folder, and fetching it from the hub failed ({reason})") from None


def folder_config(folder: Path) -> TargetConfig:
    """The TargetConfig of a Hugging Face folder."""
    generation = folder / "generation_config.json"
    return target_config(
        read_json(folder / "config.json"),
        str(folder / "config.json"),
        read_json(generation) if generation.is_file() else None,
    )


def build_target(
    config: TargetConfig,
    source: SafetensorsCheckpoint | GGUFCheckpoint,
    dtype: torch.dtype,
    device: str,
    ranks: Ranks = ALONE,
) -> Target:
    """A Target filled from a source. Weights are cast; the rotary table is never part of the model."""
    model, share, whole = empty_target(config, ranks, source.name)
    load_parameters(model, target_pieces(config), source, share, dtype, device, whole)
    model.tie()
    return model.eval().requires_grad_(False)


def empty_target(config: TargetConfig, ranks: Ranks, name: str) -> tuple[Target, Share, Target]:
    """On the meta device: a rank's Target, its share, and the whole Target (the same one where nothing is shared)."""
    share = undivided(config.decoder) if ranks.size == 1 else Share.must(config.decoder, ranks, name)
    with torch.device("meta"):
        whole = Target(config)
        model = whole if ranks.size == 1 else Target(replace(config, decoder=share.local), ranks)
    return model, share, whole


def random_target(config: TargetConfig, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    """A target with seeded random weights, for tests and benchmarks: sensible scales, no two layers alike."""
    with torch.device("meta"):
        model = Target(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        fan_in = parameter.shape[-1] if parameter.dim() == 2 else 1
        value = torch.randn(parameter.shape, generator=generator) * (fan_in**-0.5 if parameter.dim() == 2 else 0.1)
        value = value + 1.0 if "norm" in name else value
        value = value * fan_in**0.5 * 0.5 if name == "embedding" else value
        owner, _, attribute = name.rpartition(".")
        filled = torch.nn.Parameter(value.to(device, dtype), requires_grad=False)
        setattr(model.get_submodule(owner), attribute, filled)
    model.tie()
    return model.eval().requires_grad_(False)
