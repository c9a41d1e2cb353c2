"""Where a server keeps the last predictor that a refit brought, so that a restart goes on from it.

    FOLDER/manifest.json       schema dscale.refit/1: version, drafter, base, scores, SHA-256 of the weights
    FOLDER/predictor-3/        config.json and predictor.safetensors, as any predictor folder

The manifest is replaced after the predictor is on disk, so a kill at any moment leaves the old or the new one whole.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dscale.config import InputError, require
from dscale.speculation.predictor import WEIGHTS, Predictor
from dscale.train.artifacts import MANIFEST, file_hash, read_json, write_json

SCHEMA = "dscale.refit/1"


def weights_hash(predictor: Predictor) -> str:
    """SHA-256 over a predictor's weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, value in sorted(predictor.state_dict().items()):
        digest.update(f"{name} {list(value.shape)}\n".encode() + value.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class RefitFolder:
    """The folder of one drafter. base: weights_hash of the predictor that refits began with."""

    path: Path
    drafter_hash: str
    base: str

    def read(self) -> tuple[int, Predictor] | None:
        """Version and predictor kept last; None for a new folder, or when the server now begins with another predictor.

        InputError for a folder of another drafter, or damaged.
        """
        manifest = self.path / MANIFEST
        if not manifest.exists():
            return None
        record = read_json(manifest, f"a {SCHEMA} manifest")
        require(record.get("schema") == SCHEMA, f"{manifest}: schema {record.get('schema')!r}, expected {SCHEMA!r}")
        found = record.get("drafter_hash")
        require(
            found == self.drafter_hash,
            f"{self.path}: refits of drafter {found}, but the drafter here is {self.drafter_hash}; give another folder",
        )
        if record.get("base") != self.base:
            return None
        version, folder = record.get("version"), self.path / str(record.get("predictor"))
        if not isinstance(version, int):
            raise InputError(f"{manifest}: version {version!r} is not a whole number")
        predictor = Predictor.load(folder, self.drafter_hash)
        require(
            file_hash(folder / WEIGHTS) == record.get("sha256"),
            f"{folder / WEIGHTS}: not what {MANIFEST} lists; delete {self.path} and start again",
        )
        return version, predictor

    def keep(self, version: int, predictor: Predictor, record: dict[str, Any]) -> None:
        """Make this the predictor that is kept; record: what its refit measured. InputError when the disk refuses."""
        name = f"predictor-{version}"
        folder = self.path / name
        about = {"schema": SCHEMA, "version": version, "predictor": name, "drafter_hash": self.drafter_hash}
        try:
            shutil.rmtree(folder, ignore_errors=True)
            predictor.save(folder)
            digest = file_hash(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise InputError(f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
        write_json(self.path / MANIFEST, about | {"base": self.base, "sha256": digest, "refit": record})
        for old in self.path.glob("predictor-*"):
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)
