"""Records that a report can be made of, known by their kind, or by their schema where they have none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.evaluate import bench_record
from dscale.evaluate.record_file import read_json

KINDS = {"bench": 1, "certificate": 1, "reproducibility": 1, "figures": 1}  # kind: schema that is read here
SCHEMAS = {
    "dscale.evaluate_policies/1": "policies",
    "dscale.evaluate_drafter/1": "drafter",
    "dscale.gpu_throughput/1": "throughput",
    "dscale.gpu_step/1": "step",
}
TITLES = {
    "bench": "dscale bench",
    "certificate": "dscale certify",
    "reproducibility": "dscale reproduce",
    "figures": "benchmarks/cpu_figures.py",
    "policies": "dscale evaluate policies",
    "drafter": "dscale evaluate drafter",
    "throughput": "benchmarks/gpu_throughput.py",
    "step": "benchmarks/gpu_step.py",
}


@dataclass(frozen=True)
class Source:
    """One record: its file's name, its kind (a key of TITLES) and its content."""

    name: str
    kind: str
    content: dict[str, Any]

    @property
    def simulated(self) -> bool:
        """Whether acceptance was made up in it."""
        return bool(self.content.get("simulated")) or "simulated" in str(self.content.get("note", ""))

    @property
    def versions(self) -> dict[str, str]:
        """Versions that it names."""
        found = self.content.get("versions", {})
        return found if isinstance(found, dict) else {}

    def bench(self) -> bench_record.BenchRecord:
        """A record of `dscale bench`."""
        return bench_record.record_of(self.content)


def read_source(path: Path) -> Source:
    """The record in a file, or record.json of a folder; InputError for what is none, or is of another version."""
    file = path / "record.json" if path.is_dir() else path
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read a record: {str(error).splitlines()[0]}") from None
    name = f"{path.name}/record.json" if path.is_dir() else path.name
    require(isinstance(content, dict), f"{path}: no record but a {type(content).__name__}")
    kind, schema = content.get("kind"), content.get("schema")
    if isinstance(kind, str) and kind in KINDS:
        require(schema == KINDS[kind], f"{path}: {kind} of schema {schema!r}; this version reads {KINDS[kind]}")
        return Source(name, kind, content)
    known = ", ".join(TITLES.values())
    require(
        isinstance(schema, str) and schema in SCHEMAS,
        f"{path}: unknown record (kind {kind!r}, schema {schema!r}); known are those of {known}",
    )
    return Source(name, SCHEMAS[str(schema)], content)
