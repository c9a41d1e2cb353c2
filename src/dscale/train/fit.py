"""`dscale fit`: from trace folders to a predictor folder with its measured quality.

OUT holds config.json and predictor.safetensors (what an engine loads), metrics.json (schema dscale.fit/1: all figures
of quality.py on held-out prompts), reliability.png, manifest.json and timing.json. A killed run goes on from its last
checkpoint. With `start` it goes on from an existing predictor; with `never_worse` that one is kept unless the new one
predicts the held-out prompts better.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dscale.config import require
from dscale.engine.placement import resolve_device
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.predictor import KIND, WEIGHTS, Predictor, PredictorConfig, survival
from dscale.train.artifacts import (
    MANIFEST,
    TIMING,
    Report,
    Shard,
    Stage,
    check_shard,
    file_hash,
    read_json,
    read_shard,
    silent,
    write_file,
    write_json,
    write_shard,
)
from dscale.train.network import forward
from dscale.train.predictor import (
    FitConfig,
    Fitted,
    columns_of,
    examples_of,
    fit_network,
    network_of,
    predictor_of,
    split_by_prompt,
)
from dscale.train.quality import (
    Outcomes,
    by_workload,
    position_scores,
    quality,
    reliability,
    requirement,
    signal_correlations,
)
from dscale.train.reliability import plot_reliability
from dscale.train.traces import TRACES, Traces, join_traces
from dscale.train.variants import Variant, comparison, variants

PREDICTOR, FIT = "dscale.predictor/1", "dscale.fit/1"
CONFIG, METRICS, PLOT, PARTIAL = "config.json", "metrics.json", "reliability.png", "partial"


@dataclass(frozen=True)
class FitJob:
    """What to fit and how. start: a predictor folder to go on from; never_worse keeps it unless the new one is better;
    compare fits the variants of variants.py too."""

    traces: tuple[str, ...]
    drafter: str
    fit: FitConfig = field(default_factory=FitConfig)
    start: str | None = None
    never_worse: bool = False
    compare: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        resolve_device(self.device)
        require(len(self.traces) > 0, "traces: none given; name at least one trace folder")
        require(len(set(self.traces)) == len(self.traces), "traces: a folder is given twice")
        require(not self.never_worse or self.start is not None, "never-worse: compares with --start; give a predictor")
        require(self.start is None or self.fit.members == 1, f"members: {self.fit.members} with --start; allowed is 1")

    @property
    def placed(self) -> str:
        """The device to fit on."""
        return resolve_device(self.device)


@dataclass(frozen=True)
class Source:
    """Trace records of all folders with what they have in common. manifests: SHA-256 of each folder's manifest."""

    traces: Traces
    projection_seed: int
    manifests: tuple[str, ...]


def open_sources(folders: tuple[str, ...], bound: str) -> Source:
    """Traces of all folders as one; InputError unless all are of the drafter with hash `bound` and of one kind."""
    parts, inputs, manifests = [], [], []
    for folder in map(Path, folders):
        stage = Stage.load(folder, TRACES, complete=True)
        found = stage.inputs.get("drafter_hash")
        require(found == bound, f"{folder}: traces of drafter {found}, but the drafter here is {bound}")
        parts.append(Traces.open(folder))
        inputs.append(stage.inputs)
        manifests.append(file_hash(folder / MANIFEST))
    for name in ("width", "groups", "projection_seed"):
        for path, one in zip(folders, inputs, strict=True):
            first, own = inputs[0].get(name), one.get(name)
            require(own == first, f"{path}: {name} {own}, but {folders[0]} has {first}; fit them apart")
    return Source(_join(parts), int(inputs[0].get("projection_seed", 0)), tuple(manifests))


