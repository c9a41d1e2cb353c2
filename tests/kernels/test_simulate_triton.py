"""Simulated acceptance in Triton: bit for bit what torch gives."""

from __future__ import annotations

import pytest
import torch

from dscale.kernels import triton as kernels
from dscale.speculation import ease
from dscale.speculation.packing import pack
from dscale.speculation.policies import Draft
from dscale.speculation.simulated import ANCHOR, LENGTH, PLACE, DrawnSimulation, SimulatedAcceptance, SimulatedDraft

pytest.importorskip("triton", reason="the triton package is not installed")

from dscale.kernels.triton import simulate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _plain_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSCALE_TRITON", "0")


def test_lookups() -> None:
    plain = DrawnSimulation(SimulatedAcceptance(seed=3), "cpu")
    seed, position = torch.randint(0, 2**62, (40,)), torch.randint(0, 40000, (40,))
    length, q = plain.at(seed, position)
    sizes = (ease.REGION, ease.REGIONS, ease.ANCHORS)
    given = (seed.to(DEVICE), position.to(DEVICE), plain.survival.to(DEVICE), plain.salt, sizes)
    fast_length, fast_q = simulate.drawn(*given, (LENGTH, ANCHOR, PLACE))
    assert fast_length.dtype is torch.int64
    assert fast_length.tolist() == length.tolist()
    assert torch.equal(fast_q.cpu(), q)


@pytest.mark.parametrize("drafts", [1, 15])
def test_rows(drafts: int) -> None:
    generator = torch.Generator().manual_seed(drafts)
    plain, lanes, vocab = DrawnSimulation(SimulatedAcceptance(), "cpu"), 33, 5
    k = torch.randint(0, drafts + 2, (lanes,), generator=generator)
    rows = int(k.sum()) + 9
    packed = pack(k, rows)
    tokens = torch.randint(0, vocab, (lanes, drafts + 2), generator=generator)[:, 1:-1]
    length = torch.randint(0, drafts + 1, (lanes,), generator=generator)
    y = torch.randint(0, vocab, (rows,), generator=generator)
    made = plain.rewrite(y, SimulatedDraft(tokens, length=length), packed, vocab)
    given = [one.to(DEVICE) for one in (y, tokens, length, packed.lane_of_row, packed.column_of_row)]
    assert simulate.rewrite(*given, vocab).tolist() == made.tolist()


def test_a_simulation_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = DrawnSimulation(SimulatedAcceptance(), DEVICE)
    seed, tokens = torch.arange(4, device=DEVICE), torch.arange(60, device=DEVICE).view(4, 15)
    k, y = torch.full((4,), 8, device=DEVICE), torch.arange(32, device=DEVICE)
    results = []
    for fast in (False, True):
        monkeypatch.setattr(kernels, "usable", lambda x, fast=fast: fast)
        draft = plain.believe(Draft(tokens, torch.ones(4, 16, device=DEVICE)), seed, seed + 600)
        made = plain.rewrite(y, draft, pack(k, 32), 99)
        results.append([draft.length.tolist(), draft.survival.tolist(), made.tolist()])
    assert results[0] == results[1]
