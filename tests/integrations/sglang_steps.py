"""A decode step of the SGLang plug-in with stand-ins for both models, and requests that it moves on: no SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dscale.integrations.sglang.drafts import Drafts, Head
from dscale.integrations.sglang.graphs import lane_memory
from dscale.integrations.sglang.settings import Settings
from dscale.integrations.sglang.stages import Agree, Lanes, Settled, Stages
from dscale.kernels.top_logits import argmax
from dscale.speculation.simulated import SimulatedAcceptance

WIDTH, SLOTS, VOCAB, SIZE, POSITIONS, ROWS = 8, 4, 96, 16, 512, 9
BUCKETS = (1, 2, 4, 6)


class Machine:
    """Both models are sums of rows of a table, by token, position and cache slot. `written` is the drafter's cache."""

    def __init__(self, policy: str, simulated: bool, device: str, agree: Agree | None = None) -> None:
        self.agree = agree
        generator = torch.Generator().manual_seed(5)
        self.device = torch.device(device)
        self.rows_of = torch.randn(VOCAB, SIZE, generator=generator).to(device)
        table = torch.randperm((ROWS - 1) * POSITIONS, generator=generator).view(ROWS - 1, -1) + 1
        table = torch.cat([torch.zeros(1, POSITIONS, dtype=torch.int64), table]).int().to(device)  # row 0: padding
        head = Head(torch.randn(VOCAB, SIZE, generator=generator).to(device), 0, VOCAB)
        drafts = Drafts(Settings(policy, SLOTS, "random"), WIDTH, head)
        simulation = SimulatedAcceptance(progress=5.0).on(device) if simulated else None
        self.stages = Stages(drafts, table, VOCAB - 1, simulation)
        self.written = torch.zeros(ROWS * POSITIONS, device=device)

    def step(self, lanes: Lanes) -> Settled:
        """One decode step."""
        block = self.stages.block(lanes)
        hidden = self._rows(block.ids, block.positions, block.slots).view(lanes.count, WIDTH, SIZE)
        decision = self.stages.decide(hidden + self.rows_of[lanes.anchor][:, None], lanes, self.agree)
        flat = decision.flat
        logits = self._rows(flat.ids, flat.positions, flat.slots) @ self.stages.drafts.head.weight.T
        settled = self.stages.settle(argmax(logits), decision, lanes.context)
        self.written[flat.slots] = flat.positions.float() * flat.slots.bool()
        return settled

    def _rows(self, *indices: Tensor) -> Tensor:
        return torch.stack([self.rows_of[index % VOCAB] for index in indices]).sum(0)


@dataclass
class Requests:
    """Requests in flight as SGLang would hand them over: their rows of the request table, anchors and lengths."""

    device: torch.device
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def __post_init__(self) -> None:
        self.anchor = torch.randint(VOCAB, (ROWS,), generator=self.generator).int().to(self.device)
        self.length = torch.randint(3, 40, (ROWS,), generator=self.generator).to(self.device)

    def some(self, count: int) -> Lanes:
        """`count` of them, in any order."""
        rows = (torch.randperm(ROWS - 1, generator=self.generator)[:count] + 1).to(self.device)
        initial = (torch.rand(count, generator=self.generator) < 0.3).to(self.device)
        return Lanes(self.anchor[rows], self.length[rows], rows, rows * 7 + 3, initial, initial)

    def move(self, lanes: Lanes, settled: Settled) -> None:
        """Take a step's outcome."""
        self.anchor[lanes.rows], self.length[lanes.rows] = settled.anchor, settled.length


def alone(lanes: Lanes) -> Lanes:
    """The lanes as a step without captures sees them."""
    live = torch.ones(lanes.count, dtype=torch.bool, device=lanes.rows.device)
    return Lanes(lanes.anchor.long(), lanes.context, lanes.rows, lanes.seeds, lanes.initial, live)


def padded(lanes: Lanes, bucket: int) -> Lanes:
    """The same filled up to a bucket, for a step of the very shapes that are captured."""
    made = lane_memory(bucket, lanes.rows.device)
    for name in ("anchor", "context", "rows", "seeds", "initial"):
        getattr(made, name)[: lanes.count] = getattr(lanes, name)
    made.live[: lanes.count] = True
    return made
