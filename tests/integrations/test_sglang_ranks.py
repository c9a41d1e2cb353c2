"""Steps compared among ranks: a planted difference raises on every rank, in one line that names it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dscale.integrations.sglang.ranks import RankCheck, RanksDiffer, step_table
from dscale.integrations.sglang.stages import Lanes, Settled
from tests.integrations.sglang_steps import WIDTH, Machine, Requests, alone

NAMES = ["a", "b", "c"]


@dataclass
class Ranks:
    """A group of which the other ranks' parts are known."""

    others: list[Tensor]
    world_size: int = 3

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        return torch.cat([self.others[0], part, *self.others[1:]], dim=dim)


@pytest.fixture
def step() -> tuple[Lanes, Settled]:
    """A step of three requests."""
    machine = Machine("dvl", True, "cpu")
    lanes = alone(Requests(machine.device).some(3))
    with torch.inference_mode():
        return lanes, machine.step(lanes)


def changed(value: Tensor, *where: int) -> Tensor:
    made = value.clone()
    made[where] += 5
    return made


def test_equal_steps_are_counted(step: tuple[Lanes, Settled]) -> None:
    check = RankCheck(Ranks([step_table(*step)] * 2))
    for _ in range(3):
        check.compare(NAMES, *step)
    assert check.steps == 3
    assert step_table(*step).shape == (3, 7 + WIDTH)


@pytest.mark.parametrize(
    ("field", "where", "told"),
    [
        ("emitted", (1,), "request b (lane 1): rank 2 has emitted {}, rank 0 has {}"),
        ("anchor", (2,), "request c (lane 2): rank 2 has next anchor {}, rank 0 has {}"),
        ("length", (0,), "request a (lane 0): rank 2 has length {}, rank 0 has {}"),
        ("tokens", (1, 2), "request b (lane 1): rank 2 has token 2 {}, rank 0 has {}"),
    ],
)
def test_another_outcome_raises(step: tuple[Lanes, Settled], field: str, where: tuple[int, ...], told: str) -> None:
    lanes, settled = step
    planted = replace(settled, **{field: changed(getattr(settled, field), *where)})
    check = RankCheck(Ranks([step_table(lanes, settled), step_table(lanes, planted)]))
    check.steps = 11
    with pytest.raises(RanksDiffer) as caught:
        check.compare(NAMES, lanes, settled)
    expected = int(getattr(settled, field)[where])
    assert str(caught.value) == "DSCALE: ranks differ in compared step 12, " + told.format(expected + 5, expected)
    assert check.steps == 11


def test_another_start_raises_though_the_outcome_is_the_same(step: tuple[Lanes, Settled]) -> None:
    lanes, settled = step
    other = replace(lanes, anchor=changed(lanes.anchor, 1))
    check = RankCheck(Ranks([step_table(lanes, settled), step_table(other, settled)]))
    with pytest.raises(RanksDiffer, match=r"step 1, request b \(lane 1\): rank 2 has anchor"):
        check.compare(NAMES, lanes, settled)
