"""SiLU gate in Triton; formula and torch version in kernels/activation.py."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, inner, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded here, as the torch version does
    tl.store(out + row * inner + column, (opened.to(tl.float32) * up).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See kernels/activation.py: [..., 2I] → [..., I]."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    inner = rows.shape[1] // 2
    out = torch.empty(rows.shape[0], inner, dtype=rows.dtype, device=rows.device)
    if out.numel() > 0:
        grid = (rows.shape[0], triton.cdiv(inner, BLOCK))
        _silu_mul[grid](rows, out, inner, rows.stride(0), BLOCK=BLOCK, num_warps=4)
    return out.view(*gate_up.shape[:-1], inner)
