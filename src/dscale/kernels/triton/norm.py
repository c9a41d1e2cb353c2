"""RMS norm of rows, alone or after a residual add, in Triton; formula and torch version in kernels/norm.py."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_row(
    x, residual, weight, out, total, x_stride, residual_stride, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    own = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = own.to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(own.dtype)  # the residual stream is kept in the model's dtype, and the norm reads that
        tl.store(total + row * size + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / size
    normed = wide * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * size + column, normed.to(own.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels/norm.py: x [..., H] → the same shape and dtype."""
    return _run(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See kernels/norm.py: (norm of x + residual, x + residual), both [..., H]."""
    return _run(x, residual, weight, eps)


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    rows = _rows(x)
    other = rows if residual is None else _rows(residual)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    total = out if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(size)
    if rows.shape[0] > 0:
        _norm_row[(rows.shape[0],)](
            rows, other, weight, out, total, rows.stride(0), other.stride(0), size, eps,
            ADD=residual is not None, BLOCK=block, num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return out.view(x.shape), total.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
