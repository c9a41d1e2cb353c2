"""Whole steps over fixed memory give what steps of just their lanes give, whatever ran in them before."""

from __future__ import annotations

import pytest
import torch

from dscale.integrations.sglang.graphs import Rerun, StepGraphs
from dscale.integrations.sglang.stages import Settled
from tests.integrations.sglang_steps import BUCKETS, SLOTS, WIDTH, Machine, Requests, alone

POLICIES = ("full", "fixed:3", "dvl", "dvl:seeded", "confidence")
COUNTS = (6, 3, 1, 5, 2, 4, 4, 6, 1)


def same(made: Settled, expected: Settled) -> bool:
    return all(torch.equal(getattr(made, name), value) for name, value in vars(expected).items())


@torch.inference_mode()
@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_padding_changes_nothing(policy: str, simulated: bool) -> None:
    machine, plain = Machine(policy, simulated, "cpu"), Machine(policy, simulated, "cpu")
    graphs = StepGraphs(machine.step, BUCKETS, WIDTH, Rerun(), machine.device)
    assert graphs.prepare().graphs == len(BUCKETS)
    assert not machine.written.any(), "a capture moved somebody on"
    requests, emitted = Requests(machine.device), 0
    for count in COUNTS:
        lanes = requests.some(count)
        made, expected = graphs.run(lanes), plain.step(alone(lanes))
        assert same(made, expected)
        assert (made.tokens >= 0).sum(1).tolist() == made.emitted.tolist()
        assert torch.equal(machine.written, plain.written)
        requests.move(lanes, made)
        emitted += int(made.emitted.sum())
    if simulated:
        assert emitted > 2 * sum(COUNTS)


@torch.inference_mode()
def test_a_step_that_is_padded_spends_the_budget_of_its_requests() -> None:
    machine = Machine("dvl", True, "cpu")
    seen: list[int] = []
    plain = machine.stages.drafts.lengths

    def lengths(*given: object) -> torch.Tensor:
        k = plain(*given)  # type: ignore[arg-type]
        seen.append(int(k.sum()))
        return k

    machine.stages.drafts.lengths = lengths  # type: ignore[method-assign]
    graphs = StepGraphs(machine.step, BUCKETS, WIDTH, Rerun(), machine.device)
    graphs.prepare()
    assert seen == [0] * len(BUCKETS)
    graphs.run(Requests(machine.device).some(5))
    assert seen[-1] == 5 * SLOTS


@torch.inference_mode()
def test_what_a_step_made_outlives_the_next() -> None:
    machine = Machine("full", True, "cpu")
    graphs = StepGraphs(machine.step, BUCKETS, WIDTH, Rerun(), machine.device)
    graphs.prepare()
    requests = Requests(machine.device)
    first = graphs.run(requests.some(4))
    kept = first.tokens.clone(), first.length.clone(), first.anchor.clone()
    graphs.run(requests.some(4))
    assert all(torch.equal(*pair) for pair in zip(kept, (first.tokens, first.length, first.anchor), strict=True))
    assert not graphs.fits(7)
