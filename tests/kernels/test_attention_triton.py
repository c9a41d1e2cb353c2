"""Triton attention against plain torch on random ragged batches: on the GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.config import InputError
from dscale.kernels.attention import (
    AttentionOptions,
    RaggedBatch,
    arrival_counters,
    paged_attention,
    paged_attention_torch,
)

pytest.importorskip("triton", reason="the triton package is not installed")

from dscale.kernels.triton import attention as fast
from dscale.kernels.triton.attention import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cannot multiply bfloat16
SMALL = Tile(rows=16, keys=16, warps=2, stages=2, programs=1)  # many chunks, tiles and turns at tiny sizes


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def ragged(
    counts: list[int], contexts: list[int], causal: bool = True, options: AttentionOptions | None = None, seed: int = 0
) -> RaggedBatch:
    """Lanes on shuffled page-table rows and shuffled pages; unused table entries point beyond every lane's pages."""
    generator = torch.Generator().manual_seed(seed)
    lanes = torch.randperm(len(counts) + 1, generator=generator)[: len(counts)]
    longest = max(context + count for context, count in zip(contexts, counts, strict=True))
    pages = -(-longest // PAGE) + 1
    table = torch.randperm((len(counts) + 1) * pages, generator=generator).view(-1, pages).int()
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, counts, strict=True)])
    row_lanes = lanes.repeat_interleave(torch.tensor(counts))
    slots = table[row_lanes, positions // PAGE].long() * PAGE + positions % PAGE
    tensors = [x.to(DEVICE) for x in (positions, slots, table, lanes, starts, torch.tensor(contexts))]
    options = options or AttentionOptions(tile=SMALL)
    return RaggedBatch(*tensors, max(counts), longest, causal=causal, options=options)  # type: ignore[arg-type]


def tensors(
    batch: RaggedBatch, heads: int, kv: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q with three sentinel rows, and caches in which everything that no lane has written is NaN."""
    q = torch.randn(int(batch.starts[-1]) + 3, heads, size, device=DEVICE).to(dtype)
    written = torch.zeros(batch.page_table.numel(), 1, PAGE, 1, dtype=torch.bool, device=DEVICE)
    counts = batch.starts[1:] - batch.starts[:-1]
    for lane, context, count in zip(batch.lanes, batch.contexts, counts, strict=True):
        token = torch.arange(int(context + count), device=DEVICE)
        written[batch.page_table[lane, token // PAGE].long(), :, token % PAGE] = True
    caches = torch.randn(2, batch.page_table.numel(), kv, PAGE, size, device=DEVICE).to(dtype)
    keys, values = caches.masked_fill(~written, torch.nan)
    return q, keys, values


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got - want‖ / ‖want‖; NaN anywhere gives NaN, which passes no bound."""
    return float((got.float() - want).norm() / want.norm().clamp(min=1e-9))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits; in the interpreter, whose matrix products depend on the row's place, to float32 rounding."""
    return torch.equal(one, other) if DEVICE.type == "cuda" else error(one, other.float()) < 1e-6


BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(
    batch: RaggedBatch, heads: int, kv: int, size: int, dtype: torch.dtype = torch.float32, window: int | None = None
) -> torch.Tensor:
    q, keys, values = tensors(batch, heads, kv, size, dtype)
    got = fast.paged_attention(q, keys, values, batch, size**-0.5, window)
    wide = (x.float().nan_to_num() for x in (q, keys, values))
    want = paged_attention_torch(*wide, batch, size**-0.5, window)
    assert error(got, want) < BOUND[dtype]
    assert (got[int(batch.starts[-1]) :] == 0).all(), "sentinel rows are zero"
    return got


@given(
    lanes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (6, 2), (4, 1), (16, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 20]),
    path=st.sampled_from(["verify", "draft", "prefill"]),
    layout=st.sampled_from(["packed", "narrow"]),
    deterministic=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_batch_matches_torch(
    lanes: list[tuple[int, int]],
    heads: tuple[int, int],
    causal: bool,
    window: int | None,
    path: str,
    layout: str,
    deterministic: bool,
    seed: int,
) -> None:
    counts = [count for count, _ in lanes]
    counts[0] = max(counts[0], 1)
    torch.manual_seed(seed)
    options = AttentionOptions(layout, deterministic, SMALL)
    batch = ragged(counts, [context for _, context in lanes], causal, options, seed)
    check(replace(batch, path=path), *heads, 16, window=window)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", {HALF, torch.float16, torch.float32})
@pytest.mark.parametrize("size", [64, 128, 256])
def test_head_sizes_and_dtypes_with_the_chosen_tiles(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(1)
    check(ragged([16, 1, 0, 7], [70, 130, 5, 0], options=AttentionOptions()), 4, 1, size, dtype)


@pytest.mark.parametrize("layout", ["wide", "narrow", "packed"])
@pytest.mark.parametrize("causal", [True, False])
def test_layouts_match_torch(layout: str, causal: bool) -> None:
    torch.manual_seed(2)
    check(ragged([16, 3, 16], [40, 90, 0], causal, AttentionOptions(layout)), 4, 2, 64, HALF)


def test_prefill_of_many_rows_matches_torch() -> None:
    torch.manual_seed(3)
    batch = ragged([70, 33], [0, 50], options=AttentionOptions())
    assert fast.is_prefill(batch)
    check(batch, 3, 1, 64, HALF)


def test_counters_are_zero_again_and_scratch_of_the_last_call_does_not_matter() -> None:
    torch.manual_seed(4)
    batch = ragged([3, 2], [200, 60])
    batch = replace(batch, arrivals=arrival_counters(2, 3, 4, DEVICE))
    first = check(batch, 4, 2, 16)
    assert batch.arrivals is not None
    assert (batch.arrivals == 0).all()
    torch.manual_seed(4)
    batch = replace(ragged([3, 2], [200, 60]), arrivals=batch.arrivals)
    assert torch.equal(first, check(batch, 4, 2, 16))
    with pytest.raises(ValueError, match="arrivals has 1 entries"):
        check(replace(batch, arrivals=batch.arrivals[:1]), 4, 2, 16)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("tile", [None, SMALL])
def test_deterministic_rows_do_not_depend_on_the_batch(
    window: int | None, tile: Tile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time, all rows of all lanes, and all rows as a prefill: the same bits."""
    monkeypatch.setattr(fast, "FIXED_KEYS", 64)
    torch.manual_seed(5)
    options = AttentionOptions(deterministic=True, tile=tile)
    dtype = HALF if tile is None else torch.float32
    counts, contexts = [9, 4], [150, 61]
    together = replace(ragged(counts, contexts, options=options), path="verify")
    q, keys, values = tensors(together, 4, 2, 16, dtype)
    want = fast.paged_attention(q, keys, values, together, 0.25, window)
    chunked = fast.paged_attention(q, keys, values, replace(together, path="prefill"), 0.25, window)
    assert same(want, chunked)
    row = 0
    for lane, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        for j in range(0, count, 3):
            alone = replace(
                together,
                lanes=together.lanes[lane : lane + 1],
                starts=torch.tensor([0, 1], device=DEVICE),
                contexts=torch.tensor([context + j], device=DEVICE),
                max_rows=1,
            )
            at = row + j
            assert same(want[at : at + 1], fast.paged_attention(q[at : at + 1], keys, values, alone, 0.25, window))
        row += count


def test_fp8_cache_with_scales() -> None:
    torch.manual_seed(6)
    batch = ragged([5, 2], [40, 17], options=AttentionOptions())
    q, keys, values = tensors(batch, 4, 2, 32, HALF)
    keys, values = (x.nan_to_num().div(0.25).to(torch.float8_e4m3fn) for x in (keys, values))
    got = fast.paged_attention(q, keys, values, batch, 32**-0.5, None, 0.25, 0.25)
    want = paged_attention_torch(q.float(), keys, values, batch, 32**-0.5, None, 0.25, 0.25)
    assert error(got, want) < 1e-2


def test_options_are_checked_and_cpu_tensors_stay_off_triton() -> None:
    with pytest.raises(InputError, match="attention layout is 'tall'"):
        AttentionOptions("tall")
    batch = ragged([2], [3])
    q, keys, values = tensors(batch, 2, 1, 24, torch.float32)  # a head size that the kernels do not take
    assert not fast.supports(q, keys, values)
    got = paged_attention(q, keys.nan_to_num(), values.nan_to_num(), batch, 1.0)
    assert error(got, paged_attention_torch(q, keys.nan_to_num(), values.nan_to_num(), batch, 1.0)) < 1e-5


@pytest.mark.parametrize("multiprocessors", [1, 3, 7, 13])
@pytest.mark.parametrize("window", [None, 50])
def test_any_number_of_programs_shares_the_work(
    multiprocessors: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal chunks where they fit, one line of all key tiles where they do not: every unit is merged once and whole."""
    monkeypatch.setattr(fast, "multiprocessors", lambda device: multiprocessors)
    generator = torch.Generator().manual_seed(multiprocessors)
    for lanes in (2, 7):
        counts = torch.randint(0, 17, (lanes,), generator=generator).tolist()
        contexts = torch.randint(0, 200, (lanes,), generator=generator).tolist()
        counts[0], contexts[-1] = 16, 5
        batch = ragged(counts, contexts, causal=lanes == 7)
        batch = replace(batch, arrivals=arrival_counters(lanes, 16, 4, DEVICE))
        q, keys, values = tensors(batch, 4, 2, 16, torch.float32)
        want = paged_attention_torch(q, keys.nan_to_num(), values.nan_to_num(), batch, 0.25, window)
        assert error(fast.paged_attention(q, keys, values, batch, 0.25, window), want) < 1e-5
        assert batch.arrivals is not None
        assert not batch.arrivals.any()


def test_whole_units_in_turns_merge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six lanes of one length in two, three or six tiles each go round a few programs: no arrival is counted."""
    for multiprocessors, layout in ((3, "packed"), (4, "narrow"), (2, "wide")):
        monkeypatch.setattr(fast, "multiprocessors", lambda device, count=multiprocessors: count)
        options = AttentionOptions(layout=layout, tile=SMALL)  # type: ignore[arg-type]
        batch = ragged([16] * 6, [80] * 6, options=options)
        untouched = torch.full_like(arrival_counters(6, 16, 4, DEVICE), 7)  # would spoil what is merged
        q, keys, values = tensors(batch, 4, 2, 16, torch.float32)
        want = paged_attention_torch(q, keys.nan_to_num(), values.nan_to_num(), batch, 0.25)
        got = fast.paged_attention(q, keys, values, replace(batch, arrivals=untouched), 0.25)
        assert error(got, want) < 1e-5
        assert (untouched == 7).all()


def test_programs_of_a_multiprocessor() -> None:
    """One where packed tiles leave room on the chip, two where there are many tiles or chunks of a fixed length."""
    packed, narrow, exact = AttentionOptions(), AttentionOptions(layout="narrow"), AttentionOptions(deterministic=True)
    tiles = [(packed, 8 * 8), (packed, 32 * 8), (narrow, 8 * 32), (exact, 8 * 8)]
    chosen = [fast.choose_tile(one, 64, 128, torch.bfloat16, False, heads) for one, heads in tiles]
    assert [tile.programs for tile in chosen] == [1, 2, 2, 2]


def test_lanes_starts_and_contexts_may_have_gaps() -> None:
    batch = ragged([5, 16, 1], [40, 3, 70])
    q, keys, values = tensors(batch, 4, 2, 16, torch.float32)
    names = ("lanes", "starts", "contexts")
    spread = {name: torch.stack([getattr(batch, name), getattr(batch, name) + 1], dim=1)[:, 0] for name in names}
    want = fast.paged_attention(q, keys, values, batch, 0.25)
    assert torch.equal(fast.paged_attention(q, keys, values, replace(batch, **spread), 0.25), want)
