"""Traces: what was known of a draft block before its verification, and how many of its drafts were then accepted.

One record per request and step: the features a predictor sees (speculation/features.py), the drafts, the accepted
length, and where it happened. On disk a folder (artifacts.Stage of schema TRACES) with one shard per chunk of
conversations; trace_run.py makes one from a corpus or from prompts, live_traces.py from whatever traffic an engine has.

Censoring: slots is the number of rows that could show something, the anchor's included. accepted < slots - 1 is exact,
and so is accepted = W - 1; accepted = slots - 1 < W - 1 says "at least that many": either fewer rows than the block has
were verified, or the answer ended inside the block with an accepted draft, and nobody knows how it would have gone on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dscale.config import require
from dscale.engine.recorder import RequestTrace
from dscale.speculation.features import GROUPS, feature_size
from dscale.train.artifacts import Shard, Stage, read_shard, write_shard

TRACES = "dscale.traces/1"
DTYPES = {
    "features": np.float16,
    "drafts": np.int32,
    "accepted": np.int16,
    "slots": np.int16,
    "request": np.int32,
    "prompt": np.int64,
    "position": np.int32,
    "workload": np.int16,
}


@dataclass(frozen=True)
class Traces:
    """N records of blocks of `width` rows (W), D = W - 1 drafts each.

    features float16 [N, F], F = feature_size(W, groups); drafts int32 [N, D]; accepted and slots int16 [N] (see the
    module's text); request int32 [N]: answers numbered within the folder; prompt int64 [N]: id of the prompt, which
    splits go by; position int32 [N]: answer tokens before the step, 0 at a request's first; workload int16 [N]: index
    into workloads.
    """

    features: np.ndarray
    drafts: np.ndarray
    accepted: np.ndarray
    slots: np.ndarray
    request: np.ndarray
    prompt: np.ndarray
    position: np.ndarray
    workload: np.ndarray
    groups: tuple[str, ...]
    width: int
    workloads: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.accepted)

    @classmethod
    def open(cls, folder: Path) -> Traces:
        """All shards of a finished folder, each checked; InputError when one is missing, corrupt or does not fit."""
        stage = Stage.load(folder, TRACES, complete=True)
        shards = sorted(stage.shards, key=lambda shard: shard.file)
        require(bool(shards), f"{folder}: holds no traces")
        return join_traces([read_traces(folder, shard, stage.inputs) for shard in shards])

    @classmethod
    def empty(cls, groups: tuple[str, ...], width: int, workloads: tuple[str, ...]) -> Traces:
        """No records yet."""
        shapes = {"features": (0, feature_size(width, groups)), "drafts": (0, width - 1)}
        made = {name: np.zeros(shapes.get(name, (0,)), dtype) for name, dtype in DTYPES.items()}
        return cls(**made, groups=groups, width=width, workloads=workloads)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the types they are stored in."""
        return {name: getattr(self, name).astype(dtype, copy=False) for name, dtype in DTYPES.items()}

    def select(self, rows: np.ndarray) -> Traces:
        """The records of these rows: numbers or a mask."""
        chosen: dict[str, Any] = {name: getattr(self, name)[rows] for name in DTYPES}
        return Traces(**chosen, **self.kind)

    @property
    def kind(self) -> dict[str, Any]:
        """What is not an array: groups, width, workloads."""
        return {"groups": self.groups, "width": self.width, "workloads": self.workloads}

    @property
    def exact(self) -> np.ndarray:
        """Bool [N]: the accepted length is known, not only bounded from below."""
        return (self.accepted < self.slots - 1) | (self.accepted == self.width - 1)


def join_traces(parts: list[Traces]) -> Traces:
    """Records of several traces of one kind, in order."""
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in DTYPES}
    return Traces(**joined, **parts[0].kind)


