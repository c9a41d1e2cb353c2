"""CPU attention and cache writes against the plain torch versions, on random ragged batches over random pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.kernels import native
from dscale.kernels.attention import RaggedBatch, paged_attention_torch
from dscale.kernels.rotary import HeadShape, split_rotate, split_rotate_write, write_cache, write_context_torch

PAGE = 16
needs_native = pytest.mark.skipif(not native.status().startswith("loaded"), reason=native.status())
pytestmark = needs_native
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}


def ragged(counts: list[int], contexts: list[int], causal: bool, seed: int = 0) -> RaggedBatch:
    """Lanes on shuffled page-table rows, pages in random order, one spare row that no lane uses."""
    generator = torch.Generator().manual_seed(seed)
    lanes = torch.randperm(len(counts) + 1, generator=generator)[: len(counts)]
    longest = max(c + n for c, n in zip(contexts, counts, strict=True))
    pages = -(-longest // PAGE) + 1
    table = torch.randperm((len(counts) + 1) * pages, generator=generator).view(-1, pages).int()
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, counts, strict=True)])
    lane_of_row = lanes.repeat_interleave(torch.tensor(counts))
    slots = table[lane_of_row, positions // PAGE].long() * PAGE + positions % PAGE
    return RaggedBatch(
        positions, slots, table, lanes, starts, torch.tensor(contexts), max(counts), longest, causal=causal
    )


def caches(batch: RaggedBatch, kv: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch.page_table.numel(), kv, PAGE, size)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def check(batch: RaggedBatch, heads: int, kv: int, size: int, dtype: torch.dtype, window: int | None = None) -> None:
    keys, values = caches(batch, kv, size, dtype)
    q = torch.randn(int(batch.starts[-1]) + 3, heads, size).to(dtype)
    got = native.paged_attention(q, keys, values, batch, size**-0.5, window)
    want = paged_attention_torch(q.float(), keys.float(), values.float(), batch, size**-0.5, window)
    torch.testing.assert_close(got.float(), want, **tolerance(dtype))
    assert (got[int(batch.starts[-1]) :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, 300])
def test_ragged_rows_match_torch(dtype: torch.dtype, causal: bool, window: int | None) -> None:
    torch.manual_seed(1)
    check(ragged([16, 1, 7, 0, 2], [0, 700, 255, 3, 256], causal), 9, 3, 64, dtype, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "size"), [(4, 4, 8), (8, 1, 40), (8, 2, 128), (6, 2, 96), (70, 1, 16)])
def test_head_shapes_match_torch(dtype: torch.dtype, heads: int, kv: int, size: int) -> None:
    torch.manual_seed(2)
    check(ragged([5, 1, 17], [33, 530, 0], True), heads, kv, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_many_rows_matches_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    check(ragged([530, 70], [0, 300], True), 9, 3, 64, dtype)


@given(
    lanes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 600)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 40]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_batch_matches_torch(lanes: list[tuple[int, int]], causal: bool, window: int | None, seed: int) -> None:
    counts = [count for count, _ in lanes]
    counts[0] = max(counts[0], 1)
    torch.manual_seed(seed)
    check(ragged(counts, [context for _, context in lanes], causal, seed), 6, 2, 16, torch.float32, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, window: int | None) -> None:
    """A row computed with 15 others, alone, and with one thread: the same bits."""
    torch.manual_seed(4)
    counts, contexts = [16, 3, 40, 1], [900, 255, 100, 2000]
    batch = ragged(counts, contexts, True)
    keys, values = caches(batch, 3, 64, dtype)
    q = torch.randn(sum(counts), 9, 64).to(dtype)
    together = native.paged_attention(q, keys, values, batch, 0.125, window)
    threads = torch.get_num_threads()
    for lane, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        for row in {0, count // 2, count - 1}:
            alone = replace(
                batch,
                lanes=batch.lanes[lane : lane + 1],
                starts=torch.tensor([0, 1]),
                contexts=torch.tensor([context + row]),
            )
            at = int(batch.starts[lane]) + row
            for count_of_threads in (1, threads, 3):
                torch.set_num_threads(count_of_threads)
                try:
                    single = native.paged_attention(q[at : at + 1], keys, values, alone, 0.125, window)
                finally:
                    torch.set_num_threads(threads)
                assert torch.equal(single[0], together[at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("size", [64, 8, 24])
def test_split_rotate_write_matches_torch(dtype: torch.dtype, interleaved: bool, normed: bool, size: int) -> None:
    torch.manual_seed(5)
    shape = HeadShape(6, 2, size, interleaved, 1e-5)
    rows, pages = 37, 5
    qkv = torch.randn(rows, 10 * size).to(dtype)
    angle = torch.rand(rows, size // 2) * 6
    angles = torch.cat([angle.cos(), angle.sin()], dim=-1)
    norms = [torch.randn(size).to(dtype) if normed else None for _ in range(2)]
    slots = torch.randperm(pages * PAGE)[:rows]
    mine = torch.zeros(2, 2, pages, 2, PAGE, size, dtype=dtype)
    theirs = torch.zeros_like(mine)
    q = native.split_rotate_write(qkv, angles, shape, mine[1, 0], mine[1, 1], slots, *norms)
    want, k, v = split_rotate(qkv, angles, shape, *norms)
    write_cache(k, v, theirs[1, 0], theirs[1, 1], slots)
    torch.testing.assert_close(q, want, **tolerance(dtype))
    torch.testing.assert_close(mine, theirs, **tolerance(dtype))
    assert torch.equal(mine[1, 1], theirs[1, 1])
    dispatched = split_rotate_write(qkv, angles, shape, mine[1, 0], mine[1, 1], slots, *norms)
    assert torch.equal(dispatched, q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_context_of_all_layers_matches_torch(dtype: torch.dtype, interleaved: bool, normed: bool) -> None:
    torch.manual_seed(6)
    rows, layers, kv, size, pages = 21, 3, 2, 24, 4
    shape = HeadShape(6, kv, size, interleaved, 1e-5)
    projected = torch.randn(rows, layers, 2, kv, size).to(dtype)
    angle = torch.rand(rows, size // 2) * 6
    angles = torch.cat([angle.cos(), angle.sin()], dim=-1)
    norms = [torch.randn(size).to(dtype) for _ in range(layers)] if normed else None
    slots = torch.randperm(pages * PAGE)[:rows]
    mine = torch.zeros(layers, 2, pages, kv, PAGE, size, dtype=dtype)
    theirs = torch.zeros_like(mine)
    native.write_context(projected, angles, shape, mine, slots, norms)
    write_context_torch(projected, angles, shape, theirs, slots, norms)
    torch.testing.assert_close(mine, theirs, **tolerance(dtype))
    assert torch.equal(mine[:, 1], theirs[:, 1])
