import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.speculation.acceptance import accept, clip_at_end
from dscale.speculation.packing import pack


def accept_one_by_one(drafts: list[int], k: int, y: list[int]) -> list[int]:
    """The emitted tokens of one request, by the definition: walk until the target disagrees or rows run out."""
    emitted = []
    for row in range(k):
        emitted.append(y[row])
        if row == k - 1 or drafts[row] != y[row]:
            break
    return emitted


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[list[int]], int]:
    n, width = draw(st.integers(1, 6)), draw(st.integers(2, 8))
    token = st.integers(0, 2)  # few tokens, so that drafts are often right
    drafts = [draw(st.lists(token, min_size=width - 1, max_size=width - 1)) for _ in range(n)]
    k = [draw(st.integers(0, width)) for _ in range(n)]
    y = [draw(st.lists(token, min_size=k[i], max_size=k[i])) for i in range(n)]
    return drafts, k, y, draw(st.integers(0, 4))


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_equals_the_scalar_walk(block: tuple[list[list[int]], list[int], list[list[int]], int]) -> None:
    drafts, k, y, spare = block
    width = len(drafts[0]) + 1
    flat = [token for row in y for token in row] + [0] * max(spare, 1)
    packed = pack(torch.tensor(k), len(flat))
    result = accept(torch.tensor(drafts), torch.tensor(k), torch.tensor(flat), packed.starts)
    for i in range(len(k)):
        expected = accept_one_by_one(drafts[i], k[i], y[i])
        assert int(result.emitted[i]) == len(expected)
        assert int(result.count[i]) == max(len(expected) - 1, 0)
        assert result.tokens[i].tolist() == expected + [-1] * (width - len(expected))
        assert int(result.next_anchor[i]) == (expected[-1] if expected else 0)


def test_all_pass_and_none_pass() -> None:
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    k = torch.tensor([4, 4, 2])
    y = torch.tensor([5, 6, 7, 8, 9, 6, 7, 8, 5, 6])
    result = accept(drafts, k, y, pack(k, 10).starts)
    assert result.count.tolist() == [3, 0, 1]
    assert result.tokens.tolist() == [[5, 6, 7, 8], [9, -1, -1, -1], [5, 6, -1, -1]]
    assert result.next_anchor.tolist() == [8, 9, 6]


def test_rows_without_a_slot_of_their_own_never_pass() -> None:
    # Lane 0 has one slot; the next lane's rows happen to equal its drafts and must not be read as its own.
    drafts = torch.tensor([[1, 2], [9, 9]])
    k = torch.tensor([1, 3])
    result = accept(drafts, k, torch.tensor([1, 2, 3, 4]), pack(k, 4).starts)
    assert result.emitted.tolist() == [1, 1]
    assert result.next_anchor.tolist() == [1, 2]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=6, max_size=6),
    st.integers(0, 6),
    st.lists(st.sampled_from([-1, 0, 1, 7]), min_size=2, max_size=2),
    st.integers(0, 8),
)
def test_clip_equals_the_scalar_walk(row: list[int], emitted: int, ends: list[int], remaining: int) -> None:
    kept, finished = 0, emitted > 0 and remaining == 0
    while kept < emitted and not finished:
        kept += 1
        finished = row[kept - 1] in ends or kept == remaining
    tokens = torch.tensor([row[:emitted] + [-1] * (6 - emitted)])
    result = clip_at_end(tokens, torch.tensor([emitted]), torch.tensor([ends]), torch.tensor([remaining]))
    assert result[0].tolist() == [kept]
    assert result[1].tolist() == [finished]


def test_clip_lanes_have_their_own_ends() -> None:
    tokens = torch.tensor([[4, 2, 5, -1]] * 4)
    emitted = torch.tensor([3, 3, 3, 0])
    ends = torch.tensor([[2, -1], [-1, -1], [9, 5], [2, 2]])
    clipped, finished = clip_at_end(tokens, emitted, ends, torch.tensor([10, 2, 10, 10]))
    assert clipped.tolist() == [2, 2, 3, 0]
    assert finished.tolist() == [True, True, True, False]
