"""AdamW, or Muon for the matrices and AdamW for the rest.

Muon (Jordan 2024; scaling of Moonlight, arXiv 2502.16982): the momentum of a matrix is replaced by the nearest
semi-orthogonal matrix (five Newton-Schulz turns) and scaled to the size an AdamW step has,
so both share one
learning rate. Fused projections are split into the matrices they hold, and equal shapes go through together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dscale.config import require
from dscale.models.decoder import DecoderLayer
from dscale.models.drafter import Drafter

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, turns: int = 5) -> Tensor:
    """Batch of matrices [N, m, n] → roughly the nearest semi-orthogonal ones; bfloat16 on CUDA, else float32."""
    a, b, c = NEWTON_SCHULZ
    y = x.bfloat16() if x.is_cuda else x.float()
    tall = y.shape[1] > y.shape[2]
    y = y.transpose(1, 2) if tall else y
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(turns):
        gram = y @ y.transpose(1, 2)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.transpose(1, 2) if tall else y


def muon_update(gradient: Tensor, momentum: Tensor, beta: float) -> Tensor:
    """Gradients [N, m, n] and their running momentum (changed in place) → the step [N, m, n] before the learning "
    "rate."""
    momentum.lerp_(gradient, 1 - beta)
    step = orthogonalise(gradient.lerp(momentum, beta))
    return step * (0.2 * max(gradient.shape[1:]) ** 0.5)


def matrices(drafter: Drafter) -> list[tuple[nn.Parameter, int, int]]:
    """(parameter, first row, rows) of every matrix, fused projections split."""
    decoder = drafter.config.decoder
    q, kv, inner = (
        decoder.num_heads * decoder.head_dim,
        decoder.num_kv_heads * decoder.head_dim,
        decoder.intermediate_size,
    )
    found = [(drafter.fc.weight, 0, decoder.hidden_size)]
    layers: list[DecoderLayer] = list(drafter.stack.layers)  # type: ignore[arg-type]
    for layer in layers:
        found += [(layer.qkv.weight, 0, q), (layer.qkv.weight, q, kv), (layer.qkv.weight, q + kv, kv)]
        found += [(layer.gate_up.weight, 0, inner), (layer.gate_up.weight, inner, inner)]
        found += [(layer.output.weight, 0, decoder.hidden_size), (layer.down.weight, 0, decoder.hidden_size)]
    return found


class Optimizer:
    """One step for all trained parameters. kind: adamw or muon."""

    def __init__(self, drafter: Drafter, kind: str, betas: tuple[float, float], compiled: bool = False) -> None:
        require(kind in ("adamw", "muon"), f"optimizer: {kind!r} is not known; allowed are adamw, muon")
        trained = [p for p in drafter.parameters() if p.requires_grad]
        fused = trained[0].is_cuda
        self.groups: dict[tuple[int, int], list[tuple[nn.Parameter, int, int]]] = defaultdict(list)
        if kind == "muon":
            for parameter, start, rows in matrices(drafter):
                self.groups[rows, parameter.shape[1]].append((parameter, start, rows))
            taken = {id(p) for group in self.groups.values() for p, _, _ in group}
            trained = [p for p in trained if id(p) not in taken]
        self.adamw = torch.optim.AdamW(trained, lr=0.0, betas=betas, eps=1e-8, weight_decay=0.0, fused=fused)
        self.beta = betas[1] if kind == "adamw" else 0.95
        self.momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0][0].device) for shape, group in self.groups.items()
        }
        self.update = torch.compile(muon_update, dynamic=False) if compiled else muon_update

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients at this learning rate and drop them."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        for shape, members in self.groups.items():
            gradient = torch.stack([p.grad[start : start + rows] for p, start, rows in members])  # type: ignore[index]
            step = self.update(gradient, self.momentum[shape], self.beta)
            views: Iterable[Tensor] = [p[start : start + rows] for p, start, rows in members]
            torch._foreach_add_(list(views), list(step.to(gradient.dtype).unbind(0)), alpha=-rate)
        self.adamw.zero_grad(set_to_none=True)
        for parameter in {id(p): p for group in self.groups.values() for p, _, _ in group}.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "momentum": list(self.momentum.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for held, saved in zip(self.momentum.values(), state["momentum"], strict=True):
            held.copy_(saved)
