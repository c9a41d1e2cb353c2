"""What the engine did, summed up for snapshots while it runs: a few additions a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate

import numpy as np

from dscale.engine.engine import Engine
from dscale.engine.request import Request
from dscale.serve.messages import Lane, Snapshot
from dscale.speculation.policies import StepOutcome


class Tally:
    """Observes an engine's decode steps. Blocks are at most as wide as the engine's lookahead."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.observer = self.observe
        width = max(engine.scheduler.lookahead, 1)
        self._drafted, self._verified, self._accepted = [0] * width, [0] * width, [0] * width  # lanes, by how many
        self._predicted, self._calibrated = np.zeros(width - 1), np.zeros(width - 1)
        self._seconds: list[float] = []
        self._last: tuple[list[Request], StepOutcome] | None = None
        self._began = time.perf_counter()

    def observe(self, requests: Sequence[Request], outcome: StepOutcome) -> None:
        """Take in one decode step."""
        for request in requests:
            record = request.steps[-1]
            self._drafted[record.drafted] += 1
            self._verified[record.slots - 1] += 1
            self._accepted[record.accepted] += 1
        self._seconds.append(outcome.seconds)
        self._last = list(requests), outcome
        if outcome.draft.survival is not None:
            self._calibrate(outcome.draft.survival[:, 1:].cpu().numpy(), outcome)

    def _calibrate(self, survival: np.ndarray, outcome: StepOutcome) -> None:
        """survival [N, D]. Only verified drafts show whether they would be accepted, and only on clean lanes."""
        position = np.arange(1, survival.shape[1] + 1)
        seen = (position < np.array(outcome.slots)[:, None]) & np.array(outcome.clean)[:, None]
        self._predicted[: len(position)] += (survival * seen).sum(0)
        self._calibrated[: len(position)] += ((position <= np.array(outcome.accepted)[:, None]) & seen).sum(0)

    def snapshot(self) -> Snapshot:
        """The engine now; durations of steps are those since the last call."""
        scheduler, seconds = self.engine.scheduler, self._seconds
        self._seconds = []
        return Snapshot(
            time=time.time(),
            policy=self.engine.worker.policy.name,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            budget=self._budget(),
            pages_used=scheduler.pool.held,
            pages=scheduler.pool.capacity,
            counters=self._counters(),
            drafted_at=_at_least(self._drafted),
            accepted_at=_at_least(self._accepted),
            verified_at=_at_least(self._verified),
            predicted=self._predicted.tolist(),
            calibrated=self._calibrated.tolist(),
            step_seconds=seconds,
            lanes=self._lanes(),
        )

    def _budget(self) -> float:
        return self._last[1].shape.rows / len(self._last[0]) if self._last is not None else 0.0

    def _lanes(self) -> list[Lane]:
        requests, outcome = self._last or ((), None)
        if outcome is None:
            return []
        drafted = outcome.draft.tokens.shape[1]
        lanes = zip(requests, outcome.slots, outcome.accepted, strict=True)
        return [Lane(request.id, drafted, slots, accepted) for request, slots, accepted in lanes]

    def _counters(self) -> dict[str, float]:
        """Numbers of EngineCounters and of the scheduler; a GPU's seconds without work besides."""
        engine, scheduler = self.engine, self.engine.scheduler
        counters = {name: float(value) for name, value in asdict(engine.counters).items() if name != "shapes"}
        counters["trimmed"] = max(counters["drafted"] - counters["slots"] + counters["request_steps"], 0.0)
        for name in ("preemptions", "prefix_hits", "prefix_queries"):
            counters[name] = float(getattr(scheduler, name))
        if engine.worker.device.type == "cuda":
            worked = counters["decode_seconds"] + counters["prefill_seconds"]
            counters["device_idle_seconds"] = max(time.perf_counter() - self._began - worked, 0.0)
        return counters


def _at_least(counts: Sequence[int]) -> list[int]:
    """From how many lanes had exactly 0, 1, … to how many had at least 1, 2, …"""
    return list(accumulate(reversed(counts)))[-2::-1]
