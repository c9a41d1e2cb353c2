"""RMS norm, alone and fused with the residual add before it.

normed = x · rsqrt(mean(x², last dim) + eps) · weight          (computed in float32, returned in x's dtype)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.kernels import native, triton


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain version: x [..., H], weight [H]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows of x [R, H]; same dtype out."""
    if native.usable(x):
        return native.rms_norm(x, weight, eps)
    if triton.usable(x):
        from dscale.kernels.triton import norm

        return norm.rms_norm(x, weight, eps)
    return rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [R, H]; the sum is rounded to x's dtype before the norm."""
    if native.usable(x):
        return native.add_rms_norm(x, residual, weight, eps)
    if triton.usable(x):
        from dscale.kernels.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm_torch(total, weight, eps), total
