"""SiLU gate: silu(gate) · up, with gate and up side by side in one row as the fused projection leaves them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from dscale.kernels import native, triton


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """The plain version: gate_up [..., 2I] → [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second half: [R, 2I] → [R, I]."""
    if native.usable(gate_up):
        return native.silu_mul(gate_up)
    if triton.usable(gate_up):
        from dscale.kernels.triton import activation

        return activation.silu_mul(gate_up)
    return silu_mul_torch(gate_up)
