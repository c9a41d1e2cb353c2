import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscale.speculation.budget import allocate_exact, allocate_seeded, clip_total, initial_windows


def survival_from(steps: list[list[float]]) -> Tensor:
    """Nonincreasing q [N, W] with 1 first, from factors in [0, 1] — coarse ones, so that ties happen."""
    factors = torch.tensor(steps, dtype=torch.float64)
    return torch.cat([torch.ones(len(steps), 1, dtype=torch.float64), factors.cumprod(-1)], dim=-1).float()


@st.composite
def problems(draw: st.DrawFn, lanes: int = 4, width: int = 5) -> tuple[Tensor, int, Tensor]:
    n, w = draw(st.integers(1, lanes)), draw(st.integers(2, width))
    factor = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
    q = survival_from(draw(st.lists(st.lists(factor, min_size=w - 1, max_size=w - 1), min_size=n, max_size=n)))
    live = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    return q, draw(st.integers(0, n * w + 3)), live


def objective(q: Tensor, k: Tensor) -> float:
    return sum(q[i, : int(k[i])].double().sum().item() for i in range(q.shape[0]))


def seeded_turns(q: Tensor, total: int, live: Tensor) -> list[int]:
    """Algorithm 1 as the paper writes it: one slot a turn, ties to the lowest request."""
    width = q.shape[1]
    lanes = [i for i in range(q.shape[0]) if live[i]]
    start = initial_windows(q).tolist()
    k = [start[i] if live[i] else 0 for i in range(q.shape[0])]
    total = min(max(total, len(lanes)), len(lanes) * width)
    while sum(k) < total:
        grow = max((i for i in lanes if k[i] < width), key=lambda i: (q[i, k[i]].item(), -i))
        k[grow] += 1
    while sum(k) > total:
        drop = min((i for i in lanes if k[i] > 1), key=lambda i: (q[i, k[i] - 1].item(), i))
        k[drop] -= 1
    return k


@settings(max_examples=200, deadline=None)
@given(problems())
def test_exact_is_optimal_by_brute_force(problem: tuple[Tensor, int, Tensor]) -> None:
    q, total, live = problem
    n, w = q.shape
    k = allocate_exact(q, total, live)
    used = int(clip_total(total, live, w))
    choices = [range(1, w + 1) if live[i] else [0] for i in range(n)]
    best = max(objective(q, torch.tensor(c)) for c in itertools.product(*choices) if sum(c) == used)
    assert objective(q, k) == pytest.approx(best, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(problems(lanes=9, width=16))
def test_bounds_sums_and_order_of_objectives(problem: tuple[Tensor, int, Tensor]) -> None:
    q, total, live = problem
    n, w = q.shape
    requests = int(live.sum())
    exact, seeded = allocate_exact(q, total, live), allocate_seeded(q, total, live)
    for k in (exact, seeded):
        assert k.dtype == torch.int64
        assert k.shape == (n,)
        assert int(k.sum()) == min(max(total, requests), requests * w)
        assert bool(((k >= 1) & (k <= w))[live].all())
        assert bool((k[~live] == 0).all())
    assert objective(q, exact) >= objective(q, seeded) - 1e-6


@settings(max_examples=300, deadline=None)
@given(problems(lanes=9, width=16))
def test_seeded_equals_the_papers_turns(problem: tuple[Tensor, int, Tensor]) -> None:
    q, total, live = problem
    assert allocate_seeded(q, total, live).tolist() == seeded_turns(q, total, live)


def worked_example() -> Tensor:
    """q [4, 16] whose k⁰ is [5, 10, 7, 9]; the likeliest next slot is the first request's."""
    q = torch.zeros(4, 16)
    for lane, (window, following) in enumerate(zip((5, 10, 7, 9), (0.9, 0.8, 0.7, 0.6), strict=True)):
        q[lane, :window], q[lane, window] = 1.0, following
    return q


def test_worked_example() -> None:
    q, live = worked_example(), torch.ones(4, dtype=torch.bool)
    assert initial_windows(q).tolist() == [5, 10, 7, 9]
    k = allocate_seeded(q, 32, live)
    assert k.tolist() == [6, 10, 7, 9]
    assert (k.cumsum(0) - k).tolist() == [0, 6, 16, 23]
    assert int(k.sum()) == 32
    assert allocate_exact(q, 32, live).tolist() == [6, 10, 7, 9]


def test_initial_window_rounds_and_counts_the_anchor() -> None:
    q = torch.ones(3, 16)
    q[0, 1:] = 6.2 / 15
    q[1, 1:] = 0.0
    assert initial_windows(q).tolist() == [6, 1, 15]
    assert initial_windows(torch.ones(1, 2)).tolist() == [1]


def test_ties_go_by_position_then_request_in_exact_and_by_request_in_seeded() -> None:
    q = torch.full((3, 4), 0.5)
    q[:, 0] = 1.0
    live = torch.ones(3, dtype=torch.bool)
    assert allocate_exact(q, 5, live).tolist() == [2, 2, 1]
    assert allocate_exact(q, 8, live).tolist() == [3, 3, 2]
    assert initial_windows(q).tolist() == [2, 2, 2]
    assert allocate_seeded(q, 8, live).tolist() == [4, 2, 2]
    assert allocate_seeded(q, 5, live).tolist() == [1, 2, 2]


def test_total_may_be_a_tensor() -> None:
    q = worked_example()
    live = torch.tensor([True, True, False, True])
    for total in (0, 3, 20, 48, 99):
        for allocate in (allocate_exact, allocate_seeded):
            assert torch.equal(allocate(q, torch.tensor(total), live), allocate(q, total, live))


def test_no_live_lane() -> None:
    dead = torch.zeros(4, dtype=torch.bool)
    assert allocate_exact(worked_example(), 32, dead).tolist() == [0] * 4
    assert allocate_seeded(worked_example(), 32, dead).tolist() == [0] * 4