def _join(parts: list[Traces]) -> Traces:
    """Records of several folders: requests numbered anew, workloads by name."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.workloads))
    moved, requests = [], 0
    for part in parts:
        number = np.array([names.index(name) for name in part.workloads], np.int16)
        workload = number[part.workload] if len(number) else part.workload
        moved.append(replace(part, request=part.request + np.int32(requests), workload=workload, workloads=names))
        requests += int(part.request.max(initial=-1)) + 1
    return join_traces(moved)


def run(job: FitJob, out: Path, report: Report = silent) -> dict[str, Any]:
    """Fit, measure, write OUT; returns metrics.json's content with "already": True when it was complete before."""
    bound = drafter_hash(job.drafter)
    old = Predictor.load(job.start, bound) if job.start is not None else None
    source = open_sources(job.traces, bound)
    job = _follow(job, old, source)
    stage = Stage.open(out, PREDICTOR, _inputs(job, source, bound))
    if stage.complete:
        for shard in stage.shards:
            check_shard(out, shard)
        return read_json(out / METRICS, FIT) | {"already": True}
    began = time.perf_counter()
    base = PredictorConfig(
        width=source.traces.width, drafter_hash=bound, features=job.fit.features, hidden_units=job.fit.hidden_units
        * job.fit.members, projection_seed=source.projection_seed, head=job.fit.head,
    )  # fmt: skip
    fitted = _fit(job, source, "predictor", job.fit, out, report, network_of(old) if old is not None else None)
    new = predictor_of(fitted.network, base)
    record = _measure(job, source, fitted, new, old)
    kept = old if record["kept"] == "old" and old is not None else new
    if job.compare:
        record["comparison"] = _compare(job, source, stage, report)
    _write(stage, kept, record)
    write_json(out / TIMING, {"seconds": round(time.perf_counter() - began, 2), "device": job.placed})
    shutil.rmtree(out / PARTIAL, ignore_errors=True)
    return record | {"already": False}


def _follow(job: FitJob, old: Predictor | None, source: Source) -> FitJob:
    """With a predictor to start from, its features, head and size are the fit's."""
    if old is None:
        return job
    config, width = old.config, source.traces.width
    require(config.width == width, f"predictor {job.start}: fitted for width {config.width}, the traces have {width}")
    require(
        not config.projects or config.projection_seed == source.projection_seed,
        f"predictor {job.start}: projection seed {config.projection_seed}, the traces have {source.projection_seed}",
    )
    fit = replace(job.fit, features=config.features, head=config.head, hidden_units=config.hidden_units)
    return replace(job, fit=fit)


def _inputs(job: FitJob, source: Source, bound: str) -> dict[str, Any]:
    """All that decides the outcome."""
    start = None
    if job.start is not None:
        start = file_hash(Path(job.start) / WEIGHTS)
    own = {"never_worse": job.never_worse, "compare": job.compare, "start": start}
    return {"traces": list(source.manifests), "drafter_hash": bound, **own, **asdict(job.fit)}


def _fit(
    job: FitJob, source: Source, name: str, config: FitConfig, out: Path, report: Report,
    start: Any = None, extra: np.ndarray | None = None,
) -> Fitted:  # fmt: skip
    def progress(epoch: int, loss: float) -> None:
        report(f"fit {name}", epoch, config.epochs)

    checkpoint = out / PARTIAL / name.replace(" ", "-")
    return fit_network(source.traces, config, job.placed, start, extra, checkpoint, progress)


