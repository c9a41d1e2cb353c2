"""Whole decode steps captured as CUDA graphs, one a number of lanes (bucket), over fixed memory; knows no SGLang.

SGLang captures the two passes and leaves what lies between them to the host, which then launches some 60 kernels a
step while the device waits. Here a step is a few small copies, one replay and the copies of what it made. Lanes that
only fill a bucket are not live, have no rows to verify, and point to row 0 of the request table, which SGLang keeps
for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from dscale.engine.graphs import CaptureBackend, GraphCounters
from dscale.integrations.sglang.stages import Lanes, Settled

Step = Callable[[Lanes], Settled]
Result = TypeVar("Result")
FIELDS = ("anchor", "context", "rows", "seeds", "initial", "live")


class Rerun:
    """Stands in for captures where the device has none: a replay runs the step again."""

    def capture(self, step: Callable[[], Result], runs: int = 0) -> tuple[Result, Callable[[], None]]:
        """As CaptureBackend, for a step that writes to fixed memory itself."""

        def replay() -> None:
            step()

        return step(), replay

    def seconds(self, before: Callable[[], None], replay: Callable[[], None], repeats: int) -> float:
        """Nothing is timed."""
        return 0.0

    def free(self) -> int:
        """Nobody counts."""
        return 0


def lane_memory(lanes: int, device: torch.device | str) -> Lanes:
    """Inputs of `lanes` lanes, none of them live."""
    anchor, context, rows, seeds = torch.zeros(4, lanes, dtype=torch.int64, device=device).unbind()
    initial, live = torch.zeros(2, lanes, dtype=torch.bool, device=device).unbind()
    return Lanes(anchor, context, rows, seeds, initial, live, spare=True)


@dataclass
class StepGraphs:
    """Replays a step for any number of lanes up to the largest bucket. width: tokens a step makes at most per lane."""

    step: Step
    buckets: Sequence[int]
    width: int
    backend: CaptureBackend
    device: torch.device
    counters: GraphCounters = field(default_factory=GraphCounters)

    def __post_init__(self) -> None:
        self.buckets = sorted(self.buckets)
        most = self.buckets[-1]
        with torch.inference_mode():
            self.memory = lane_memory(most, self.device)
            self._live = torch.arange(most, device=self.device) < torch.arange(most + 1, device=self.device)[:, None]
            tokens = torch.zeros(most, self.width, dtype=torch.int64, device=self.device)
            small = torch.zeros(2, most, dtype=torch.int32, device=self.device)
            length = torch.zeros(most, dtype=torch.int64, device=self.device)
        self.made = Settled(tokens, small[0], small[1], length)
        self._small = small
        self._replays: dict[int, Callable[[], None]] = {}
        self._count = 0
        self._known: dict[str, Tensor] = {}

    def fits(self, count: int) -> bool:
        """Whether so many lanes are no more than the largest bucket."""
        return count <= self.buckets[-1]

    @torch.inference_mode()
    def prepare(self) -> GraphCounters:
        """Capture every bucket, the largest first, so that smaller ones find their memory. No lane is live."""
        with self.counters.counting(self.backend, len(self.buckets)):
            for lanes in reversed(self.buckets):
                self._capture(lanes)
        return self.counters

    def _capture(self, lanes: int) -> None:
        seen = replace(self.memory, **{name: getattr(self.memory, name)[:lanes] for name in FIELDS})

        def step() -> None:
            made = self.step(seen)
            for name, value in vars(made).items():
                getattr(self.made, name)[:lanes].copy_(value)

        _, self._replays[lanes] = self.backend.capture(step)

    @torch.inference_mode()
    def run(self, lanes: Lanes) -> Settled:
        """A step of these lanes, all of them live; what it made is the caller's."""
        count = lanes.count
        self._load(lanes, count)
        self._replays[next(size for size in self.buckets if size >= count)]()
        emitted, anchor = self._small[:, :count].clone().unbind()
        return Settled(self.made.tokens[:count].clone(), emitted, anchor, self.made.length[:count].clone())

    def _load(self, lanes: Lanes, count: int) -> None:
        """In place and in stream order. Seeds, flags and rows seldom change: a tensor seen before is not copied."""
        if count != self._count:
            self._count, self._known = count, {}
            self.memory.live.copy_(self._live[count])
            self.memory.rows[count:].zero_()
            self.memory.context[count:].zero_()
        self.memory.anchor[:count].copy_(lanes.anchor)
        self.memory.context[:count].copy_(lanes.context)
        for name in ("rows", "seeds", "initial"):
            value = getattr(lanes, name)
            if self._known.get(name) is not value:
                self._known[name] = value
                getattr(self.memory, name)[:count].copy_(value)
