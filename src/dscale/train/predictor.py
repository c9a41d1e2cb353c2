"""Fit the acceptance predictor to traces (dscale.md §2, Predictor) and report how good it is on prompts it never saw.

Prompts are split by a hash into train, validation and holdout. Loss: binary cross-entropy per position + 0.02 · squared
error of the accepted length. The epoch with the lowest validation loss is kept; standardisation is folded into the
first layer.

    python -m dscale.train.predictor TRACES.npz OUT --drafter models/smollm2-135m-dflash
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dscale.config import require
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.budget import allocate_exact, initial_windows
from dscale.speculation.predictor import Predictor, PredictorConfig, predictor_loss, survival
from dscale.train.traces import Traces

BUDGETS = (4, 5, 6, 7, 8)  # slots a request, anchor included


@dataclass(frozen=True)
class FitConfig:
    """validation and holdout are shares of the prompts; patience counts epochs without a better validation loss."""

    rate: float = 1e-3
    batch: int = 1024
    epochs: int = 60
    patience: int = 6
    weight_decay: float = 1e-3
    validation: float = 0.12
    holdout: float = 0.18
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.rate > 0, f"fit.rate: {self.rate} must be positive")
        require(
            self.batch > 0 and self.epochs > 0, f"fit.batch, fit.epochs: {self.batch}, {self.epochs} must be positive"
        )
        shares = self.validation + self.holdout
        require(
            min(self.validation, self.holdout) > 0 and shares < 1,
            f"fit.validation + fit.holdout: {shares} must be under 1",
        )


def split_by_prompt(prompt: np.ndarray, config: FitConfig) -> dict[str, np.ndarray]:
    """Rows of train, validation and holdout; no prompt is in two of them. prompt [N]."""
    names = np.unique(prompt)
    draw = np.random.default_rng(config.seed).random(len(names))
    place = draw[np.searchsorted(names, prompt)]
    return {
        "holdout": np.flatnonzero(place < config.holdout),
        "validation": np.flatnonzero((place >= config.holdout) & (place < config.holdout + config.validation)),
        "train": np.flatnonzero(place >= config.holdout + config.validation),
    }


def fit(
    traces: Traces, config: PredictorConfig, how: FitConfig, device: str = "cpu"
) -> tuple[Predictor, dict[str, float]]:
    """The predictor of the best epoch, standardisation folded in, and its metrics on the holdout prompts."""
    parts = {name: traces.select(rows) for name, rows in split_by_prompt(traces.prompt, how).items()}
    for name, part in parts.items():
        require(len(part.accepted) > 0, f"traces: no record in {name}; more prompts are needed")
    x = {name: torch.from_numpy(part.features).to(device).float() for name, part in parts.items()}
    y = {name: torch.from_numpy(part.accepted.astype(np.int64)).to(device) for name, part in parts.items()}
    mean, std = x["train"].mean(0), x["train"].std(0, correction=0)
    scaled = {name: ((value - mean) / std.clamp_min(1e-6)).clamp(-12, 12) for name, value in x.items()}
    torch.manual_seed(how.seed)
    predictor = Predictor(config).to(device)
    _train(predictor, scaled, y, how)
    predictor.fold(mean, std)
    with torch.no_grad():
        z = predictor(x["holdout"])
    metrics = quality(z, y["holdout"], how.seed)
    metrics |= {f"records_{name}": float(len(value)) for name, value in y.items()}
    return _with_metrics(predictor, metrics), metrics


def _with_metrics(predictor: Predictor, metrics: dict[str, float]) -> Predictor:
    made = Predictor(replace(predictor.config, metrics=metrics))
    made.load_state_dict(predictor.state_dict())
    return made.eval()


def _train(predictor: Predictor, x: dict[str, Tensor], y: dict[str, Tensor], how: FitConfig) -> None:
    """Epochs with early stopping; leaves the best weights in the predictor."""
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=how.rate, weight_decay=how.weight_decay)
    best, kept, waited = math.inf, copy.deepcopy(predictor.state_dict()), 0
    for _ in range(how.epochs):
        for rows in torch.randperm(len(y["train"])).to(y["train"].device).split(how.batch):
            optimizer.zero_grad()
            predictor_loss(predictor(x["train"][rows]), y["train"][rows]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(predictor_loss(predictor(x["validation"]), y["validation"]))
        if loss < best:
            best, kept, waited = loss, copy.deepcopy(predictor.state_dict()), 0
        else:
            waited += 1
        if waited >= how.patience:
            break
    predictor.load_state_dict(kept)


@torch.no_grad()
def quality(z: Tensor, accepted: Tensor, seed: int = 0) -> dict[str, float]:
    """Metrics of logits z [N, W-1] against accepted [N].

    r2, mae: of the expected accepted length Σ q. retention_…: share of accepted drafts that survive the chosen lengths,
    Σ min(y, k - 1) / Σ y: raw windows, a shared budget for 8 or 32 requests drawn at random, the same width for all,
    and
    the best any allocation could do.
    """
    z, accepted = z.float().cpu(), accepted.cpu()
    q = survival(z)
    length, y = q[:, 1:].sum(-1), accepted.float()
    out = {
        "r2": float(1 - ((length - y) ** 2).sum() / ((y - y.mean()) ** 2).sum().clamp_min(1e-9)),
        "mae": float((length - y).abs().mean()),
        "mean_accepted": float(y.mean()),
        "retention_raw": retention(accepted, initial_windows(q)),
        "slots_raw": float(initial_windows(q).float().mean()),
    }
    truth = (torch.arange(q.shape[1]) <= accepted[:, None]).float()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    for slots in BUDGETS:
        if slots > q.shape[1]:
            continue
        for lanes in (8, 32):
            out[f"retention_{slots}_of_{lanes}"] = _shared(q, accepted, order, slots, lanes)
        out[f"retention_{slots}_oracle"] = _shared(truth, accepted, order, slots, 8)
        out[f"retention_{slots}_fixed"] = retention(accepted, torch.full_like(accepted, slots))
    return {name: round(value, 4) for name, value in out.items()}


def retention(accepted: Tensor, k: Tensor) -> float:
    """Σ min(y, k - 1) / Σ y for accepted y [N] and lengths k [N]."""
    return float(torch.minimum(accepted, k - 1).sum() / accepted.sum().clamp_min(1))


def _shared(q: Tensor, accepted: Tensor, order: Tensor, slots: int, lanes: int, groups: int = 1500) -> float:
    """Retention when `lanes` records at a time share slots · lanes slots."""
    kept = total = 0
    live = torch.ones(lanes, dtype=torch.bool)
    for rows in order.split(lanes)[:groups]:
        if len(rows) < lanes:
            continue
        k = allocate_exact(q[rows], slots * lanes, live)
        kept += int(torch.minimum(accepted[rows], k - 1).sum())
        total += int(accepted[rows].sum())
    return kept / max(1, total)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--width", type=int, default=16)
    asked = parser.parse_args()
    config = PredictorConfig(width=asked.width, drafter_hash=drafter_hash(asked.drafter))
    predictor, metrics = fit(Traces.load(asked.traces), config, FitConfig())
    predictor.save(asked.out)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
