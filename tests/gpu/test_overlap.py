"""On a Hopper GPU: kernels start before the one ahead has ended, and see all that it and those ahead of it wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dscale.kernels.rotary import HeadShape

pytest.importorskip("triton", reason="the triton package is not installed")

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dscale.kernels.triton import activation, fp8, norm, overlap, rotary

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
DEVICE = torch.device("cuda", 0)
ROWS, HIDDEN, INNER, LAYERS, REPLAYS = 24, 1024, 2048, 6, 200
SHAPE = HeadShape(8, 2, 128)
Run = Callable[[], None]


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Turn overlap on or off."""

    def turn(on: bool) -> None:
        monkeypatch.setenv("DSCALE_OVERLAP", str(int(on)))
        overlap.launch.cache_clear()
        assert overlap.launch(DEVICE)["OVERLAP"] is on

    yield turn
    overlap.launch.cache_clear()


def captured(run: Run) -> Run:
    """One CUDA graph of it, run once before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@triton.jit
def _slow(number, values, times, NANOSECONDS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Write `number` plus the place, late. times: start, end."""
    overlap.wait_for_earlier(OVERLAP)
    start = globaltimer()
    now = start
    while now - start < NANOSECONDS:
        now = globaltimer()
    place = tl.arange(0, BLOCK)
    tl.store(values + place, tl.load(number) + place)
    tl.store(times, start)
    tl.store(times + 1, globaltimer())


@triton.jit
def _next(times, OVERLAP: tl.constexpr):
    """times: start, and when the wait was over."""
    start = globaltimer()
    overlap.wait_for_earlier(OVERLAP)
    tl.store(times, start)
    tl.store(times + 1, globaltimer())


@triton.jit
def _copy(values, out, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    overlap.wait_for_earlier(OVERLAP)
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(values + place))
    tl.store(values + place, tl.zeros([BLOCK], tl.int64))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_starts_early_and_sees_everything(switch: Callable[[bool], None], on: bool, graphs: bool) -> None:
    """The third kernel reads, and overwrites, what the first wrote late; the second touches none of it."""
    switch(on)
    options = overlap.launch(DEVICE)
    values, out, number = (torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in (256, 256, 1))
    times = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)

    def run() -> None:
        _slow[(1,)](number, values, times[0], NANOSECONDS=1_000_000, BLOCK=256, **options)
        _next[(1,)](times[1], **options)
        _copy[(1,)](values, out, BLOCK=256, **options)

    run = captured(run) if graphs else run
    run()
    torch.cuda.synchronize()
    for turn in range(1, 6):
        number.fill_(1000 * turn)
        run()
        assert torch.equal(out.cpu(), 1000 * turn + torch.arange(256))
        assert not values.any()
        (start, end), (begun, waited) = times.tolist()
        assert end - start >= 1_000_000
        assert waited >= end
        assert (begun < end) is on


