"""Norm, gate, rotary, cache writes, top logits in Triton against plain torch: on the GPU, or interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dscale.kernels import activation, norm, rotary, top_logits

pytest.importorskip("triton", reason="the triton package is not installed")

from dscale.kernels.triton import activation as fast_activation
from dscale.kernels.triton import norm as fast_norm
from dscale.kernels.triton import rotary as fast_rotary
from dscale.kernels.triton import top_logits as fast_top

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bfloat16
DTYPES = (torch.float32, HALF)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def check(fast: Tensor, plain: Tensor) -> None:
    """Equal but for one rounding of the dtype."""
    assert fast.dtype is plain.dtype
    assert fast.shape == plain.shape
    rtol = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[plain.dtype]
    torch.testing.assert_close(fast, plain, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (5, 40), (3, 576)])
def test_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (random(rows, size, dtype=dtype, seed=seed) for seed in range(3))
    check(fast_norm.rms_norm(x, weight[0], 1e-6), norm.rms_norm_torch(x, weight[0], 1e-6))
    normed, total = fast_norm.add_rms_norm(x, residual, weight[0], 1e-6)
    check(normed, norm.rms_norm_torch(x + residual, weight[0], 1e-6))
    check(total, x + residual)


def test_norm_of_rows_that_are_not_contiguous() -> None:
    wide = random(4, 3, 16)
    check(fast_norm.rms_norm(wide[:, 1], wide[0, 0], 1e-5), norm.rms_norm_torch(wide[:, 1], wide[0, 0], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 8), (3, 1500)])
def test_gate(rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * inner, dtype=dtype)
    check(fast_activation.silu_mul(gate_up), activation.silu_mul_torch(gate_up))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "kv", "size", "dtype"), [(4, 2, 16, DTYPES[0]), (9, 3, 24, DTYPES[1])])
def test_rotary_and_cache(heads: int, kv: int, size: int, dtype: torch.dtype, interleaved: bool, normed: bool) -> None:
    shape = rotary.HeadShape(heads, kv, size, interleaved)
    qkv, angles = random(7, (heads + 2 * kv) * size, dtype=dtype), random(7, size)
    norms = (random(size, dtype=dtype), random(size, dtype=dtype, seed=1)) if normed else (None, None)
    fast_cache = random(2, 2, 5, kv, 4, size, dtype=dtype)
    plain_cache = fast_cache.clone()
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:7].to(DEVICE)
    q = fast_rotary.split_rotate_write(qkv, angles, shape, *fast_cache[1], slots, *norms)
    plain_q, k, v = rotary.split_rotate(qkv, angles, shape, *norms)
    rotary.write_cache(k, v, *plain_cache[1], slots)
    check(q, plain_q)
    check(fast_cache, plain_cache)  # what was not written is as before


@pytest.mark.parametrize("normed", [False, True])
def test_context_of_all_layers(normed: bool) -> None:
    layers, kv, size = 3, 2, 16
    shape = rotary.HeadShape(4, kv, size)
    rows, angles = random(6, layers, 2, kv, size), random(6, size)
    norms = list(random(layers, size)) if normed else None
    fast_cache = random(layers, 2, 5, kv, 4, size)
    plain_cache = fast_cache.clone()
    slots = torch.tensor([3, 19, 4, 0, 11, 8], device=DEVICE)
    fast_rotary.write_context(rows, angles, shape, fast_cache, slots, norms)
    rotary.write_context_torch(rows, angles, shape, plain_cache, slots, norms)
    check(fast_cache, plain_cache)


def in_order(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The 16 highest in the order (logit downwards, id upwards)."""
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :16], ids[:, :16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [16, 300, 8192 + 8192 + 3])
def test_top_logits(vocab: int, dtype: torch.dtype) -> None:
    logits = random(3, vocab, dtype=dtype) * 3
    logits[0, 5] = -torch.inf
    values, ids, log_sum_exp, entropy = fast_top.top_logits(logits)
    _, _, plain_sum, plain_entropy = top_logits.top_logits_torch(logits)
    expected_values, expected_ids = in_order(logits)
    assert torch.equal(values, expected_values)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(log_sum_exp, plain_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, plain_entropy, rtol=1e-4, atol=1e-4)
    assert torch.equal(fast_top.argmax(logits), expected_ids[:, 0])


@pytest.mark.parametrize("kind", ["equal", "two levels", "neighbours", "zeros"])
def test_ties_go_to_the_lowest_ids(kind: str) -> None:
    logits = torch.zeros(1, 9000, device=DEVICE)
    if kind == "two levels":
        logits[0, 8500:] = 1.0
    if kind == "neighbours":  # the best all stand in one group of pass 1, the others behind them
        logits[0, 400:416] = torch.arange(16.0, device=DEVICE) // 4 + 1
    if kind == "zeros":
        logits[0, ::2] = -0.0
    values, ids, *_ = fast_top.top_logits(logits)
    expected_values, expected_ids = in_order(logits)
    assert torch.equal(values, expected_values)
    assert torch.equal(ids, expected_ids)
    assert fast_top.argmax(logits).tolist() == [int(expected_ids[0, 0])]


def test_a_row_depends_on_itself_alone() -> None:
    logits = random(5, 9000)
    together, alone = fast_top.top_logits(logits), fast_top.top_logits(logits[3:4])
    for every, one in zip(together, alone, strict=True):
        assert torch.equal(every[3:4], one)