def _measure(job: FitJob, source: Source, fitted: Fitted, new: Predictor, old: Predictor | None) -> dict[str, Any]:
    """metrics.json: of the predictor that is kept, on the holdout."""
    rows = fitted.splits["holdout"]
    held = source.traces.select(rows)
    outcomes = Outcomes.of(held)
    q = survival(fitted.z, job.fit.head)
    record: dict[str, Any] = {"schema": FIT, "kept": "new"}
    if old is not None:
        columns = columns_of(source.traces.width, source.traces.groups, old.config.features)
        before = survival(
            forward(old, examples_of(source.traces, rows, columns, None, "cpu").features), old.config.head
        )
        was, now = quality(before, outcomes), quality(q, outcomes)
        record["old"], record["new"] = was, now
        if job.never_worse and now["log_loss"] >= was["log_loss"]:
            record["kept"], q = "old", before
    slots = _required(outcomes)
    scores = quality(q, outcomes, slots)
    seen = outcomes.seen
    return record | {
        "holdout": scores,
        "by_workload": by_workload(q, outcomes, slots),
        "required": requirement(scores, slots),
        "mean_progress": round(1 + float(outcomes.accepted.double().mean()), 4),
        "signals": _rounded(signal_correlations(held)),
        "positions": _rounded(position_scores(q, outcomes)),
        "reliability": _rounded(reliability(q[:, 1:][seen].double(), outcomes.labels[seen].double())),
        "records": {name: len(part) for name, part in fitted.splits.items()},
        "prompts": {name: len(np.unique(source.traces.prompt[part])) for name, part in fitted.splits.items()},
        "whole_blocks": len(outcomes.whole),
        "parameters": sum(parameter.numel() for parameter in new.parameters()),
    }


def _required(outcomes: Outcomes) -> int:
    rows = outcomes.whole
    return (outcomes.select(rows) if len(rows) else outcomes).required_slots


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _compare(job: FitJob, source: Source, stage: Stage, report: Report) -> dict[str, Any]:
    """Fit every variant; the holdout's survival of each is a shard, so that a killed run does not fit it again."""
    listed = variants(job.fit, source.traces.groups)
    survivals: dict[str, Tensor] = {}
    sizes: dict[str, dict[str, Any]] = {}
    for variant in listed:
        file = f"compare-{variant.name.replace(' ', '-')}.safetensors"
        if not stage.has(file):
            stage.add(_fit_variant(job, source, variant, stage.folder, file, report))
        shard = next(one for one in stage.shards if one.file == file)
        survivals[variant.name] = torch.from_numpy(read_shard(stage.folder, shard)["survival"])
        sizes[variant.name] = {key: shard.counts[key] for key in ("parameters", "inputs")}
        sizes[variant.name]["served"] = variant.extra is None
    held = source.traces.select(split_by_prompt(source.traces.prompt, job.fit)["holdout"])
    outcomes = Outcomes.of(held)
    slots = _required(outcomes)
    table = comparison(survivals, outcomes, slots, job.fit.seed)
    return {
        "slots": slots,
        "variants": {
            name: table[name] | sizes[name] | {"quality": quality(q, outcomes, slots)} for name, q in survivals.items()
        },
    }


def _fit_variant(job: FitJob, source: Source, variant: Variant, out: Path, file: str, report: Report) -> Shard:
    extra = variant.extra(source.traces) if variant.extra is not None else None
    fitted = _fit(job, source, variant.name, variant.config, out, report, None, extra)
    q = survival(fitted.z, variant.config.head).numpy()
    counts = {"parameters": fitted.network.size, "inputs": fitted.network.first.in_features}
    return write_shard(out, file, {"survival": q}, "compare", counts)


def _write(stage: Stage, kept: Predictor, record: dict[str, Any]) -> None:
    """The predictor, its figures, the plot; then the stage is complete."""
    scores = {name: float(value) for name, value in record["holdout"].items()}
    scores |= {f"records_{name}": float(count) for name, count in record["records"].items()}
    config = replace(kept.config, metrics=scores)
    weights = {name: value.cpu().numpy() for name, value in kept.state_dict().items()}
    stage.add(write_shard(stage.folder, WEIGHTS, weights, "predictor"))
    stage.add(_text(stage.folder, CONFIG, {"kind": KIND, **asdict(config)}))
    stage.add(_text(stage.folder, METRICS, record))
    plot_reliability(record["positions"], record["reliability"], stage.folder / PLOT)
    stage.finish({"kept": record["kept"], "holdout": scores})


def _text(folder: Path, name: str, value: dict[str, Any]) -> Shard:
    return write_file(folder, name, (json.dumps(value, indent=2) + "\n").encode(), "record")
