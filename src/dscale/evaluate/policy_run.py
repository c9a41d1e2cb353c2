"""`dscale evaluate policies`: every policy on the same traces, from a trace folder to a record, a table and plots.

OUT holds record.json (schema SCHEMA), table.md, policies.png and .svg, and costs.json, the cost table that speeds are
modelled with: a given one, or one measured here. Speed = tokens / seconds, where a step's seconds come from that table
and are shared equally by its lanes. Intervals: bootstrap over prompts within each workload, all policies on the same
resamples. They hold what prompts make uncertain, not the timing of steps.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dscale.config import require, resolve_dtype
from dscale.engine.placement import default_dtype, resolve_device
from dscale.evaluate.cost_curve import CostConfig, MeasuredCosts, measure, read_costs, to_record
from dscale.evaluate.policy_lab import Arm, Lab, lane_steps, raw_windows
from dscale.evaluate.policy_plots import plot_policies
from dscale.evaluate.policy_record import checks, summarise, table
from dscale.evaluate.record_file import record_text, rounded
from dscale.evaluate.survival_models import dspark_survival, predictor_survival, recorded
from dscale.models.drafter_checkpoint import drafter_hash, load_drafter
from dscale.models.loader import load_target
from dscale.speculation.predictor import Predictor
from dscale.train.artifacts import (
    MANIFEST,
    TIMING,
    Report,
    Stage,
    check_shard,
    encoded,
    file_hash,
    read_json,
    silent,
    write_file,
    write_json,
)
from dscale.train.predictor import FitConfig, split_by_prompt
from dscale.train.traces import TRACES, Traces

SCHEMA = "dscale.evaluate_policies/1"
RECORD, TABLE, COST_FILE = "record.json", "table.md", "costs.json"
PARTS = ("auto", "holdout", "all")
MAX_CENSORED = 0.02  # share of records cut in the middle of an answer that is left out without complaint
LIMITS = (
    "Recorded steps stand where whole-block verification led; a trimmed step would have gone on elsewhere. Progress of "
    "a step is 1 + min(accepted, rows - 1) at the recorded anchor.",
    "Speeds are modelled: recorded acceptance over measured step times. Intervals resample prompts; the timing of "
    "steps is not in them.",
)
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"concurrency": (2,), "budgets": (2, 4), "resamples": 200, "costs": CostConfig((2, 4), 16, 1, 2)},
    "full": {},
}


@dataclass(frozen=True)
class PoliciesConfig:
    """What to compare. predictor: its folder, None leaves dvl out. costs_file: a cost table; None measures one with
    target (None: the traces' own) and drafter ("auto": the one that comes with the target).

    budgets: slots a request of shared policies, those wider than the block left out. part: holdout (the prompts that
    the predictor was not fitted to), all, or auto: holdout where the predictor says that these traces fitted it.
    """

    traces: str
    predictor: str | None = None
    costs_file: str | None = None
    target: str | None = None
    drafter: str = "auto"
    concurrency: tuple[int, ...] = (8, 32)
    budgets: tuple[int, ...] = tuple(range(4, 17))
    part: str = "auto"
    resamples: int = 1000
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        for name in ("concurrency", "budgets"):
            values = getattr(self, name)
            require(len(values) > 0 and min(values) >= 1, f"{name}: {list(values)} must be numbers from 1")
            require(list(values) == sorted(set(values)), f"{name}: {list(values)} must be ascending")
        require(self.part in PARTS, f"part: {self.part!r}; allowed are {', '.join(PARTS)}")
        require(self.resamples >= 100, f"resamples: {self.resamples} must be at least 100")
        require(self.seed >= 0, f"seed: {self.seed} must be 0 or positive")


def run(config: PoliciesConfig, out: Path, report: Report = silent) -> dict[str, Any]:
    """Compare the policies, write OUT; returns the record with "already": True when it was complete before."""
    source = Stage.load(Path(config.traces), TRACES, complete=True)
    predictor = Predictor.load(config.predictor, source.inputs.get("drafter_hash")) if config.predictor else None
    _check_projections(predictor, source, config)
    traces, about = chosen_records(config, predictor)
    walks = {lanes: lane_steps(traces, lanes, config.seed) for lanes in config.concurrency}
    if config.costs_file is not None:
        read_costs(Path(config.costs_file))[0].require_lives(config.concurrency)
    stage = Stage.open(out, SCHEMA, _inputs(config))
    if stage.complete:
        for shard in stage.shards:
            check_shard(out, shard)
        return read_json(out / RECORD, SCHEMA) | {"already": True}
    began = time.perf_counter()
    costs, priced = _costs(config, source, stage, report)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "config": json.loads(json.dumps(asdict(config))),
        "traces": {"target": source.inputs.get("target"), "drafter_hash": source.inputs.get("drafter_hash")} | about,
        "costs": {key: value for key, value in priced.items() if key != "steps"},
        "limits": list(LIMITS) + ([] if predictor else ["No predictor was given: dvl is left out."]),
        "concurrency": {},
    }
    for lanes, rows in walks.items():
        lab = Lab(recorded(traces), rows, costs)
        resizes = str(priced.get("device", "cpu")).startswith("cpu")
        record["concurrency"][str(lanes)] = rounded(_compare(config, lab, traces, predictor, resizes, report))
    _write(stage, record)
    write_json(out / TIMING, {"seconds": round(time.perf_counter() - began, 2)})
    return record | {"already": False}


def _inputs(config: PoliciesConfig) -> dict[str, Any]:
    """All that decides the outcome; a measured cost table decides it as well and stays in OUT once it is there."""
    own = {key: value for key, value in asdict(config).items() if key not in ("traces", "predictor", "costs_file")}
    digests: dict[str, Any] = {"traces": _digest(Path(config.traces) / MANIFEST), "predictor": None, "costs_file": None}
    if config.predictor is not None:
        digests["predictor"] = _digest(Path(config.predictor) / "predictor.safetensors")
    if config.costs_file is not None:
        digests["costs_file"] = _digest(Path(config.costs_file))
        own = {key: value for key, value in own.items() if key not in ("target", "drafter", "dtype", "device", "costs")}
    return digests | own


def _digest(path: Path) -> str:
    require(path.is_file(), f"{path}: no such file")
    return file_hash(path)


def _check_projections(predictor: Predictor | None, source: Stage, config: PoliciesConfig) -> None:
    if predictor is None or not predictor.config.projects:
        return
    seed, found = predictor.config.projection_seed, source.inputs.get("projection_seed")
    require(seed == found, f"predictor {config.predictor}: projection seed {seed}, but {config.traces} has {found}")


def chosen_records(config: PoliciesConfig, predictor: Predictor | None) -> tuple[Traces, dict[str, Any]]:
    """The records to replay, and what was chosen and left out. Blocks that were cut in the middle of an answer say
    nothing of what other policies would have kept: they are left out, or refused where there are many."""
    traces = Traces.open(Path(config.traces))
    part, fitted = _part(config)
    chosen = traces.select(split_by_prompt(traces.prompt, fitted)["holdout"]) if part == "holdout" else traces
    last = np.full(int(chosen.request.max(initial=-1)) + 1, -1)
    np.maximum.at(last, chosen.request, chosen.position)
    ends = chosen.position == last[chosen.request]
    whole = chosen.exact | ends
    cut = int((~whole).sum())
    require(
        cut <= MAX_CENSORED * max(len(chosen), 1),
        f"{config.traces}: {cut} of {len(chosen)} blocks were not verified to their end; record with policy full",
    )
    about = {
        "records": len(traces),
        "part": part,
        "used": int(whole.sum()),
        "cut": cut,
        "requests": int((last >= 0).sum()),
        "prompts": len(np.unique(chosen.prompt)),
        "width": traces.width,
        "workloads": list(traces.workloads),
    }
    return chosen.select(whole), about


def _part(config: PoliciesConfig) -> tuple[str, FitConfig]:
    """holdout or all, and the fit whose split decides what the holdout is."""
    manifest = Path(config.predictor or "") / MANIFEST
    inputs = read_json(manifest, "a manifest").get("inputs", {}) if config.predictor and manifest.is_file() else {}
    shares = {name: inputs[name] for name in ("validation", "holdout", "seed") if name in inputs}
    if config.part != "auto":
        return config.part, FitConfig(**shares)
    used = _digest(Path(config.traces) / MANIFEST) in inputs.get("traces", [])
    return ("holdout" if used else "all"), FitConfig(**shares)


def _costs(config: PoliciesConfig, source: Stage, stage: Stage, report: Report) -> tuple[MeasuredCosts, dict[str, Any]]:
    """The cost table: the one of an interrupted run, the given one, or one measured now; OUT keeps it."""
    if not stage.has(COST_FILE):
        if config.costs_file is not None:
            record = read_costs(Path(config.costs_file))[1]
        else:
            record = _measured(config, source, report)
        stage.add(write_file(stage.folder, COST_FILE, encoded(record), "record"))
    return read_costs(stage.folder / COST_FILE)


def _measured(config: PoliciesConfig, source: Stage, report: Report) -> dict[str, Any]:
    name = config.target or source.inputs.get("target")
    require(isinstance(name, str), f"{config.traces}: names no target; give --target, or a cost table with --costs")
    device = resolve_device(config.device)
    dtype = default_dtype(device) if config.dtype == "auto" else resolve_dtype(config.dtype)
    loaded = load_target(str(name), dtype, device)
    path = loaded.own_drafter if config.drafter == "auto" else config.drafter
    require(path is not None, f"drafter: none comes with {name}; give --drafter, or a cost table with --costs")
    assert path is not None
    bound, found = source.inputs.get("drafter_hash"), drafter_hash(str(path))
    require(found == bound, f"drafter {path}: has hash {found}, but {config.traces} was recorded with {bound}")
    drafter = load_drafter(path, loaded, dtype, device)
    steps = measure(loaded, drafter, config.concurrency, device, config.costs, report)
    about = {
        "device": device,
        "device_name": torch.cuda.get_device_name() if device != "cpu" else platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "model": name,
        "width": drafter.config.width,
        "context": config.costs.context,
        "torch": torch.__version__,
    }
    return to_record(steps, **about)


def _compare(
    config: PoliciesConfig, lab: Lab, traces: Traces, predictor: Predictor | None, resizes: bool, report: Report
) -> dict[str, Any]:
    """All arms at one concurrency, summed up. resizes: as of speculation.auto, true where no graphs are captured."""
    lanes, rows = lab.lanes, lab.rows
    budgets = tuple(budget for budget in config.budgets if budget <= traces.width)
    what = f"policies at {lanes}"
    arms: list[Arm] = lab.fixed()
    report(what, 1, 6)
    arms += lab.confidence(budgets)
    report(what, 2, 6)
    arms += lab.dspark(dspark_survival(lab.recorded)[rows], budgets)
    report(what, 3, 6)
    q = predictor_survival(predictor, traces, lanes)[rows] if predictor is not None else None
    if q is not None:
        arms += lab.shared("dvl seeded", q, budgets, seeded=True) + lab.shared("dvl exact", q, budgets)
        arms.append(lab.arm("dvl windows", None, raw_windows(q), adaptive=True, q=q))
    report(what, 4, 6)
    arms.append(lab.auto(q, resizes))
    arms += lab.oracle(budgets)
    report(what, 5, 6)
    made = summarise(traces, rows, arms, config.resamples, config.seed)
    report(what, 6, 6)
    return {"steps": len(rows), "records": rows.size, "auto_scores": "predictor" if q is not None else "confidence"} | {
        "arms": made,
        "checks": checks(made),
    }


def _write(stage: Stage, record: dict[str, Any]) -> None:
    drawn = plot_policies(record)
    record["plot"] = bool(drawn)
    for name, data in sorted(drawn.items()):
        stage.add(write_file(stage.folder, name, data, "record"))
    stage.add(write_file(stage.folder, TABLE, table(record).encode(), "record"))
    stage.add(write_file(stage.folder, RECORD, record_text(record, exact=True, sort=True).encode(), "record"))
    stage.finish({"concurrency": sorted(record["concurrency"], key=int), "used": record["traces"]["used"]})
