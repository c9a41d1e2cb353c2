"""Layers of a drafter whose weights are kept in eight bits (kernels/fp8.py). Only drafts pass through them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dscale.config import require
from dscale.kernels.fp8 import (
    MULTIPLE,
    Fp8Rows,
    add_rms_norm_fp8,
    linear_fp8,
    on_tensor_cores,
    quantise_rows,
    rms_norm_fp8,
)
from dscale.layers.linear import Linear


class Fp8Linear(nn.Module):
    """A linear layer's weight [out, in] in eight bits, its bias and the dtype of its output as they were.

    InputError, with the layer's name, for inputs that the device's tensor cores cannot take.
    """

    packed = None  # the CPU kernels know no eight bits
    values: Tensor
    scale: Tensor

    def __init__(self, linear: Linear, name: str) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.dtype, self.out_features, self.bias = weight.dtype, weight.shape[0], linear.bias
        if on_tensor_cores(weight):
            require(
                weight.shape[1] % MULTIPLE == 0,
                f"draft_weights: fp8 needs inputs in multiples of {MULTIPLE}; {name} has {weight.shape[1]}",
            )
            missing = -weight.shape[0] % MULTIPLE
            weight = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
        with torch.no_grad():
            values, scale = quantise_rows(weight)
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    @property
    def weight(self) -> Fp8Rows:
        """values [out, in] and scale [out, 1], out rounded up where tensor cores want it."""
        return Fp8Rows(self.values, self.scale)

    @property
    def bytes(self) -> int:
        """Of the weight and its scales."""
        return sum(one.numel() * one.element_size() for one in self.weight)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """Rows [R, in], in eight bits already or not → [R, out]."""
        rows = x if isinstance(x, Fp8Rows) else quantise_rows(x)
        if self.out_features == self.values.shape[0]:
            return linear_fp8(rows, self.weight, self.bias, self.dtype)
        y = linear_fp8(rows, self.weight, None, self.dtype)[:, : self.out_features].contiguous()
        return y if self.bias is None else y.add_(self.bias)


class Fp8Norm(nn.Module):
    """An RMS norm whose rows go on in eight bits; weight [size]."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Fp8Rows:
        return rms_norm_fp8(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Fp8Rows, Tensor]:
        """(norm of x + residual, x + residual)."""
        return add_rms_norm_fp8(x, residual, self.weight, self.eps)
