"""Training the predictor's small network: standardised features, AdamW, early stopping, checkpoints that resume."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dscale.speculation.predictor import predictor_loss
from dscale.train.artifacts import write_bytes

CHECKPOINT_EVERY = 5  # epochs
EVALUATE_ROWS = 16384  # rows of one forward pass outside training
BOUND = 12.0  # standardised features are cut here while training: a rare huge logit must not steer an epoch
Progress = Callable[[int, float], None]  # (epochs done, validation loss)


class Settings(Protocol):
    """What training reads of a FitConfig (train/predictor.py)."""

    @property
    def head(self) -> str: ...
    @property
    def hidden_units(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def batch(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def patience(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Examples:
    """features [N, F] float16 or float32, accepted and slots int64 [N], on one device."""

    features: Tensor
    accepted: Tensor
    slots: Tensor

    @classmethod
    def of(cls, features: np.ndarray, accepted: np.ndarray, slots: np.ndarray, device: str) -> Examples:
        """From numpy, copied to the device."""
        x = torch.from_numpy(np.ascontiguousarray(features)).to(device)
        y, k = (torch.from_numpy(part.astype(np.int64)).to(device) for part in (accepted, slots))
        return cls(x, y, k)

    def loss(self, z: Tensor, head: str) -> Tensor:
        """The training loss of logits z [N, W-1]."""
        return predictor_loss(z, self.accepted, self.slots, head)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every feature, float32 [F]; summed in float64, in pieces."""
        count, pieces = len(self.accepted), self.features.split(EVALUATE_ROWS)
        mean = torch.stack([piece.double().sum(0) for piece in pieces]).sum(0) / count
        square = torch.stack([((piece.double() - mean) ** 2).sum(0) for piece in pieces]).sum(0) / count
        return mean.float(), square.sqrt().float()


class Mlp(nn.Module):
    """The predictor's two layers for any number of inputs; parameters have the names that Predictor gives them."""

    def __init__(self, inputs: int, units: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, units), nn.Linear(units, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] → logits [N, W-1]."""
        return self.second(functional.relu(self.first(features)))

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


@dataclass(frozen=True)
class Scale:
    """Standardisation: (features - mean) / std, cut at ±BOUND; mean, std [F] float32."""

    mean: Tensor
    std: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Standardised rows, float32."""
        return ((features.float() - self.mean) / self.std.clamp_min(1e-6)).clamp(-BOUND, BOUND)

    @torch.no_grad()
    def fold(self, network: Mlp) -> None:
        """Make the network take raw features; one that never varied in training gets no weight (Predictor.fold)."""
        varied = self.std > 1e-6 * self.mean.abs().clamp_min(1.0)
        weight = network.first.weight * torch.where(varied, 1.0 / self.std.clamp_min(1e-30), 0.0)
        network.first.bias.sub_(weight @ self.mean)
        network.first.weight.copy_(weight)

    @torch.no_grad()
    def unfold(self, network: Mlp) -> None:
        """The inverse, to go on training: a network of raw features then takes standardised ones."""
        network.first.bias.add_(network.first.weight @ self.mean)
        network.first.weight.mul_(self.std)


