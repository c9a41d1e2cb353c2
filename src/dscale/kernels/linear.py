"""Matrix product of few rows with a weight: y = x · weightᵀ + bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dscale.kernels import native, triton

PADDED_ROWS = 4  # on a CPU in bf16 one row takes the slow path of the library: four rows are faster


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain version: x [R, in], weight [out, in], bias [out] → [R, out]."""
    rows = x.shape[0]
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and rows < PADDED_ROWS and not torch.is_grad_enabled():
        padded = x.new_zeros(PADDED_ROWS, x.shape[1])
        padded[:rows] = x
        return functional.linear(padded, weight, bias)[:rows]
    return functional.linear(x, weight, bias)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packed: native.PackedWeight | None = None,
    deterministic: bool = False,
) -> Tensor:
    """x [R, in] times weight [out, in] plus bias. packed is the same weight in the CPU kernel's order, where made.

    deterministic, on a GPU: the bits of a row do not depend on the other rows or on their number.
    """
    if packed is not None and native.usable(x) and x.shape[0] <= packed.max_rows:
        return native.linear(x, packed, bias)
    if deterministic and triton.usable(x):
        from dscale.kernels.triton import linear as invariant

        return invariant.linear(x, weight, bias)
    return linear_torch(x, weight, bias)
