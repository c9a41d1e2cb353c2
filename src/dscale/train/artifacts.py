"""Folders that the workshop's commands leave behind: whole files or none, checked when read, resumable at any point.

A stage is one folder with a manifest. The manifest holds what the stage was made from (`inputs`: everything that
decides its outcome, so that a second run with the same inputs goes on where the first stopped and one with others is
refused), the shards written so far with their SHA-256, and a `summary` once the stage is complete. Nothing that
depends on the clock goes into it: an interrupted and an uninterrupted run end with the same bytes. Times go to
timing.json.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from dscale.config import InputError, require

MANIFEST, TIMING = "manifest.json", "timing.json"
Report = Callable[[str, float, float | None], None]  # (what is being done, how much is done, of how much)


def silent(what: str, done: float, total: float | None = None) -> None:
    """A Report that says nothing."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: beside it, flushed to disk, then renamed. InputError when the disk refuses."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written, {len(data) / 1e6:.1f} MB ({error.strerror or error})") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    write_bytes(path, encoded(value))


def encoded(value: Any) -> bytes:
    """JSON as these folders hold it: sorted, indented, with a newline at its end."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object; InputError names the file and `what` it should be."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not {what} ({getattr(error, 'strerror', None) or error})") from None
    require(isinstance(value, dict), f"{path}: not {what}; expected a JSON object")
    return value


@dataclass(frozen=True)
class Shard:
    """One file of a stage. part: which piece of it (such as "train"); counts: what is in it, by name."""

    file: str
    sha256: str
    size: int  # bytes
    part: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, file: str, data: bytes, part: str = "", counts: dict[str, int] | None = None) -> Shard:
        """The entry of a file that holds `data`."""
        return cls(file, hashlib.sha256(data).hexdigest(), len(data), part, counts or {})


def write_file(folder: Path, name: str, data: bytes, part: str = "", counts: dict[str, int] | None = None) -> Shard:
    """Bytes as folder/name, whole or not at all; its entry for the manifest."""
    write_bytes(folder / name, data)
    return Shard.of(name, data, part, counts)


def file_hash(path: Path) -> str:
    """SHA-256 of a small file, such as a manifest."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_shard(
    folder: Path, name: str, tensors: Mapping[str, np.ndarray], part: str = "", counts: dict[str, int] | None = None
) -> Shard:
    """Arrays as one safetensors file folder/name."""
    data = save({key: np.ascontiguousarray(value) for key, value in tensors.items()})
    return write_file(folder, name, data, part, counts)


def check_shard(folder: Path, shard: Shard) -> Path:
    """The shard's path; InputError when it is missing, cut or altered."""
    path = folder / shard.file
    require(path.is_file(), f"{path}: missing, though {MANIFEST} lists it; make the folder again")
    size = path.stat().st_size
    require(size == shard.size, f"{path}: has {size} bytes, {MANIFEST} says {shard.size}; delete it and run again")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    require(digest.hexdigest() == shard.sha256, f"{path}: corrupt (SHA-256 differs); delete it and run again")
    return path


def read_shard(folder: Path, shard: Shard) -> dict[str, np.ndarray]:
    """Arrays of a shard, its checksum verified."""
    path = check_shard(folder, shard)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path}: corrupt ({error}); delete it and run again") from None


class Stage:
    """The output folder of one command. Open it, `add` shards one by one, `finish` with a summary."""

    def __init__(self, folder: Path, schema: str, inputs: dict[str, Any]) -> None:
        self.folder, self.schema, self.inputs = folder, schema, inputs
        self.shards: list[Shard] = []
        self.summary: dict[str, Any] | None = None

    @classmethod
    def open(cls, folder: Path, schema: str, inputs: dict[str, Any]) -> Stage:
        """A new stage, or the one that an earlier run with the same inputs began. InputError when it had others."""
        stage = cls(folder, schema, json.loads(json.dumps(inputs)))
        if not (folder / MANIFEST).exists():
            stage.save()
            return stage
        found = cls.load(folder, schema)
        for key in sorted(set(found.inputs) | set(stage.inputs)):
            old, new = found.inputs.get(key), stage.inputs.get(key)
            require(old == new, f"{folder}: was made with {key} {old}, now it is {new}; give another folder")
        present = [shard for shard in found.shards if (folder / shard.file).is_file()]
        stage.shards = present
        stage.summary = found.summary if len(present) == len(found.shards) else None
        return stage

    @classmethod
    def load(cls, folder: Path, schema: str, complete: bool = False) -> Stage:
        """The stage in a folder; InputError when it is of another kind, or unfinished although it must be complete."""
        record = read_json(folder / MANIFEST, f"a {schema} manifest")
        require(
            record.get("schema") == schema,
            f"{folder / MANIFEST}: schema {record.get('schema')!r}, expected {schema!r}",
        )
        stage = cls(folder, schema, record.get("inputs", {}))
        try:
            stage.shards = [Shard(**one) for one in record["shards"]]
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder / MANIFEST}: its list of shards is damaged ({error})") from None
        stage.summary = record.get("summary")
        require(not complete or stage.complete, f"{folder}: is not finished; run the command that makes it again")
        return stage

    @property
    def complete(self) -> bool:
        """True once finished."""
        return self.summary is not None

    def has(self, file: str) -> bool:
        """True when a shard of that name is listed (and was there when the stage was opened)."""
        return any(shard.file == file for shard in self.shards)

    def of(self, part: str) -> list[Shard]:
        """Shards of one part, in the order of their names."""
        return sorted((shard for shard in self.shards if shard.part == part), key=lambda shard: shard.file)

    def add(self, shard: Shard) -> None:
        """List a shard that was written; the manifest is saved."""
        self.shards = [one for one in self.shards if one.file != shard.file] + [shard]
        self.save()

    def finish(self, summary: dict[str, Any]) -> None:
        """Mark the stage complete."""
        self.summary = summary
        self.save()

    def save(self) -> None:
        """Write the manifest, shards in the order of their names."""
        listed = [asdict(shard) for shard in sorted(self.shards, key=lambda shard: shard.file)]
        record = {"schema": self.schema, "inputs": self.inputs, "shards": listed, "summary": self.summary}
        write_json(self.folder / MANIFEST, record)
