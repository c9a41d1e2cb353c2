"""Allocation, packing, acceptance and sampling in Triton against plain torch: on the GPU, or interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from dscale.kernels.top_logits import argmax, top_logits
from dscale.speculation import acceptance, budget, packing
from dscale.speculation.commit import commit
from dscale.speculation.features import HIDDEN, LOGITS, FeatureProjections
from dscale.speculation.noise import gumbel_noise, mix
from dscale.speculation.predictor import Predictor, PredictorConfig
from dscale.speculation.sampling import RowParams, draw_on_device
from dscale.speculation.state import DeviceState
from dscale.speculation.survival import predicted_survival

pytest.importorskip("triton", reason="the triton package is not installed")

import triton
import triton.language as tl

from dscale.kernels.triton import accept as fast_accept
from dscale.kernels.triton import allocate as fast_allocate
from dscale.kernels.triton import pack as fast_pack
from dscale.kernels.triton import predict as fast_predict
from dscale.kernels.triton import sample as fast_sample
from dscale.kernels.triton.top_logits import best_keys

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _plain_is_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The functions beside the kernels run their torch versions."""
    monkeypatch.setenv("DSCALE_TRITON", "0")
    with torch.no_grad():
        yield


def survival(lanes: int, width: int, levels: int, generator: torch.Generator) -> Tensor:
    """q [N, W]; with few levels many scores are equal."""
    if levels:
        chances = torch.randint(0, levels + 1, (lanes, width - 1), generator=generator) / levels
    else:
        chances = torch.rand(lanes, width - 1, generator=generator)
    return torch.cat([torch.ones(lanes, 1), chances.cummin(-1).values], dim=1)