@dataclass
class Descent:
    """Where training stands: everything that a checkpoint holds."""

    network: Mlp
    optimizer: torch.optim.Optimizer
    epoch: int = 0
    best: float = math.inf
    waited: int = 0
    kept: dict[str, Tensor] | None = None

    def judge(self, loss: float) -> None:
        """Take note of an epoch's validation loss."""
        self.epoch += 1
        self.waited += 1
        if loss < self.best:
            self.best, self.waited = loss, 0
            self.kept = copy.deepcopy(self.network.state_dict())

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        record: dict[str, Any] = {name: getattr(self, name) for name in ("epoch", "best", "waited", "kept")}
        record |= {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        buffer = io.BytesIO()
        torch.save(record, buffer)
        write_bytes(path, buffer.getvalue())

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; a file that cannot be read is as none: training then starts anew."""
        try:
            record = torch.load(path, map_location=next(self.network.parameters()).device, weights_only=True)
        except Exception:  # torch raises half a dozen types for a damaged file
            return
        self.network.load_state_dict(record["network"])
        self.optimizer.load_state_dict(record["optimizer"])
        self.epoch, self.best, self.waited, self.kept = (record[k] for k in ("epoch", "best", "waited", "kept"))


def train_network(
    train: Examples, validation: Examples, outputs: int, how: Settings, start: Mlp | None = None,
    checkpoint: Path | None = None, progress: Progress | None = None,
) -> Mlp:  # fmt: skip
    """Epochs with early stopping; returns the network of the best epoch, which takes raw features.

    start: go on from this network of raw features. checkpoint: a file that a killed run goes on from, to the same bits
    on a CPU; it is left there. With `start`, the network as it came counts as epoch 0, so it is not made worse on the
    validation prompts.
    """
    scale = Scale(*train.moments())
    state = _begin(train, outputs, how, start, scale)
    if start is not None:
        state.judge(_validation_loss(state.network, scale, validation, how.head))
        state.epoch = 0
    if checkpoint is not None and checkpoint.is_file():
        state.load(checkpoint)
    while state.epoch < how.epochs and state.waited < how.patience:
        _epoch(state, scale, train, how)
        state.judge(_validation_loss(state.network, scale, validation, how.head))
        if progress is not None:
            progress(state.epoch, state.best)
        if checkpoint is not None and state.epoch % CHECKPOINT_EVERY == 0:
            state.save(checkpoint)
    if state.kept is not None:
        state.network.load_state_dict(state.kept)
    scale.fold(state.network)
    return state.network.eval().requires_grad_(False)


def _begin(train: Examples, outputs: int, how: Settings, start: Mlp | None, scale: Scale) -> Descent:
    device = train.features.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        network = Mlp(train.features.shape[1], how.hidden_units, outputs).to(device)
    if start is not None:
        network.load_state_dict(start.state_dict())
        scale.unfold(network)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(network.parameters(), lr=how.rate, weight_decay=how.weight_decay, fused=fused)
    return Descent(network, optimizer)


def _epoch(state: Descent, scale: Scale, train: Examples, how: Settings) -> None:
    """One pass; its order depends on seed and epoch alone, so that a resumed run sees the same one."""
    order = torch.Generator().manual_seed(how.seed * 100_003 + state.epoch)
    for rows in torch.randperm(len(train.accepted), generator=order).to(train.accepted.device).split(how.batch):
        state.optimizer.zero_grad()
        z = state.network(scale(train.features[rows]))
        predictor_loss(z, train.accepted[rows], train.slots[rows], how.head).backward()
        state.optimizer.step()


@torch.no_grad()
def _validation_loss(network: Mlp, scale: Scale, validation: Examples, head: str) -> float:
    z = torch.cat([network(scale(piece)) for piece in validation.features.split(EVALUATE_ROWS)])
    return float(validation.loss(z, head))


@torch.no_grad()
def forward(network: nn.Module, features: Tensor) -> Tensor:
    """Logits [N, W-1] float32 of raw features [N, F], in pieces."""
    return torch.cat([network(piece.float()) for piece in features.split(EVALUATE_ROWS)])


@torch.no_grad()
def merge(members: Sequence[Mlp]) -> Mlp:
    """One network whose logits are the mean of the members': their hidden layers side by side."""
    joined = Mlp(
        members[0].first.in_features, sum(m.first.out_features for m in members), members[0].second.out_features
    )
    joined.first.weight.copy_(torch.cat([member.first.weight for member in members]))
    joined.first.bias.copy_(torch.cat([member.first.bias for member in members]))
    joined.second.weight.copy_(torch.cat([member.second.weight for member in members], dim=1) / len(members))
    joined.second.bias.copy_(torch.stack([member.second.bias for member in members]).mean(0))
    return joined.to(members[0].first.weight.device).eval().requires_grad_(False)
