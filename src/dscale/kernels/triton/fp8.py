"""Rows in eight bits, made where the row is made: norm, gate, or as it is; formulas, torch versions in kernels/fp8.py.

One program a row: it is read once, stays in registers while its largest magnitude is found, and is written once.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.triton.norm import _rows


@triton.jit
def _put_row(wide, values, scales, row, size, column, inside):
    """Write a row of float32, zero outside of `inside`, in eight bits with its scale."""
    largest = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-12)
    shrunk = tl.minimum(tl.maximum(wide * (448.0 / largest), -448.0), 448.0)
    tl.store(values + row * size + column, shrunk.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, largest / 448.0)


@triton.jit
def _quantise_row(x, values, scales, x_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    _put_row(wide, values, scales, row, size, column, inside)


@triton.jit
def _norm_row_fp8(
    x, residual, weight, values, scales, total, x_stride, residual_stride, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    own = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = own.to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(own.dtype)  # the residual stream is kept in the model's dtype, and the norm reads that
        tl.store(total + row * size + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / size
    normed = (wide * tl.rsqrt(mean + eps) * gain).to(own.dtype)  # as the torch version, which rounds twice
    _put_row(normed.to(tl.float32), values, scales, row, size, column, inside)


@triton.jit
def _silu_mul_fp8(gate_up, values, scales, stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (opened.to(tl.float32) * up).to(gate.dtype)
    _put_row(product.to(tl.float32), values, scales, row, inner, column, inside)


def _empty(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(rows, 1, dtype=torch.float32, device=device)


def _launch(size: int) -> dict[str, int]:
    """Block and warps for rows of this size: up to 32 warps, because few rows have to fill a chip."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(1, min(32, block // 512))}


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels/fp8.py: x [R, C] → values [R, C], scale [R, 1]."""
    rows = _rows(x)
    values, scale = _empty(rows.shape[0], rows.shape[1], x.device)
    if values.numel() > 0:
        size = rows.shape[1]
        _quantise_row[(rows.shape[0],)](rows, values, scale, rows.stride(0), size, **_launch(size))
    return values, scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See kernels/fp8.py: x [R, H] → values [R, H], scale [R, 1]."""
    return _norm(x, None, weight, eps)[:2]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/fp8.py: values [R, H], scale [R, 1], and x + residual [R, H]."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(x)
    other = rows if residual is None else _rows(residual)
    values, scale = _empty(rows.shape[0], rows.shape[1], x.device)
    total = rows if residual is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
    if values.numel() > 0:
        size = rows.shape[1]
        _norm_row_fp8[(rows.shape[0],)](
            rows, other, weight, values, scale, total, rows.stride(0), other.stride(0), size, eps,
            ADD=residual is not None, **_launch(size),
        )  # fmt: skip
    return values, scale, total


def silu_mul(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels/fp8.py: [R, 2I] → values [R, I], scale [R, 1]."""
    rows = _rows(gate_up)
    inner = rows.shape[1] // 2
    values, scale = _empty(rows.shape[0], inner, rows.device)
    if values.numel() > 0:
        _silu_mul_fp8[(rows.shape[0],)](rows, values, scale, rows.stride(0), inner, **_launch(inner))
    return values, scale
