"""A drafter in eight bits, and the target's LM head as it reads drafts. What the target verifies stays as it is, so
rounding costs accepted drafts and never a token.
"""

from __future__ import annotations

import copy

import torch

from dscale.kernels.fp8 import silu_mul_fp8
from dscale.layers.fp8 import Fp8Linear, Fp8Norm
from dscale.layers.linear import Linear
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter


def fp8_drafter(drafter: Drafter) -> Drafter:
    """The same drafter with every projection in eight bits; the one given stays as it is, its norms are shared.

    Hidden rows after the final norm stay in the drafter's dtype. InputError for sizes that the device cannot take.
    """
    if drafter.fp8:
        return drafter
    if drafter.context_projection is None:
        drafter.prepare()
    assert drafter.context_projection is not None
    with torch.device("meta"):
        made = Drafter(drafter.config)
    made.fp8 = True
    parts = {"fc": Fp8Linear(drafter.fc, "the drafter's fc"), "hidden_norm": _norm(drafter.hidden_norm)}
    parts["context_projection"] = Fp8Linear(drafter.context_projection, "the drafter's context projection")
    for name, part in parts.items():
        setattr(made, name, part)
    for own, layer in zip(made.stack.blocks, drafter.stack.blocks, strict=True):
        own.gate = silu_mul_fp8
        for name, norm in (("input_norm", layer.input_norm), ("post_norm", layer.post_norm)):
            setattr(own, name, _norm(norm))
        for name, linear in layer.linears().items():
            setattr(own, name, Fp8Linear(linear, f"the drafter's {name}"))
        own.q_norm, own.k_norm = layer.q_norm, layer.k_norm
    made.stack.norm = drafter.stack.norm
    return made.eval()


def fp8_head(target: Target) -> Target:
    """The target with a copy of its LM head in eight bits, sharing everything else; the one given stays as it is."""
    assert isinstance(target.head, Linear)
    head = Fp8Linear(target.head, "the LM head")
    twin = copy.copy(target)
    twin._modules = {**target._modules, "head": head}
    return twin


def about_bytes(drafter: Drafter, reader: Target) -> str:
    """What the weights in eight bits take, in one line."""
    mine, head = (
        sum(one.bytes for one in model.modules() if isinstance(one, Fp8Linear)) / 2**20 for model in (drafter, reader)
    )
    return f"drafter in fp8: {mine:.2f} MiB of weights, and a copy of the LM head of {head:.2f} MiB"


def _norm(norm: torch.nn.Module) -> Fp8Norm:
    return Fp8Norm(norm.weight, norm.eps)  # type: ignore[arg-type]
