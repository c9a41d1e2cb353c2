"""The record of a serving benchmark: what `dscale bench` writes, and what tables, intervals and reports are made from.

A record is one JSON file. Everything else is computed from its rows; nothing is typed by hand. Schema 1:

    {"kind": "bench", "schema": 1, "versions": {...}, "machine": {...}, "command": "...", "seed": 0,
     "simulated": false, "manifest": {...}, "arms": [...], "runs": [...], "notes": [...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.evaluate.record_file import ROWS, read_json, rounded

KIND = "bench"
SCHEMA = 1


@dataclass(frozen=True)
class RequestRow:
    """One measured request. Seconds are from the run's first submission; token counts are clipped at the stop token.

    first_token_s and the counters are None where a server does not tell them. drafted: drafts offered (steps · (W-1));
    verified: verification rows, anchors included; accepted: accepted drafts; steps: decode steps. error: one line, or
    None when the request was answered.
    """

    id: str
    prompt_id: str
    workload: str
    sent_s: float
    first_token_s: float | None
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    steps: int | None = None
    accepted: int | None = None
    verified: int | None = None
    drafted: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class ArmInfo:
    """A named configuration. engine: dscale, vllm, sglang, transformers or server (unknown, given by its address).

    policy, width, slots: None where the engine has none. baseline: the arm others are compared with. autoregressive:
    no speculation. family: arms that are one baseline tuned over its own knob share a family, and its best stands for
    it. settings: what started it, as far as it is known.
    """

    name: str
    engine: str
    policy: str | None = None
    width: int | None = None
    slots: float | None = None
    baseline: bool = False
    autoregressive: bool = False
    family: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One pass over the manifest. boot: number of the process that served it, from 0; run: from 0 within the boot;
    order: place among all runs of the record. window_s: first measured submission to last completion. rate: requests
    a second of an open loop, None in a closed one. counters: differences of the server's own counters over the window,
    by our names (drafts, accepted, verified, steps, step_seconds, accepted_by_position …); empty when it has none.
    client_busy: share of a core that the client of a server used over the window; None without one, and in old records.
    """

    arm: str
    concurrency: int
    boot: int
    run: int
    order: int
    window_s: float
    rows: tuple[RequestRow, ...]
    rate: float | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    client_busy: float | None = None

    @property
    def failed(self) -> tuple[RequestRow, ...]:
        return tuple(row for row in self.rows if row.error is not None)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of the measured requests over the window. InputError when a request failed."""
        require(not self.failed, f"{self.arm}: {len(self.failed)} requests failed, so there is no throughput")
        return sum(row.output_tokens for row in self.rows) / self.window_s


def as_kept(run: Run) -> Run:
    """The run with what was measured as a record keeps it: seconds to the microsecond, other floats to seven digits."""
    rows = tuple(RequestRow(*rounded(list(asdict(row).values()), ROWS)) for row in run.rows)
    about = {name: rounded(getattr(run, name), name) for name in ("window_s", "client_busy", "counters")}
    return replace(run, rows=rows, **about)


@dataclass(frozen=True)
class BenchRecord:
    """All runs of one benchmark. manifest: name, sha256, requests, distinct prompts, workloads with their counts."""

    versions: dict[str, str]
    machine: dict[str, Any]
    command: str
    seed: int
    manifest: dict[str, Any]
    arms: tuple[ArmInfo, ...]
    runs: tuple[Run, ...]
    simulated: bool = False
    notes: tuple[str, ...] = ()

    def arm(self, name: str) -> ArmInfo:
        """The arm of this name. InputError when there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise InputError(f"arm {name!r} is not in the record; it has {', '.join(arm.name for arm in self.arms)}")

    def as_json(self) -> dict[str, Any]:
        """The file's content. Rows are lists in the order of `row_fields`, so that records stay small."""
        names = [entry.name for entry in fields(RequestRow)]
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain["arms"] = [asdict(arm) for arm in self.arms]
        plain["runs"] = [
            {entry.name: getattr(run, entry.name) for entry in fields(run)}
            | {"rows": [[getattr(row, name) for name in names] for row in run.rows]}
            for run in self.runs
        ]
        return {"kind": KIND, "schema": SCHEMA, "row_fields": names} | plain | {"notes": list(self.notes)}


def read_record(path: Path) -> BenchRecord:
    """A record from its file. InputError for another kind, a newer schema, or a file that is none."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read a benchmark record: {error}") from None
    require(isinstance(content, dict) and content.get("kind") == KIND, f"{path}: no record of `dscale bench`")
    require(content.get("schema") == SCHEMA, f"{path}: schema {content.get('schema')}; this version reads {SCHEMA}")
    try:
        return record_of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged record of `dscale bench`: {error}") from None


def record_of(content: Mapping[str, Any]) -> BenchRecord:
    """The record that `as_json` wrote."""
    names = content["row_fields"]
    runs = tuple(
        Run(**run | {"rows": tuple(RequestRow(**dict(zip(names, row, strict=True))) for row in run["rows"])})
        for run in content["runs"]
    )
    own = {entry.name: content[entry.name] for entry in fields(BenchRecord)}
    arms = tuple(ArmInfo(**arm) for arm in content["arms"])
    return BenchRecord(**own | {"arms": arms, "runs": runs, "notes": tuple(content["notes"])})
