"""Rows in eight bits: the plain version against float64, the Triton kernels against it (interpreted on a CPU)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dscale.kernels import fp8, norm
from dscale.kernels.activation import silu_mul_torch
from dscale.kernels.fp8 import Fp8Rows, linear_fp8, quantise_rows_torch
from tests.kernels.exact import round_as_a_chip

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter truncates to bfloat16
DTYPES = (torch.float32, HALF)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch):
    """The Triton kernels."""
    pytest.importorskip("triton", reason="the triton package is not installed")
    if ON_GPU and not fp8.on_tensor_cores(torch.empty(1, device=DEVICE)):
        pytest.skip("this GPU has no eight bits")
    from dscale.kernels.triton import fp8 as kernels

    round_as_a_chip(monkeypatch)
    return kernels


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def widened(rows: Fp8Rows) -> Tensor:
    return rows.values.double() * rows.scale.double()


def check(made: Fp8Rows, plain: Fp8Rows) -> None:
    """Equal but for values that lie between two of eight bits; those are a step of 1/8 apart."""
    assert made.values.dtype is torch.float8_e4m3fn
    assert made.values.shape == plain.values.shape
    assert made.scale.shape == plain.scale.shape == (plain.values.shape[0], 1)
    torch.testing.assert_close(made.scale, plain.scale, rtol=1e-2 if HALF is torch.bfloat16 else 2e-3, atol=0)
    near = float(plain.scale.max()) * 2.0**-8  # a step of the smallest numbers
    torch.testing.assert_close(widened(made), widened(plain), rtol=0.13, atol=near)
    assert (made.values.float() != plain.values.float()).float().mean() < 0.03


def test_rounding_is_within_half_a_step() -> None:
    x = random(40, 70) * torch.logspace(-6, 6, 40, device=DEVICE)[:, None]
    rows = quantise_rows_torch(x)
    assert torch.equal(rows.values.float().abs().amax(-1), torch.full((40,), 448.0, device=DEVICE))
    error = (widened(rows) - x.double()).abs()
    bound = torch.maximum(x.double().abs() * 2.0**-4, rows.scale.double() * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all()
    assert (error > bound / 4).any()


def test_rows_of_zeros_and_single_large_numbers_stay_finite() -> None:
    x = torch.zeros(3, 16, device=DEVICE)
    x[1, 3], x[2, 0] = -3e38, 1e-30
    rows = quantise_rows_torch(x)
    assert torch.isfinite(rows.values.float()).all()
    assert torch.equal(widened(rows)[0], torch.zeros(16, dtype=torch.float64, device=DEVICE))
    assert float(widened(rows)[1, 3]) == pytest.approx(-3e38, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_product_is_that_of_the_rounded_rows(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(rows, 96), random(64, 96, seed=1) / 10, random(64, seed=2).to(dtype)
    a, b = quantise_rows_torch(x), quantise_rows_torch(weight)
    y = linear_fp8(a, b, bias, dtype)
    assert y.dtype is dtype
    want = widened(a) @ widened(b).T
    loose = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[torch.bfloat16 if ON_GPU else dtype]
    torch.testing.assert_close(y.double(), want + bias.double(), rtol=loose, atol=4 * loose)
    torch.testing.assert_close(linear_fp8(a, b, None, dtype).double(), want, rtol=loose, atol=4 * loose)
    exact = x.double() @ weight.double().T
    assert 0.005 < (want - exact).norm() / exact.norm() < 0.06


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 40), (3, 576)])
def test_quantised_rows(fast, rows: int, size: int, dtype: torch.dtype) -> None:
    x = random(rows, size, dtype=dtype)
    check(Fp8Rows(*fast.quantise_rows(x)), quantise_rows_torch(x))
    wide = random(rows, 2, size, dtype=dtype)[:, 1]
    check(Fp8Rows(*fast.quantise_rows(wide)), quantise_rows_torch(wide))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 40), (3, 576)])
def test_norms(fast, rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (random(rows, size, dtype=dtype, seed=seed) for seed in range(3))
    plain = quantise_rows_torch(norm.rms_norm_torch(x, weight[0], 1e-6))
    check(Fp8Rows(*fast.rms_norm(x, weight[0], 1e-6)), plain)
    values, scale, total = fast.add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(total, x + residual)
    check(Fp8Rows(values, scale), quantise_rows_torch(norm.rms_norm_torch(x + residual, weight[0], 1e-6)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 16), (3, 1504)])
def test_gate(fast, rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * inner, dtype=dtype)
    check(Fp8Rows(*fast.silu_mul(gate_up)), quantise_rows_torch(silu_mul_torch(gate_up)))


def test_no_rows(fast) -> None:
    values, scale = fast.quantise_rows(torch.empty(0, 32, device=DEVICE))
    assert values.shape == (0, 32)
    assert scale.shape == (0, 1)
