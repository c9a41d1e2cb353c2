"""Made-up traces whose drafts pass as often as the drafter believes in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dscale.speculation.features import CONFIDENCE, CONTEXT, RANKS
from dscale.train.artifacts import Stage
from dscale.train.traces import TRACES, Traces, write_traces

GROUPS = ("confidence", "context")


def made_up(
    requests: int = 40, width: int = 6, seed: int = 0, sharpness: float = 1.0, workloads: tuple[str, ...] = ("a", "b")
) -> Traces:
    """Requests of 3 … 12 steps, two of a prompt. The drafter's log-odds are `sharpness` times the true ones."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 13, requests)
    count, drafts = int(lengths.sum()), width - 1
    request = np.repeat(np.arange(requests), lengths)
    position = np.concatenate([np.arange(one) * 3 for one in lengths])
    odds = rng.normal(1.0, 1.5, (count, 1)) + rng.normal(0, 1.0, (count, drafts))
    passed = rng.random((count, drafts)) < 1 / (1 + np.exp(-odds))
    accepted = passed.cumprod(1).sum(1)
    features = np.zeros((count, drafts, CONFIDENCE))
    features[..., 0] = 16 + odds
    features[..., 1:RANKS] = 1.0
    features[..., RANKS] = -np.log1p(np.exp(-sharpness * odds))
    context = np.zeros((count, CONTEXT))
    context[:, 0] = 8
    rows = np.concatenate([features.reshape(count, -1), context], axis=1)
    return Traces(
        features=rows.astype(np.float16),
        drafts=np.zeros((count, drafts), np.int32),
        accepted=accepted.astype(np.int16),
        slots=np.full(count, width, np.int16),
        request=request.astype(np.int32),
        prompt=(request // 2).astype(np.int64),
        position=position.astype(np.int32),
        workload=(request // 2 % len(workloads)).astype(np.int16),
        groups=GROUPS,
        width=width,
        workloads=workloads,
    )


def save(traces: Traces, folder: Path, **inputs: object) -> Path:
    """A finished trace folder."""
    own = {"groups": list(traces.groups), "width": traces.width, "workloads": list(traces.workloads)}
    stage = Stage.open(folder, TRACES, {**own, "projection_seed": 0, **inputs})
    stage.add(write_traces(folder, "traces-000.safetensors", traces))
    stage.finish({"records": len(traces)})
    return folder