class Chain:
    """A few layers of a decoder: norms, products, rotation with cache writes and gate, in either precision."""

    def __init__(self, dtype: torch.dtype, eight_bits: bool) -> None:
        self.eight_bits = eight_bits
        self.dtype = dtype
        heads = SHAPE.num_heads + 2 * SHAPE.num_kv_heads
        sizes = {"qkv": (heads * SHAPE.head_dim, HIDDEN), "output": (HIDDEN, SHAPE.num_heads * SHAPE.head_dim)}
        sizes |= {"up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.weights = [
            {name: self.random(layer, *size) / size[1] ** 0.5 for name, size in sizes.items()}
            for layer in range(LAYERS)
        ]
        self.norms = self.random(7, LAYERS, 2, HIDDEN)
        self.head_norms = self.random(8, LAYERS, 2, SHAPE.head_dim)
        self.inputs = self.random(9, REPLAYS, ROWS, HIDDEN)
        self.contexts = self.random(10, REPLAYS, ROWS, LAYERS, 2, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.angles = torch.rand(ROWS, SHAPE.head_dim, device=DEVICE)
        self.slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[: 2 * ROWS].to(DEVICE)
        self.x, self.context = self.inputs[0].clone(), self.contexts[0].clone()
        self.start()

    def random(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=DEVICE).to(self.dtype)

    def start(self) -> None:
        self.out = torch.empty_like(self.x)
        self.cache = torch.zeros(LAYERS, 2, 4, SHAPE.num_kv_heads, 16, SHAPE.head_dim, dtype=self.dtype, device=DEVICE)

    def widened(self, values: Tensor, scale: Tensor) -> Tensor:
        return (values.float() * scale).to(self.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if not self.eight_bits:
            return norm.add_rms_norm(x, residual, weight, 1e-6)
        values, scale, total = fp8.add_rms_norm(x, residual, weight, 1e-6)
        return self.widened(values, scale), total

    def gate(self, gate_up: Tensor) -> Tensor:
        return self.widened(*fp8.silu_mul(gate_up)) if self.eight_bits else activation.silu_mul(gate_up)

    def step(self) -> None:
        """x [R, H] → out [R, H] and the cache. A copy and a fill stand before kernels that overlap."""
        residual = self.x.clone()
        x = torch.zeros_like(residual)
        context_norms = list(self.head_norms[:, 1])  # stacked by the kernel just ahead
        rotary.write_context(self.context, self.angles, SHAPE, self.cache, self.slots[ROWS:], context_norms)
        for layer, weights in enumerate(self.weights):
            normed, residual = self.add_norm(x, residual, self.norms[layer, 0])
            qkv = functional.linear(normed, weights["qkv"])
            q = rotary.split_rotate_write(
                qkv, self.angles, SHAPE, *self.cache[layer], self.slots[:ROWS], *self.head_norms[layer]
            )
            if self.eight_bits:
                q = self.widened(*fp8.quantise_rows(q.flatten(1)))
            x = functional.linear(q.flatten(1), weights["output"])
            normed, residual = self.add_norm(x, residual, self.norms[layer, 1])
            x = functional.linear(self.gate(functional.linear(normed, weights["up"])), weights["down"])
        self.out.copy_(norm.rms_norm(x + residual, self.norms[0, 0], 1e-6))

    def replays(self) -> tuple[Tensor, Tensor]:
        """Rows of every replay [replays, R, H] and a sum of the cache after each; the host waits for none."""
        self.start()
        run = captured(self.step)
        outs, caches = [], []
        for rows, context in zip(self.inputs, self.contexts, strict=True):
            self.x.copy_(rows)
            self.context.copy_(context)
            run()
            outs.append(self.out.clone())
            caches.append(self.cache.flatten(1).view(torch.int16 if self.dtype.itemsize == 2 else torch.int32).sum(1))
        return torch.stack(outs), torch.stack(caches)


@pytest.mark.parametrize("eight_bits", [False, True], ids=["own", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_captured_chain_gives_the_same_bits(
    switch: Callable[[bool], None], dtype: torch.dtype, eight_bits: bool
) -> None:
    with torch.inference_mode():
        chain = Chain(dtype, eight_bits)
        made = []
        for on in (False, True, True):
            switch(on)
            made.append(chain.replays())
    (outs, caches), *overlapped = made
    assert torch.isfinite(outs).all()
    assert outs.float().sum((1, 2)).unique().shape[0] > REPLAYS // 2
    assert caches.unique(dim=0).shape[0] == REPLAYS
    for other_outs, other_caches in overlapped:
        assert torch.equal(other_outs, outs)
        assert torch.equal(other_caches, caches)


def test_a_step_in_company_of_another_stream(switch: Callable[[bool], None]) -> None:
    """A fork and a join in one graph: the kernel after the join sees both sides."""
    made = []
    rows, weight = torch.randn(64, 4096, device=DEVICE), torch.ones(4096, device=DEVICE)
    x, out, side = torch.empty_like(rows), torch.empty_like(rows), torch.cuda.Stream()

    def run() -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            other = norm.rms_norm(x, weight, 1e-6)
            for _ in range(20):
                other = norm.rms_norm(activation.silu_mul(torch.cat([other, other], dim=1)), weight, 1e-6)
        own = norm.rms_norm(x + 1, weight, 1e-6)
        here.wait_stream(side)
        out.copy_(norm.add_rms_norm(own, other, weight, 1e-6)[0])

    with torch.inference_mode():
        for on in (False, True):
            switch(on)
            replay = captured(run)
            outs = []
            for turn in range(REPLAYS):
                x.copy_(rows * (1 + turn / 100))
                replay()
                outs.append(out.sum(dtype=torch.float64))
            made.append((torch.stack(outs), out.clone()))
    (sums, last), (other_sums, other_last) = made
    assert torch.isfinite(sums).all()
    assert torch.equal(sums, other_sums)
    assert torch.equal(last, other_last)