@pytest.mark.parametrize("levels", [0, 2, 8])
@pytest.mark.parametrize(("lanes", "width"), [(1, 16), (3, 2), (7, 16), (16, 5), (40, 16)])
def test_both_allocators(lanes: int, width: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(lanes * width + levels)
    for share in (0.4, 0.5, 1.1):
        q = survival(lanes, width, levels, generator)
        live = torch.rand(lanes, generator=generator) < 0.8
        total = round(share * lanes * width)
        exact, seeded = budget.allocate_exact(q, total, live), budget.allocate_seeded(q, total, live)
        q, live = q.to(DEVICE), live.to(DEVICE)
        assert fast_allocate.allocate_exact(q, total, live).tolist() == exact.tolist()
        assert fast_allocate.allocate_seeded(q, torch.tensor(total, device=DEVICE), live).tolist() == seeded.tolist()


def test_the_worked_example() -> None:
    """k⁰ = [5, 10, 7, 9] and 32 slots: request 1 grows, and 0 6 16 23 are the offsets (dscale.md §2)."""
    q = torch.full((4, 16), 0.01)
    q[:, 0] = 1.0
    for lane, (start, following) in enumerate([(5, 0.4), (10, 0.2), (7, 0.3), (9, 0.1)]):
        q[lane, 1 : start + 1] = torch.linspace(1.0, 0.9, start)
        q[lane, start] = following
        q[lane, 1] += start - q[lane, 1:].sum()
    assert budget.initial_windows(q).tolist() == [5, 10, 7, 9]
    k = fast_allocate.allocate_seeded(q.to(DEVICE), 32, torch.ones(4, dtype=torch.bool, device=DEVICE))
    assert k.tolist() == [6, 10, 7, 9]
    assert fast_pack.pack(k, 32)[0].tolist() == [0, 6, 16, 23, 32]


def ragged_slots(lanes: int, width: int, spare: int, generator: torch.Generator) -> tuple[Tensor, int]:
    k = torch.randint(0, width + 1, (lanes,), generator=generator)
    k[0] = max(int(k[0]), 1)
    return k, int(k.sum()) + spare


@pytest.mark.parametrize(("lanes", "width", "spare"), [(1, 16, 0), (5, 1, 3), (6, 6, 40), (33, 16, 0)])
def test_packed_rows(lanes: int, width: int, spare: int) -> None:
    generator = torch.Generator().manual_seed(lanes + width)
    k, rows = ragged_slots(lanes, width, spare, generator)
    anchor = torch.randint(0, 10**6, (lanes,), generator=generator)
    drafts = torch.randint(0, 10**6, (lanes, width - 1), generator=generator)
    context = torch.randint(0, 90, (lanes,), generator=generator)
    table = torch.randint(0, 2**20, (lanes + 4, 8), generator=generator, dtype=torch.int32)
    owners = torch.randperm(lanes + 4, generator=generator)[:lanes]
    packed, fields = packing.pack_rows(k, rows, anchor, drafts, context, table, owners)
    given = [one.to(DEVICE) for one in (anchor, drafts, context, table, owners)]
    maps, fast_fields = fast_pack.pack_rows(k.to(DEVICE), rows, *given, 16)
    for fast, plain in zip((*maps, *fast_fields), (*vars(packed).values(), *vars(fields).values()), strict=True):
        assert fast.dtype is plain.dtype
        assert fast.tolist() == plain.tolist()
    for fast, plain in zip(fast_pack.pack(k.to(DEVICE), rows), maps, strict=True):
        assert torch.equal(fast, plain)


@pytest.mark.parametrize(("lanes", "width", "ends"), [(1, 1, 1), (9, 6, 3), (20, 16, 16)])
def test_acceptance_and_the_cut(lanes: int, width: int, ends: int) -> None:
    generator = torch.Generator().manual_seed(lanes + ends)
    k, rows = ragged_slots(lanes, width, 3, generator)
    starts = packing.pack(k, rows).starts
    drafts = torch.randint(0, 2, (lanes, width - 1), generator=generator)
    y = torch.randint(0, 2, (rows,), generator=generator)
    lane = torch.arange(lanes)
    for j in range(width - 1):  # most drafts pass
        row = (starts[:-1] + j).clamp(max=rows - 1)
        y[row] = torch.where(torch.rand(lanes, generator=generator) < 0.8, drafts[lane, j], y[row])
    end_ids = torch.randint(-1, 9, (lanes, ends), generator=generator)
    remaining = torch.randint(-1, 20, (lanes,), generator=generator)
    outcome, emitted, finished = acceptance.accept_clipped(drafts, k, y, starts, end_ids, remaining)
    given = [one.to(DEVICE) for one in (drafts, k, y, starts, end_ids, remaining)]
    fast_outcome, fast_emitted, fast_finished = fast_accept.accept_clipped(*given)
    for fast, plain in zip(fast_outcome, vars(outcome).values(), strict=True):
        assert fast.tolist() == plain.tolist()
    assert fast_emitted.tolist() == emitted.tolist()
    assert fast_finished.tolist() == finished.tolist()
    for fast, plain in zip(fast_accept.accept(*given[:4]), fast_outcome, strict=True):
        assert torch.equal(fast, plain)


def test_the_state_moves_on() -> None:
    """The commit of a step and the sampling parameters of its rows; lanes own rows of the state out of order."""
    generator = torch.Generator().manual_seed(5)
    lanes, width = 6, 5
    state = DeviceState(max_requests=8, max_pages=1)
    for column in (state.length, state.anchor, state.top_k, state.seed):
        column.copy_(torch.randint(0, 99, (9,), generator=generator))
    state.remaining.copy_(torch.randint(1, 20, (9,), generator=generator))
    state.end_ids[:, 2] = 3
    state.initial[:] = True
    state.temperature.uniform_(generator=generator)
    k, rows = ragged_slots(lanes, width, 2, generator)
    k[3:] = k[3:].clamp(min=1)
    rows = int(k.sum()) + 2
    owners = torch.tensor([4, 0, 7, 2, 6, 8])
    packed = packing.pack(k, rows)
    drafts = torch.randint(0, 9, (lanes, width - 1), generator=generator)
    y = torch.randint(0, 9, (rows,), generator=generator)
    y[packed.valid] = torch.where(
        torch.rand(int(packed.valid.sum()), generator=generator) < 0.7,
        torch.cat([drafts, drafts[:, :1]], dim=1)[packed.lane_of_row, packed.column_of_row][packed.valid],
        y[packed.valid],
    )
    fast_state = deepcopy(state)
    for name, value in vars(fast_state).items():
        if isinstance(value, Tensor):
            setattr(fast_state, name, value.to(DEVICE))

    params = state.row_params(owners, packed.lane_of_row, packed.column_of_row)
    outcome, emitted, finished = commit(state, owners, state.length[owners], drafts, k, y, packed.starts)
    given = [one.to(DEVICE) for one in (drafts, k, y, packed.starts, owners, packed.lane_of_row, packed.column_of_row)]
    columns = (fast_state.temperature, fast_state.top_k, fast_state.top_p, fast_state.min_p, fast_state.seed)
    fast_params = fast_sample.row_params(*given[4:], *columns)
    moved = (given[4], fast_state.length[given[4]], fast_state.length, fast_state.anchor, fast_state.initial)
    fast = fast_accept.commit(*given[:4], fast_state.end_ids, fast_state.remaining, moved)

    plain = (*vars(outcome).values(), emitted, finished, *vars(params).values())
    for one, other in zip((*fast[0], *fast[1:], *fast_params), plain, strict=True):
        assert one.tolist() == other.tolist()
    assert 0 < int(finished.sum()) < lanes
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            assert getattr(fast_state, name).tolist() == value.tolist(), name


@triton.jit
def _noise(seed, position, bits, noise, size: tl.constexpr):
    ids = tl.arange(0, size)
    tl.store(noise + ids, fast_sample.gumbel(fast_sample.uniform(tl.load(seed), tl.load(position), ids)))
    tl.store(bits + ids, fast_sample.mix(tl.load(seed) + ids))


def test_noise_is_the_same() -> None:
    seed = torch.tensor([-(2**61) + 12345], device=DEVICE)
    position, ids = torch.tensor([777], device=DEVICE), torch.arange(4096, device=DEVICE)
    bits, noise = torch.empty_like(ids), torch.empty(4096, device=DEVICE)
    _noise[(1,)](seed, position, bits, noise, size=4096)
    assert torch.equal(bits, mix(seed + ids))
    torch.testing.assert_close(noise, gumbel_noise(seed, position, ids)[0], rtol=2e-6, atol=2e-6)


def mixed_rows(count: int, generator: torch.Generator) -> RowParams:
    def choice(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    return RowParams(
        temperature=choice(0.0, 0.6, 1.0, 1.7),
        top_k=choice(0, 0, 1, 5, 50, 3000, 100_000).long(),
        top_p=choice(1.0, 1.0, 0.3, 0.8, 0.95, 0.999),
        min_p=choice(0.0, 0.0, 0.02, 0.3, 1.0),
        seed=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        position=torch.randint(0, 5000, (count,), generator=generator),
    )


def on_device(rows: RowParams) -> RowParams:
    return RowParams(*(one.to(DEVICE) for one in vars(rows).values()))


@pytest.mark.parametrize(
    ("vocab", "rows", "scale", "dtype"),
    [(11, 12, 2.0, torch.float32), (700, 16, 3.0, torch.bfloat16), (4300, 8, 0.3, torch.float32)],
)
def test_drawn_tokens(vocab: int, rows: int, scale: float, dtype: torch.dtype) -> None:
    """With scale 0.3 more tokens are kept than are copied aside; in bfloat16 many logits are equal."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * scale).to(DEVICE, dtype)
    params = on_device(mixed_rows(rows, generator))
    expected = draw_on_device(logits, params, argmax(logits))
    assert fast_sample.draw(logits, vars(params)).tolist() == expected.tolist()


def test_the_edge_among_equals() -> None:
    """Eight equal logits of an eighth each: how many of them, the lowest ids first, a row's filters keep."""
    cases = [(3, 1.0, 3), (0, 0.5, 4), (0, 0.500001, 5), (6, 0.5, 3), (2, 0.1, 1), (0, 0.0, 1)]
    logits = torch.full((len(cases), 20), -50.0, device=DEVICE)
    logits[:, 5:13] = 2.0
    top_k, top_p, kept = (torch.tensor(column, device=DEVICE) for column in zip(*cases, strict=True))
    ones = torch.ones(len(cases), device=DEVICE)
    levels, last = fast_sample.cuts(logits, best_keys(logits), ones, top_k, top_p, 0 * ones)
    assert levels.tolist() == [0x40000000] * len(cases)  # the bits of 2.0
    assert last.tolist() == (kept + 4).tolist()


@pytest.mark.parametrize("head", ["survival", "hazard"])
@pytest.mark.parametrize(
    "groups", [("confidence", "hidden", "logits", "context"), ("confidence",), ("logits", "context")]
)
def test_predictor(groups: tuple[str, ...], head: str) -> None:
    lanes, width, size, vocab = 5, 6, 12, 40
    torch.manual_seed(len(groups))
    predictor = Predictor(PredictorConfig(width, "made up", groups, hidden_units=20, head=head)).to(DEVICE)
    projections = FeatureProjections.build(torch.randn(vocab, size, device=DEVICE), seed=3)
    hidden = torch.randn(lanes, width - 1, size, device=DEVICE)
    top = top_logits(torch.randn(lanes, width - 1, vocab, device=DEVICE) * 3)
    live = torch.tensor([True, True, False, True, True], device=DEVICE)
    initial = torch.tensor([False, True, False, False, True], device=DEVICE)
    layers = (predictor.first.weight, predictor.first.bias, predictor.second.weight, predictor.second.bias)
    q = fast_predict.predict(
        top.values, top.log_sum_exp, top.entropy, hidden @ projections.matrix, live, initial,
        layers, groups, (HIDDEN, LOGITS), head == "hazard",
    )  # fmt: skip
    expected = predicted_survival(predictor, top, hidden, live, initial, projections)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-6)


def strided(x: Tensor) -> Tensor:
    """The same numbers with others between them, as a column of a table has."""
    return torch.stack([x, x.roll(1) if x.dtype is torch.bool else x + 3], dim=-1)[..., 0]


def test_vectors_may_have_gaps() -> None:
    """Lengths that one rank decides for all arrive as a column of what was sent: the kernels read its numbers alone."""
    generator = torch.Generator().manual_seed(4)
    k, rows, width = torch.tensor([3, 1, 4, 2], device=DEVICE), 12, 5
    drafts = torch.randint(50, (4, width - 1), generator=generator).to(DEVICE)
    context, lanes = torch.tensor([7, 30, 2, 16], device=DEVICE), torch.tensor([2, 0, 3, 1], device=DEVICE)
    anchor, table = torch.tensor([5, 6, 7, 8], device=DEVICE), torch.arange(16, dtype=torch.int32, device=DEVICE)
    fields = (anchor, drafts, context, table.view(4, 4), lanes)
    spread = (strided(anchor), strided(drafts), strided(context), table.view(4, 4), strided(lanes))
    own, moved = fast_pack.pack_rows(k, rows, *fields, 16), fast_pack.pack_rows(strided(k), rows, *spread, 16)
    assert own[0][0].tolist() == [0, 3, 4, 8, 10]
    assert all(torch.equal(a, b) for a, b in zip((*own[0], *own[1]), (*moved[0], *moved[1]), strict=True))
    assert fast_pack.pack(strided(k), rows)[0].tolist() == [0, 3, 4, 8, 10]

    y = torch.randint(50, (rows,), generator=generator).to(DEVICE)
    y[:2] = drafts[0, :2]
    plain = fast_accept.accept(drafts, k, y, own[0][0])
    assert plain[1].tolist() == [3, 1, 1, 1]
    apart = fast_accept.accept(strided(drafts), strided(k), strided(y), strided(own[0][0]))
    assert all(torch.equal(a, b) for a, b in zip(plain, apart, strict=True))

    q, live = survival(4, width, 0, generator).to(DEVICE), torch.tensor([True, False, True, True], device=DEVICE)
    assert torch.equal(fast_allocate.allocate_exact(q, 9, strided(live)), fast_allocate.allocate_exact(q, 9, live))
