"""A trace folder that grows with the traffic of a running engine, under whatever policy it has.

    recorder = Recorder()
    llm = LLM("smollm2-135m", policy="dvl", recorder=recorder)
    live = LiveTraces.attach(recorder, llm, Path("traffic"))
    ...
    live.close()

The folder can be read at any time; a later run with the same target, drafter and features adds to it. Records of
adaptive policies are censored where fewer rows than the block has were verified (traces.py).
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from dscale.config import InputError, require
from dscale.engine.llm import LLM
from dscale.engine.recorder import Recorder, RequestTrace
from dscale.models.drafter_checkpoint import target_hashes
from dscale.train.artifacts import Stage
from dscale.train.traces import TRACES, Traces, join_traces, of_request, write_traces

WORKLOADS = ("live",)


class LiveTraces:
    """Writes a shard for every `requests` requests that ended. A full disk ends the recording, not the engine."""

    def __init__(self, stage: Stage, groups: tuple[str, ...], requests: int = 256) -> None:
        self.stage, self.groups, self.requests = stage, groups, requests
        self.refused: str | None = None  # why nothing is recorded any more
        self._numbered = sum(shard.counts["requests"] for shard in stage.shards)
        self._pending: list[Traces] = []

    @classmethod
    def attach(cls, recorder: Recorder, llm: LLM, folder: Path, requests: int = 256) -> LiveTraces:
        """Record what `llm` serves, through the recorder it was made with. InputError for a folder of another pair."""
        require(llm.drafter is not None, "recorder: without a drafter there is nothing to record")
        assert llm.drafter is not None
        inputs = {
            "target": llm.loaded.name,
            "target_hashes": target_hashes(llm.loaded),
            "drafter_hash": llm.drafter_hash,
            "width": recorder.width,
            "groups": list(recorder.groups),
            "projection_seed": recorder.seed,
            "sources": [{"kind": "live"}],
            "workloads": list(WORKLOADS),
        }
        live = cls(Stage.open(folder, TRACES, inputs), recorder.groups, requests)
        recorder.done = live.add
        return live

    def add(self, trace: RequestTrace) -> None:
        """Take in a request that ended."""
        if self.refused is None:
            self._pending.append(of_request(trace, self._numbered, 0, self.groups, WORKLOADS))
            self._numbered += 1
            if len(self._pending) >= self.requests:
                self._write()

    def close(self) -> None:
        """Write what is left."""
        if self._pending and self.refused is None:
            self._write()

    def _write(self) -> None:
        traces, self._pending = join_traces(self._pending), []
        name = f"traces-{int(traces.request[0]):08d}.safetensors"
        try:
            self.stage.add(write_traces(self.stage.folder, name, traces, "live"))
            self.stage.finish(totals(self.stage))
        except InputError as error:
            self.refused = str(error)
            warnings.warn(f"recording ends, the engine goes on: {error}", stacklevel=3)


def totals(stage: Stage) -> dict[str, int]:
    """Sums of the shards' counts."""
    names = ("requests", "records", "accepted")
    return {name: int(np.sum([shard.counts[name] for shard in stage.shards])) for name in names}
