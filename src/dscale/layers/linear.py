"""A linear layer whose weight may also be kept in the order the CPU kernel reads, or whose rows are independent."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from dscale.kernels import native
from dscale.kernels.linear import linear

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Linear(nn.Module):
    """y = x · weightᵀ + bias for rows x [R, in_features]; weight [out, in] as checkpoints store it.

    deterministic: on a GPU by the kernel whose rows do not depend on each other.
    """

    packed: native.PackedWeight | None = None
    deterministic = False

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.bias)

    def apply_weight(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [R, in_features] times the weight, plus `bias` if given."""
        return linear(x, self.weight, bias, self.packed, self.deterministic)

    def pack(self) -> None:
        """Keep a second copy of the weight for the CPU kernel, where that kernel is at hand; see kernels/native."""
        self.packed = native.pack(self.weight)


def deterministic_twin(model: AnyModule) -> AnyModule:
    """The same model over the same parameters, every linear layer of it deterministic; the one given stays as it is."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    for module in twin.modules():
        if isinstance(module, Linear):
            module.deterministic = True
    return twin