def write_traces(folder: Path, name: str, traces: Traces, part: str = "") -> Shard:
    """One shard of a trace folder. part: where the records come from."""
    counts = {
        "records": len(traces),
        "requests": len(np.unique(traces.request)),
        "accepted": int(traces.accepted.sum()),
    }
    return write_shard(folder, name, traces.arrays(), part, counts)


def read_traces(folder: Path, shard: Shard, inputs: dict[str, Any]) -> Traces:
    """What write_traces wrote, checked against the folder's inputs (groups, width, workloads)."""
    arrays = read_shard(folder, shard)
    where = folder / shard.file
    missing = [name for name in DTYPES if name not in arrays]
    require(not missing, f"{where}: has no {', '.join(missing)}; not a shard of traces")
    known = all(key in inputs for key in ("groups", "workloads", "width"))
    require(known, f"{folder}: its manifest names no groups, width and workloads; not a folder of traces")
    groups, workloads, width = tuple(inputs["groups"]), tuple(inputs["workloads"]), int(inputs["width"])
    traces = Traces(
        **{name: arrays[name].astype(dtype, copy=False) for name, dtype in DTYPES.items()},
        groups=groups,
        width=width,
        workloads=workloads,
    )
    size = feature_size(width, groups)
    require(
        traces.features.shape == (len(traces), size) and traces.drafts.shape == (len(traces), width - 1),
        f"{where}: features {list(traces.features.shape)} and drafts {list(traces.drafts.shape)} are not those of "
        f"width {width} with {', '.join(groups)} ({size} and {width - 1} columns)",
    )
    return traces


def check_groups(groups: tuple[str, ...]) -> tuple[str, ...]:
    """Feature groups in the order in which features.py lays them out; InputError for others."""
    unknown = [group for group in groups if group not in GROUPS]
    require(not unknown and bool(groups), f"groups: {', '.join(unknown) or 'none'}; allowed are {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in groups)


def prompt_id(tokens: Sequence[int]) -> int:
    """A 63-bit id of a prompt's tokens: the same prompt has the same one in every folder."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def of_request(
    trace: RequestTrace, request: int, workload: int, groups: tuple[str, ...], workloads: tuple[str, ...]
) -> Traces:
    """What the engine's recorder kept of one request, as request number `request` of a folder."""
    count = len(trace.accepted)
    about = {"request": request, "prompt": prompt_id(trace.prompt), "workload": workload}
    arrays = {name: np.full(count, value, DTYPES[name]) for name, value in about.items()}
    for name in ("features", "drafts", "accepted", "slots", "position"):
        arrays[name] = getattr(trace, name)
    return Traces(**arrays, groups=groups, width=trace.drafts.shape[1] + 1, workloads=workloads)


def trace_stats(traces: Traces) -> dict[str, Any]:
    """Figures of all records, and under "workloads" of each workload that has some.

    requests, records, prompts; mean_accepted: drafts a step, censored ones as far as seen; progress: tokens a step;
    exact: share of records whose accepted length is known.
    """
    present = [index for index in range(len(traces.workloads)) if bool((traces.workload == index).any())]
    of_each = {traces.workloads[index]: _figures(traces.select(traces.workload == index)) for index in present}
    return _figures(traces) | {"workloads": of_each}


def _figures(traces: Traces) -> dict[str, Any]:
    count = max(1, len(traces))
    order = np.lexsort((traces.position, traces.request))
    last = np.zeros(len(traces), bool)
    last[order] = np.append(np.diff(traces.request[order]) != 0, [True] * (len(traces) > 0))
    ended = last & (
        traces.accepted == traces.slots - 1
    )  # its last draft ended the answer: no token of the target's own
    tokens = int(traces.accepted.sum()) + len(traces) - int(ended.sum())
    return {
        "requests": len(np.unique(traces.request)),
        "prompts": len(np.unique(traces.prompt)),
        "records": len(traces),
        "mean_accepted": round(float(traces.accepted.sum()) / count, 4),
        "progress": round(tokens / count, 4),
        "exact": round(float(traces.exact.sum()) / count, 4),
    }
