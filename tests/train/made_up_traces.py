"""Traces whose acceptance can be read off the features, and folders of them."""

from pathlib import Path

import numpy as np

from dscale.speculation.features import feature_size
from dscale.train.artifacts import Stage
from dscale.train.traces import TRACES, Traces, write_traces

GROUPS = ("confidence", "context")


def made_up(count: int = 3000, width: int = 4, groups=GROUPS, seed: int = 0, prompts: int = 300, noise: float = 1.0):
    """N blocks of `width` rows whose features 5 and 7 say, with noise, how many drafts pass."""
    rng = np.random.default_rng(seed)
    accepted = rng.integers(0, width, count)
    features = rng.normal(size=(count, feature_size(width, groups))) * 5 + 3
    features[:, 7] = accepted * 10 + noise * rng.normal(size=count)
    features[:, 5] = np.minimum(accepted, 2) * 3 + noise * rng.normal(size=count)
    features[:, 3] = 2.0  # never varies
    prompt = rng.integers(0, prompts, count)
    return Traces(
        features=features.astype(np.float16),
        drafts=rng.integers(0, 50, (count, width - 1)).astype(np.int32),
        accepted=accepted.astype(np.int16),
        slots=np.full(count, width, np.int16),
        request=prompt.astype(np.int32),
        prompt=prompt.astype(np.int64) * 7919,
        position=rng.integers(0, 90, count).astype(np.int32),
        workload=(prompt % 2).astype(np.int16),
        groups=groups,
        width=width,
        workloads=("even", "odd"),
    )


def write_folder(folder: Path, traces: Traces, drafter_hash: str, seed: int = 0) -> Path:
    """A finished trace folder of two shards."""
    inputs = {
        "drafter_hash": drafter_hash, "width": traces.width, "groups": list(traces.groups),
        "workloads": list(traces.workloads), "projection_seed": seed,
    }  # fmt: skip
    stage = Stage.open(folder, TRACES, inputs)
    middle = len(traces) // 2
    for number, rows in enumerate((np.arange(middle), np.arange(middle, len(traces)))):
        stage.add(write_traces(folder, f"traces-{number:05d}.safetensors", traces.select(rows)))
    stage.finish({"records": len(traces)})
    return folder
