import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.speculation.packing import gather, pack


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 16), min_size=1, max_size=12), st.integers(0, 20))
def test_round_trip(k: list[int], spare: int) -> None:
    n, total = len(k), sum(k)
    packed = pack(torch.tensor(k), total + spare)
    field = torch.arange(n * 16).view(n, 16) + 1000
    flat = gather(packed, field, fill=-7)
    expected = [int(field[i, j]) for i in range(n) for j in range(k[i])]
    assert flat.tolist() == expected + [-7] * spare
    offsets = [sum(k[:i]) for i in range(n + 1)]
    assert packed.starts.tolist() == offsets
    assert packed.valid.tolist() == [True] * total + [False] * spare
    assert packed.lane_of_row[:total].tolist() == [i for i in range(n) for _ in range(k[i])]
    assert packed.column_of_row.tolist() == [j for i in range(n) for j in range(k[i])] + [0] * spare
    assert bool(((packed.lane_of_row >= 0) & (packed.lane_of_row < n)).all())
    # and back: every packed row lands where it came from
    back = torch.zeros_like(field)
    back[packed.lane_of_row[packed.valid], packed.column_of_row[packed.valid]] = flat[packed.valid]
    for i in range(n):
        assert torch.equal(back[i, : k[i]], field[i, : k[i]])
        assert int(back[i, k[i] :].abs().sum()) == 0


def test_worked_example() -> None:
    packed = pack(torch.tensor([6, 10, 7, 9]), 32)
    assert packed.starts.tolist() == [0, 6, 16, 23, 32]
    assert packed.lane_of_row[[0, 5, 6, 15, 16, 22, 23, 31]].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert packed.column_of_row[[0, 5, 6, 15, 16, 22, 23, 31]].tolist() == [0, 5, 0, 9, 0, 6, 0, 8]
    assert bool(packed.valid.all())


def test_inactive_lanes_start_at_the_end_and_own_nothing() -> None:
    packed = pack(torch.tensor([3, 2, 0, 0]), 8)
    assert packed.starts.tolist() == [0, 3, 5, 5, 5]
    assert packed.valid.tolist() == [True] * 5 + [False] * 3
    assert gather(packed, torch.ones(4, 4, dtype=torch.bool), fill=False).tolist() == [True] * 5 + [False] * 3
    assert gather(packed, torch.full((4, 4), 0.5), fill=-1.0).tolist() == [0.5] * 5 + [-1.0] * 3


def test_a_finished_lane_in_the_middle() -> None:
    packed = pack(torch.tensor([2, 0, 3]), 5)
    assert packed.lane_of_row.tolist() == [0, 0, 2, 2, 2]
    assert packed.starts.tolist() == [0, 2, 2, 5]
