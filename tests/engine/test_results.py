"""Results of a step, packed and read back: what is kept of the ring, and what of a draft comes to the host."""

from __future__ import annotations

import pytest
import torch

from dscale.engine.results import OutputRing, Outputs
from dscale.kernels.top_logits import TopLogits
from dscale.speculation.decode_step import StepResult
from dscale.speculation.policies import Draft
from dscale.speculation.workspace import StepShape

WIDTH, LANES = 4, 3


def result(scored: bool, ranked: bool) -> StepResult:
    drafts = torch.arange(LANES * 3).view(LANES, 3)
    values = drafts[..., None] + torch.tensor([0.5, 0.25])
    top = TopLogits(values, drafts[..., None].expand(-1, -1, 2), values[..., 0] + 1, values[..., 0])
    survival = torch.tensor([1.0, 0.5, 0.25, 0.125]).repeat(LANES, 1) if scored else None
    draft = Draft(drafts, survival, top, ranked=ranked)
    tokens = torch.arange(10, 10 + LANES * WIDTH).view(LANES, WIDTH)
    counts = torch.tensor([1, 3, 2]), torch.tensor([0, 2, 1]), torch.tensor([4, 3, 2])
    finished, starts = torch.zeros(LANES, dtype=torch.bool), torch.tensor([0, 4, 7, 9])
    return StepResult(tokens, *counts, finished, starts, draft, StepShape(WIDTH, WIDTH - 1, 9))


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("ranked", [False, True])
def test_lanes_come_back(scored: bool, ranked: bool) -> None:
    ring, made = OutputRing(LANES, WIDTH, torch.device("cpu")), result(scored, ranked)
    slot = ring.take()
    slot.end(Outputs.pack(made))
    host, _ = slot.read(2)
    assert host.tokens == [[10], [14, 15, 16]]
    assert (host.accepted, host.slots) == ([0, 2], [4, 3])
    assert host.draft.tokens.shape == (2, 3)
    if scored:
        assert host.draft.survival.tolist() == [[1.0, 0.5, 0.25, 0.125]] * 2
    else:
        assert host.draft.survival is None
    if ranked:
        assert host.draft.top.values[..., 0].tolist() == [[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]]
        assert host.draft.top.log_probability.tolist() == [[-1.0] * 3] * 2
    else:
        assert host.draft.top is None


def test_what_was_read_stays_while_the_ring_goes_round() -> None:
    ring = OutputRing(LANES, WIDTH, torch.device("cpu"))
    slot = ring.take()
    slot.end(Outputs.pack(result(True, True)))
    host, _ = slot.read(LANES)
    changed = result(True, True)
    changed.draft.survival.zero_()
    slot.end(Outputs.pack(changed))
    assert host.draft.survival[:, 1].tolist() == [0.5] * LANES
