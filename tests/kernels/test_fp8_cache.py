"""A cache in eight bits: rows rounded once as they are written, and attention over the rounded rows, against float64.

Every way of doing it: plain torch, the CPU's own kernels, and Triton (on the GPU, or in its interpreter).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscale.kernels import attention, native, rotary
from dscale.kernels import triton as kernels
from dscale.kernels.attention import AttentionOptions, RaggedBatch, paged_attention
from dscale.kernels.rotary import HeadShape, split_rotate_write
from tests.kernels.exact import round_as_a_chip

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter cannot multiply bfloat16
EIGHT = torch.float8_e4m3fn
PAGE = 16
WAYS = ("torch", "native", "triton")
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of WAYS, which the dispatching functions then take."""
    chosen: str = request.param
    take(chosen, monkeypatch)
    return chosen


def take(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dispatching functions go this way, or skip."""
    if chosen == "native":
        if ON_GPU or not native.status().startswith("loaded"):
            pytest.skip("needs the CPU's own kernels, and the CPU")
        return
    if chosen == "triton":
        pytest.importorskip("triton", reason="the triton package is not installed")
        if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no eight bits")
        round_as_a_chip(monkeypatch)
    monkeypatch.setattr(native, "usable", lambda x: False)
    monkeypatch.setattr(kernels, "usable", lambda x: chosen == "triton")


def eight_bits(x: Tensor) -> Tensor:
    """x rounded to float8_e4m3fn by hand, in float64: three bits after the point, no step below 2^-9, at most 448."""
    wide = x.double().clamp(-448, 448)
    exponent = (torch.frexp(wide).exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(wide), exponent - 3)
    return (wide / step).round() * step


@dataclass
class World:
    """Lanes with everything that they ever write: fused rows [T, (heads + 2·kv)·d] and their slots [T], by lane."""

    shape: HeadShape
    batch: RaggedBatch
    fused: list[Tensor]
    slots: list[Tensor]

    def written(self, dtype: torch.dtype, pieces: int) -> tuple[Tensor, Tensor, Tensor]:
        """q of the batch's rows with three sentinels behind, and both caches, written in so many pieces a lane."""
        caches = torch.zeros(2, self.batch.page_table.numel(), self.shape.num_kv_heads, PAGE, self.shape.head_dim)
        keys, values = caches.to(DEVICE, EIGHT)
        angles = torch.tensor([1.0, 0.0], device=DEVICE).repeat_interleave(self.shape.head_dim // 2)
        rows = [torch.zeros(0, self.shape.num_heads, self.shape.head_dim, device=DEVICE, dtype=dtype)]
        counts = (self.batch.starts[1:] - self.batch.starts[:-1]).tolist()
        for fused, slots, count in zip(self.fused, self.slots, counts, strict=True):
            parts = [
                split_rotate_write(qkv, angles.expand(len(at), -1), self.shape, keys, values, at)
                for qkv, at in zip(fused.to(dtype).chunk(pieces), slots.chunk(pieces), strict=True)
            ]
            rows.append(torch.cat(parts)[len(slots) - count :])
        return torch.cat([*rows, torch.ones_like(rows[-1][:1]).expand(3, -1, -1)]), keys, values

    def attended(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """The batch's rows over the rounded keys and values, in float64, one row and head at a time."""
        heads, kv, size = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        out = []
        for fused, context in zip(self.fused, self.batch.contexts.tolist(), strict=True):
            q, k, v = fused.to(dtype).view(-1, heads + 2 * kv, size).split([heads, kv, kv], dim=1)
            k, v = (eight_bits(one).repeat_interleave(heads // kv, dim=1) for one in (k, v))
            for row in range(context, len(fused)):
                end = row + 1 if self.batch.causal else len(fused)
                first = 0 if window is None else max(row + 1 - window, 0)
                score = torch.einsum("hd,khd->hk", q[row].double(), k[first:end]) * size**-0.5
                out.append(torch.einsum("hk,khd->hd", score.softmax(-1), v[first:end]))
        return torch.stack(out)


def world(
    lanes: list[tuple[int, int]], heads: int, kv: int, size: int, causal: bool = True, seed: int = 0, large: float = 3.0
) -> World:
    """Lanes (rows, context) on shuffled pages; every lane's first key and value have numbers beyond eight bits."""
    generator = torch.Generator().manual_seed(seed)
    counts, contexts = [count for count, _ in lanes], [context for _, context in lanes]
    lengths = [count + context for count, context in lanes]
    pages = -(-max(lengths) // PAGE)
    table = torch.randperm(len(lanes) * pages, generator=generator).view(-1, pages).int()
    owner = torch.randperm(len(lanes), generator=generator)
    slots = [table[owner[i], torch.arange(n) // PAGE].long() * PAGE + torch.arange(n) % PAGE for i, n in
             enumerate(lengths)]  # fmt: skip
    fused = [large * torch.randn(n, (heads + 2 * kv) * size, generator=generator) for n in lengths]
    for rows in fused:
        rows[:1, -size::7], rows[:1, -size + 1 :: 7] = 1000.0, -460.0
    positions = torch.cat([torch.arange(c, c + n) for n, c in lanes])
    starts = torch.tensor([0, *counts]).cumsum(0)
    parts = [positions, torch.cat(slots), table, owner, starts, torch.tensor(contexts)]
    batch = RaggedBatch(*(one.to(DEVICE) for one in parts), max(counts), max(lengths), causal)  # type: ignore[arg-type]
    on_device = [[one.to(DEVICE) for one in some] for some in (fused, slots)]
    return World(HeadShape(heads, kv, size), batch, *on_device)


def check(made: World, dtype: torch.dtype, window: int | None = None, pieces: int = 1) -> None:
    q, keys, values = made.written(dtype, pieces)
    got = paged_attention(q, keys, values, made.batch, made.shape.head_dim**-0.5, window)
    want = made.attended(dtype, window)
    assert got.dtype is dtype
    assert (got[len(want) :] == 0).all(), "sentinel rows are zero"
    error = (got[: len(want)].double() - want).norm() / want.norm()
    assert error < BOUND[dtype]


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_written_and_attended_as_by_hand(way: str, dtype: torch.dtype) -> None:
    check(world([(5, 40), (1, 17), (3, 0)], 4, 2, 32), dtype)
    check(world([(6, 30), (6, 3)], 6, 2, 16, causal=False, seed=1), dtype)


@given(
    lanes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (6, 2), (4, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([None, 20]),
    path=st.sampled_from(["verify", "draft", "prefill"]),
    deterministic=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12, deadline=None, derandomize=True)
@pytest.mark.parametrize("chosen", WAYS)
def test_any_batch_as_by_hand(
    chosen: str,
    lanes: list[tuple[int, int]],
    heads: tuple[int, int],
    causal: bool,
    window: int | None,
    path: str,
    deterministic: bool,
    seed: int,
) -> None:
    lanes = [(max(lanes[0][0], 1), lanes[0][1]), *lanes[1:]]
    made = world(lanes, *heads, 16, causal, seed, large=1.0)
    made.batch = replace(made.batch, path=path, options=AttentionOptions(deterministic=deterministic))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        take(chosen, patch)
        check(made, torch.float32, window, pieces=3 if min(map(sum, lanes)) >= 3 else 1)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rows_are_rounded_to_nearest_and_never_to_nan(way: str, dtype: torch.dtype) -> None:
    shape, size = HeadShape(1, 1, 16), 16
    k = torch.logspace(-4, 5, 40 * size, base=10.0).view(40, size) * torch.tensor([1.0, -1.0]).repeat(size // 2)
    k = k.clamp(-60000, 60000).to(DEVICE, dtype)
    qkv = torch.cat([k, k, k.flip(0)], dim=1)
    angles = torch.tensor([1.0, 0.0], device=DEVICE).repeat_interleave(size // 2).expand(40, -1)
    cache = torch.zeros(2, 5, 1, PAGE, size, device=DEVICE).to(EIGHT)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:40].to(DEVICE)
    split_rotate_write(qkv, angles, shape, *cache, slots)
    keys, values = cache.double().transpose(2, 3).reshape(2, 80, size)[:, slots]
    assert torch.equal(keys, eight_bits(k))
    assert torch.equal(values, eight_bits(k.flip(0)))
    assert keys.abs().max() == 448
    assert cache.double().count_nonzero() <= 2 * 40 * size, "no other slot is written"


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("normed", [False, True])
def test_context_of_all_layers(way: str, normed: bool) -> None:
    layers, kv, size, rows = 3, 2, 16, 6
    generator = torch.Generator().manual_seed(2)
    fused = (torch.randn(rows, layers, 2, kv, size, generator=generator) * 200).to(DEVICE)
    turn = torch.randn(rows, size // 2, generator=generator).to(DEVICE)
    angles = torch.cat([turn.cos(), turn.sin()], dim=-1)
    norms = list(torch.randn(layers, size, generator=generator).to(DEVICE)) if normed else None
    cache = torch.zeros(layers, 2, 2, kv, PAGE, size, device=DEVICE).to(EIGHT)
    slots = torch.tensor([3, 19, 4, 0, 11, 31], device=DEVICE)
    rotary.write_context(fused, angles, HeadShape(4, kv, size), cache, slots, norms)
    wide = torch.zeros(layers, 2, 2, kv, PAGE, size, device=DEVICE)
    rotary.write_context_torch(fused, angles, HeadShape(4, kv, size), wide, slots, norms)
    near = (cache.double() - eight_bits(wide)).abs()
    assert (near > 0).sum() <= 2, "but for a number between two of eight bits"
    assert (near <= eight_bits(wide).abs() / 7).all()
    assert cache[:, 1].double().abs().max() == 448
    assert torch.equal(cache[:, 1].double(), eight_bits(wide[:, 1]))


@pytest.mark.skipif(ON_GPU, reason="of the CPU's own kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    if not native.status().startswith("loaded"):
        pytest.skip(native.status())
    made = world([(9, 50), (4, 61)], 4, 2, 32)
    q, keys, values = made.written(dtype, 2)
    together, row = paged_attention(q, keys, values, made.batch, 0.2), 0
    for lane, (count, context) in enumerate([(9, 50), (4, 61)]):
        for j in range(count):
            alone = replace(
                made.batch, lanes=made.batch.lanes[lane : lane + 1], starts=torch.tensor([0, 1]),
                contexts=torch.tensor([context + j]), max_rows=1, max_context=context + j + 1,
            )  # fmt: skip
            assert torch.equal(paged_attention(q[row : row + 1], keys, values, alone, 0.2)[0], together[row])
            row += 1


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_scales_multiply_what_is_read(way: str) -> None:
    made = world([(3, 20), (2, 5)], 4, 2, 32)
    q, keys, values = made.written(torch.float32, 1)
    got = paged_attention(q, keys, values, made.batch, 0.1, None, 0.25, 3.0)
    wide = [cache.float() * scale for cache, scale in ((keys, 0.25), (values, 3.0))]
    want = attention.paged_attention_torch(q, *wide, made.batch, 0.1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rounding_by_hand_knows_the_edges() -> None:
    pairs = {448: 448, 464: 448, 1e9: 448, -1e9: -448, 17: 16, 19: 20, 2**-9: 2**-9, 2**-10: 0, 3 * 2**-10: 2**-8}
    x, want = (torch.tensor(list(side), dtype=torch.float64) for side in (pairs.keys(), pairs.values()))
    assert torch.equal(eight_bits(x), want)
