"""Matrices in eight bits: float8_e4m3fn with a scale for each row, rows made where they arise, and their product.

scale = max |x| of the row / 448        values = x / scale rounded to float8_e4m3fn        x ≈ values · scale
y[r, c] = scale_x[r] · scale_w[c] · Σ_k x.values[r, k] · w.values[c, k] + bias[c]

On a GPU from compute capability 8.9 on the product runs on tensor cores of eight bits. Elsewhere the same rounded
values are multiplied in a wider type: the same drafts up to rounding, and no faster.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dscale.kernels import triton
from dscale.kernels.activation import silu_mul
from dscale.kernels.norm import add_rms_norm, rms_norm

LARGEST = 448.0  # of float8_e4m3fn
LEAST = 1e-12  # a row of smaller numbers is scaled as if this were its largest
MULTIPLE = 16  # tensor cores want both sizes of a weight to be multiples of it


class Fp8Rows(NamedTuple):
    """values [R, C] float8_e4m3fn, scale [R, 1] float32."""

    values: Tensor
    scale: Tensor


@lru_cache
def _has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def on_tensor_cores(x: Tensor) -> bool:
    """Whether the device of this tensor multiplies eight bits itself."""
    return x.is_cuda and _has_fp8(x.device)


def _fused(x: Tensor) -> bool:
    return triton.usable(x) and on_tensor_cores(x)


def quantise_rows_torch(x: Tensor) -> Fp8Rows:
    """The plain version: x [R, C] of any float dtype."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    values = (wide * (LARGEST / largest)).clamp(-LARGEST, LARGEST)
    return Fp8Rows(values.to(torch.float8_e4m3fn), largest / LARGEST)


def quantise_rows(x: Tensor) -> Fp8Rows:
    """Rows x [R, C] in eight bits."""
    if _fused(x):
        from dscale.kernels.triton import fp8

        return Fp8Rows(*fp8.quantise_rows(x))
    return quantise_rows_torch(x)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """kernels.norm.rms_norm of x [R, H], its result in eight bits."""
    if _fused(x):
        from dscale.kernels.triton import fp8

        return Fp8Rows(*fp8.rms_norm(x, weight, eps))
    return quantise_rows(rms_norm(x, weight, eps))


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    """kernels.norm.add_rms_norm of [R, H]: the norm in eight bits, the sum in x's dtype."""
    if _fused(x):
        from dscale.kernels.triton import fp8

        values, scale, total = fp8.add_rms_norm(x, residual, weight, eps)
        return Fp8Rows(values, scale), total
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantise_rows(normed), total


def silu_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    """kernels.activation.silu_mul of [R, 2I], its result [R, I] in eight bits."""
    if _fused(gate_up):
        from dscale.kernels.triton import fp8

        return Fp8Rows(*fp8.silu_mul(gate_up))
    return quantise_rows(silu_mul(gate_up))


def linear_fp8_torch(x: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """The plain version, which adds no bias. Every value of eight bits is exact in dtype; sums would be over float16's
    range."""
    wide = torch.float32 if dtype is torch.float16 else dtype
    sums = functional.linear(x.values.to(wide), weight.values.to(wide)).float()
    return (sums * x.scale * weight.scale.t()).to(dtype)


def linear_fp8(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [R, in] times weight [out, in] plus bias [out] → [R, out] in dtype; on tensor cores rounded to bfloat16 first,
    and out and in have to be multiples of MULTIPLE."""
    if on_tensor_cores(x.values):
        y = torch._scaled_mm(
            x.values, weight.values.t(), scale_a=x.scale, scale_b=weight.scale.t(), out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(dtype)  # fmt: skip
    else:
        y = linear_fp8_torch(x, weight, dtype)
    return y if bias is None else y.add_(bias)
