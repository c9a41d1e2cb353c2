"""Fit the acceptance predictor to traces (dscale.md §2, Predictor).

Prompts are split by a hash of their id into train, validation and holdout, so a prompt stays in its part when traffic
is added. Loss: predictor_loss (speculation/predictor.py), which knows of blocks that were not verified to their end.
The epoch with the lowest validation loss is kept; standardisation is folded into the first layer.

    dscale fit TRACES OUT --drafter models/smollm2-135m-dflash
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dscale.config import require
from dscale.speculation.features import GROUPS, feature_size
from dscale.speculation.predictor import HEADS, Predictor, PredictorConfig
from dscale.train.network import Examples, Mlp, Progress, forward, merge, train_network
from dscale.train.traces import Traces

PARTS = ("train", "validation", "holdout")


@dataclass(frozen=True)
class FitConfig:
    """How to fit. validation and holdout are shares of the prompts; patience counts epochs without a better
    validation loss; features are groups of speculation/features.py; members are networks whose logits are averaged
    into one of members · hidden_units units."""

    features: tuple[str, ...] = ("confidence", "context")
    head: str = "survival"
    hidden_units: int = 64
    members: int = 1
    rate: float = 1e-3
    batch: int = 1024
    epochs: int = 60
    patience: int = 6
    weight_decay: float = 1e-3
    validation: float = 0.12
    holdout: float = 0.18
    seed: int = 0

    def __post_init__(self) -> None:
        known = tuple(group for group in GROUPS if group in self.features)
        require(
            len(known) == len(self.features) > 0,
            f"fit.features: {', '.join(self.features) or 'none'}; allowed are {', '.join(GROUPS)}",
        )
        object.__setattr__(self, "features", known)
        require(self.head in HEADS, f"fit.head: {self.head!r}; allowed are {', '.join(HEADS)}")
        for name in ("hidden_units", "members", "batch", "epochs", "patience"):
            require(getattr(self, name) > 0, f"fit.{name}: {getattr(self, name)} must be positive")
        require(self.rate > 0 and math.isfinite(self.rate), f"fit.rate: {self.rate} must be positive")
        require(self.weight_decay >= 0, f"fit.weight_decay: {self.weight_decay} must not be negative")
        shares = self.validation + self.holdout
        require(
            min(self.validation, self.holdout) > 0 and shares < 1,
            f"fit.validation, fit.holdout: {self.validation}, {self.holdout} must be positive, together under 1",
        )


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_units": 16, "batch": 128, "epochs": 8, "patience": 4},
    "full": {},
}


def prompt_places(prompt: np.ndarray, seed: int) -> np.ndarray:
    """float64 in [0, 1) of prompt ids int64 [N]: a hash of id and seed (SplitMix64), the same on any machine."""
    with np.errstate(over="ignore"):
        x = prompt.astype(np.int64).view(np.uint64) + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def split_by_prompt(prompt: np.ndarray, config: FitConfig) -> dict[str, np.ndarray]:
    """Rows of train, validation and holdout; no prompt is in two of them. prompt int64 [N].

    A handful of prompts may leave a part empty: it then takes the prompt whose hash is nearest. InputError below three.
    """
    names = np.unique(prompt)
    require(len(names) >= 3, f"traces: {len(names)} prompts; train, validation and holdout need three at least")
    place = prompt_places(names, config.seed)
    order = np.argsort(place, kind="stable")
    held = int((place < config.holdout).sum())
    checked = int((place < config.holdout + config.validation).sum())
    held = min(max(held, 1), len(names) - 2)
    checked = min(max(checked, held + 1), len(names) - 1)
    part = np.zeros(len(names), np.int64)
    part[order[:held]], part[order[held:checked]] = 2, 1
    of_row = part[np.searchsorted(names, prompt)]
    return {name: np.flatnonzero(of_row == number) for number, name in enumerate(PARTS)}


def columns_of(width: int, stored: tuple[str, ...], wanted: tuple[str, ...]) -> np.ndarray:
    """Columns of `wanted` groups in feature rows that hold the groups `stored`; InputError when one is not there."""
    missing = [group for group in wanted if group not in stored]
    require(not missing, f"traces: hold {', '.join(stored)}; {', '.join(missing)} wanted; trace with these groups")
    found, at = [], 0
    for group in (group for group in GROUPS if group in stored):
        size = feature_size(width, (group,))
        found += [np.arange(at, at + size)] * (group in wanted)
        at += size
    return np.concatenate(found)


@dataclass(frozen=True)
class Fitted:
    """network takes raw feature rows (with any extra columns); splits: rows of each part; z [H, W-1] float32 on the
    CPU: its logits of the holdout."""

    network: Mlp
    splits: dict[str, np.ndarray]
    z: torch.Tensor


def fit_network(
    traces: Traces, config: FitConfig, device: str = "cpu", start: Mlp | None = None, extra: np.ndarray | None = None,
    checkpoint: Path | None = None, progress: Progress | None = None,
) -> Fitted:  # fmt: skip
    """Fit config.members networks and join them; extra float [N, E] are columns put behind the features.

    checkpoint: a file name that killed fits go on from, one per member (".0", ".1", … is appended).
    """
    splits = split_by_prompt(traces.prompt, config)
    columns = columns_of(traces.width, traces.groups, config.features)
    parts = {name: examples_of(traces, rows, columns, extra, device) for name, rows in splits.items()}
    members = []
    for member in range(config.members):
        file = checkpoint.with_name(f"{checkpoint.name}.{member}") if checkpoint is not None else None
        seeded = replace(config, seed=config.seed + member)
        members.append(
            train_network(parts["train"], parts["validation"], traces.width - 1, seeded, start, file, progress)
        )
    network = merge(members) if len(members) > 1 else members[0]
    return Fitted(network, splits, forward(network, parts["holdout"].features).cpu())


def examples_of(
    traces: Traces, rows: np.ndarray, columns: np.ndarray, extra: np.ndarray | None, device: str
) -> Examples:
    """The records of some rows on a device, with the wanted columns and any extra ones."""
    whole = len(columns) == traces.features.shape[1]
    features = traces.features[rows] if whole else traces.features[np.ix_(rows, columns)]
    if extra is not None:
        features = np.concatenate([features, extra[rows].astype(np.float16)], axis=1)
    return Examples.of(features, traces.accepted[rows], traces.slots[rows], device)


def predictor_of(network: Mlp, config: PredictorConfig) -> Predictor:
    """A predictor, on the CPU, with the weights of a fitted network."""
    predictor = Predictor(config)
    predictor.load_state_dict({name: value.cpu() for name, value in network.state_dict().items()})
    return predictor.eval().requires_grad_(False)


def network_of(predictor: Predictor) -> Mlp:
    """A predictor's weights as a network that training can start from."""
    config = predictor.config
    network = Mlp(config.feature_size, config.hidden_units, config.width - 1)
    network.load_state_dict(predictor.state_dict())
    return network
