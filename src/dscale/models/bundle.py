"""A bundle: one folder that names a target and holds the drafter and predictor tuned for it (made by `dscale tune`).

    bundle.json   {"schema": "dscale.bundle/1", "target": …, "drafter": …, "predictor": …}
    drafter/      a drafter folder
    predictor/    a predictor folder, or none
    README.md     the model card

`target` is an alias, hub id, folder or GGUF file, a relative path counting from the bundle. A bundle stands wherever a
target does: `dscale generate -m BUNDLE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dscale.config import require
from dscale.models.aliases import ALIASES
from dscale.models.checkpoint import read_json

BUNDLE, SCHEMA = "bundle.json", "dscale.bundle/1"


@dataclass(frozen=True)
class Bundle:
    """What a bundle names: target as load_target takes it, folders of drafter and predictor."""

    target: str
    drafter: Path
    predictor: Path | None = None


def is_bundle(source: str) -> bool:
    """True when `source` is a folder with a bundle.json."""
    return (Path(source).expanduser() / BUNDLE).is_file()


def read_bundle(source: str) -> Bundle:
    """The bundle in a folder; InputError in one line for what is missing."""
    folder = Path(source).expanduser()
    record = read_json(folder / BUNDLE)
    require(record.get("schema") == SCHEMA, f"{folder / BUNDLE}: schema {record.get('schema')!r}, expected {SCHEMA!r}")
    for key in ("target", "drafter"):
        require(isinstance(record.get(key), str), f"{folder / BUNDLE}: {key}: {record.get(key)!r} must be text")
    target = record["target"]
    if target not in ALIASES and (folder / target).exists():
        target = str(folder / target)
    drafter = folder / record["drafter"]
    require(drafter.is_dir(), f"{folder / BUNDLE}: drafter: {drafter} is not a folder")
    predictor = folder / record["predictor"] if record.get("predictor") else None
    require(predictor is None or predictor.is_dir(), f"{folder / BUNDLE}: predictor: {predictor} is not a folder")
    return Bundle(target, drafter, predictor)
