"""How good predicted survival is on prompts it never saw (measurement.md §6).

    retention = Σ min(y, k - 1) / Σ y         share of accepted drafts y that survive lengths k

q [N, W] float32 is survival as the engine has it: 1 first, nonincreasing. A block that was verified at `slots` rows
says something about positions j < slots only, and every figure here is about those. Retention needs to know where the
target would have stopped, so it is taken over blocks that were verified whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dscale.speculation.budget import initial_windows
from dscale.speculation.features import CONFIDENCE
from dscale.train.traces import Traces

BUDGETS = (4, 5, 6, 7, 8)  # slots a request, anchor included
LANES = (8, 32)  # requests that share a budget
BINS = 10  # of the reliability curve and the calibration error
EXTRA_SLOTS = 2  # the budget where the requirement is checked: mean progress + 2
RESAMPLES = 1000


@dataclass(frozen=True)
class Outcomes:
    """Holdout records: accepted, slots, prompt, workload int64 [N] and the names of the workloads."""

    accepted: Tensor
    slots: Tensor
    prompt: np.ndarray
    workload: np.ndarray
    workloads: tuple[str, ...]
    width: int

    @classmethod
    def of(cls, traces: Traces) -> Outcomes:
        """Of trace records."""
        accepted, slots = (torch.from_numpy(x.astype(np.int64)) for x in (traces.accepted, traces.slots))
        return cls(accepted, slots, traces.prompt, traces.workload, traces.workloads, traces.width)

    def select(self, rows: np.ndarray) -> Outcomes:
        """Some records."""
        at = torch.from_numpy(rows)
        picked = (self.accepted[at], self.slots[at], self.prompt[rows], self.workload[rows])
        return Outcomes(*picked, self.workloads, self.width)

    @property
    def seen(self) -> Tensor:
        """Bool [N, W-1]: position j was verified, had those before it passed."""
        return torch.arange(1, self.width) < self.slots[:, None]

    @property
    def labels(self) -> Tensor:
        """Bool [N, W-1]: the first j drafts passed."""
        return torch.arange(1, self.width) <= self.accepted[:, None]

    @property
    def whole(self) -> np.ndarray:
        """Rows of the blocks that were verified to their end."""
        return np.flatnonzero((self.slots >= self.width).numpy())

    @property
    def required_slots(self) -> int:
        """Mean progress + 2, rounded, within the width."""
        return min(self.width, round(1 + float(self.accepted.float().mean()) + EXTRA_SLOTS))


def length_scores(q: Tensor, outcomes: Outcomes) -> dict[str, float]:
    """r2 and mae of the expected accepted drafts within what was verified, and log_loss, brier over its positions."""
    seen, chance = outcomes.seen, q[:, 1:].double()
    length, y = (chance * seen).sum(-1), outcomes.accepted.double()
    label = outcomes.labels.double()
    inside = chance.clamp(1e-6, 1 - 1e-6)
    surprise = -(label * inside.log() + (1 - label) * torch.log1p(-inside))
    count = seen.sum().clamp_min(1)
    return {
        "r2": float(1 - ((length - y) ** 2).sum() / ((y - y.mean()) ** 2).sum().clamp_min(1e-9)),
        "mae": float((length - y).abs().mean()),
        "mean_accepted": float(y.mean()),
        "log_loss": float((surprise * seen).sum() / count),
        "brier": float(((chance - label) ** 2 * seen).sum() / count),
        "ece": calibration_error(chance[seen], label[seen]),
    }


def reliability(chance: Tensor, label: Tensor, bins: int = BINS) -> list[dict[str, float]]:
    """Equal-width bins of predicted chance [S] against what happened [S]: count, mean chance, rate; empty bins left
    out."""
    bin_of = (chance * bins).long().clamp(0, bins - 1)
    sums = torch.zeros(3, bins, dtype=torch.float64)
    for row, value in enumerate((torch.ones_like(chance), chance, label)):
        sums[row].scatter_add_(0, bin_of, value.double())
    return [
        {"count": int(n), "predicted": float(p / n), "observed": float(o / n)} for n, p, o in sums.T.tolist() if n > 0
    ]


def calibration_error(chance: Tensor, label: Tensor) -> float:
    """Expected calibration error: |mean chance - rate| of each bin, weighted by its count."""
    found = reliability(chance, label)
    total = sum(one["count"] for one in found)
    return sum(one["count"] * abs(one["predicted"] - one["observed"]) for one in found) / max(1, total)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values sharing their mean: float64 [N]."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    end = np.cumsum(count)
    return ((end - count + 1 + end) / 2.0)[inverse.reshape(-1)]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two samples; 0 when one of them is constant."""
    x, y = average_ranks(a), average_ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / size if size > 0 else 0.0


def area_under_curve(chance: np.ndarray, label: np.ndarray) -> float | None:
    """Chance that a passed draft scores above a failed one, ties half (AUC); None when all passed or all failed."""
    passed = int(label.sum())
    failed = len(label) - passed
    if not passed or not failed:
        return None
    ranks = average_ranks(chance)[label.astype(bool)].sum()
    return float((ranks - passed * (passed + 1) / 2) / (passed * failed))


def position_scores(q: Tensor, outcomes: Outcomes) -> list[dict[str, Any]]:
    """For each position j = 1 … W-1: how often it was verified and passed, Brier, calibration error, AUC, curve."""
    made: list[dict[str, Any]] = []
    seen, labels = outcomes.seen, outcomes.labels
    for j in range(1, outcomes.width):
        rows = seen[:, j - 1]
        chance, label = q[rows, j].double(), labels[rows, j - 1].double()
        if not len(chance):
            continue
        made.append(
            {
                "position": j,
                "count": len(chance),
                "rate": float(label.mean()),
                "brier": float(((chance - label) ** 2).mean()),
                "ece": calibration_error(chance, label),
                "auc": area_under_curve(chance.numpy(), label.numpy()),
                "reliability": reliability(chance, label),
            }
        )
    return made


def signal_correlations(traces: Traces) -> dict[str, float]:
    """Spearman of two simple signals with the accepted length: mean gap of the best two logits, mean entropy."""
    if "confidence" not in traces.groups:
        return {}
    drafts = traces.width - 1
    table = traces.features[:, : drafts * CONFIDENCE].reshape(-1, drafts, CONFIDENCE).astype(np.float32)
    accepted = traces.accepted.astype(np.float64)
    return {
        "mean_gap": spearman(table[:, :, 1].mean(1), accepted),
        "mean_entropy": spearman(table[:, :, CONFIDENCE - 1].mean(1), accepted),
    }


def shared_lengths(q: Tensor, total: int, allocation: str = "exact") -> Tensor:
    """k [G, L] int64 of G groups of L requests that share `total` slots each: speculation/budget.py, G at once.

    q [G, L, W]. allocation: "exact" or "seeded".
    """
    groups, lanes, width = q.shape
    total = min(max(total, lanes), lanes * width)
    if allocation == "exact":
        scores = q[..., 1:].transpose(1, 2).reshape(groups, -1)
        owners = torch.arange(lanes).repeat(width - 1)
        return 1 + _owned(scores, owners, torch.full((groups,), total - lanes), lanes)
    start = initial_windows(q.reshape(-1, width)).view(groups, lanes)
    missing = total - start.sum(1)
    position, owners = torch.arange(width), torch.arange(lanes).repeat_interleave(width)
    can_grow = position >= start[..., None]
    can_drop = (position >= 1) & ~can_grow
    grown = _owned(q.masked_fill(~can_grow, -1.0).reshape(groups, -1), owners, missing, lanes)
    lowest = (-q).masked_fill(~can_drop, -2.0).flip(-1).reshape(groups, -1)
    return start + grown - _owned(lowest, owners, -missing, lanes)


def _owned(scores: Tensor, owners: Tensor, count: Tensor, lanes: int) -> Tensor:
    """How many of each row's `count` highest scores each lane owns: [G, lanes] int64."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    taken = (torch.arange(scores.shape[1]) < count[:, None]).long()
    return torch.zeros(len(scores), lanes, dtype=torch.int64).scatter_add_(1, owners[order], taken)


@dataclass(frozen=True)
class Shared:
    """Lengths k [R] of the records `rows` [R] when groups of requests, drawn at random, share a budget."""

    rows: Tensor
    k: Tensor

    def kept(self, accepted: Tensor) -> Tensor:
        """Accepted drafts that survive, [R]."""
        return torch.minimum(accepted[self.rows], self.k - 1)

    def retention(self, accepted: Tensor) -> float:
        """Σ min(y, k - 1) / Σ y."""
        return float(self.kept(accepted).sum() / accepted[self.rows].sum().clamp_min(1))


def share(q: Tensor, slots: float, lanes: int, allocation: str = "exact", seed: int = 0) -> Shared:
    """Groups of `lanes` records share round(slots · lanes); records left over by the last group are not used."""
    lanes = min(lanes, len(q))
    order = torch.randperm(len(q), generator=torch.Generator().manual_seed(seed))
    order = order[: len(q) // lanes * lanes]
    k = shared_lengths(q[order].view(-1, lanes, q.shape[1]), round(slots * lanes), allocation)
    return Shared(order, k.reshape(-1))


def retention(accepted: Tensor, k: Tensor) -> float:
    """Σ min(y, k - 1) / Σ y for accepted y [N] and lengths k [N]."""
    return float(torch.minimum(accepted, k - 1).sum() / accepted.sum().clamp_min(1))


def retention_scores(q: Tensor, outcomes: Outcomes, budgets: tuple[int, ...]) -> dict[str, float]:
    """Raw windows, then per budget: shared among 8 or 32 (exact, seeded), a fixed width, the best possible (oracle)."""
    accepted, width = outcomes.accepted, outcomes.width
    windows = initial_windows(q)
    out = {"retention_raw": retention(accepted, windows), "slots_raw": float(windows.float().mean())}
    truth = (torch.arange(width) <= accepted[:, None]).float()
    for slots in (slots for slots in budgets if slots <= width):
        for lanes in LANES:
            out[f"retention_{slots}_of_{lanes}"] = share(q, slots, lanes).retention(accepted)
            out[f"retention_{slots}_of_{lanes}_seeded"] = share(q, slots, lanes, "seeded").retention(accepted)
            out[f"retention_{slots}_of_{lanes}_oracle"] = share(truth, slots, lanes).retention(accepted)
        out[f"retention_{slots}_fixed"] = retention(accepted, torch.full_like(accepted, slots))
    return out


def quality(q: Tensor, outcomes: Outcomes, slots: int | None = None) -> dict[str, float]:
    """Flat metrics of survival q [N, W]: length_scores, then retention over whole blocks where there are any.

    slots: a budget beside BUDGETS, default the required one.
    """
    scores = length_scores(q, outcomes)
    rows = outcomes.whole
    if len(rows):
        whole = outcomes.select(rows)
        budgets = tuple(sorted({*BUDGETS, slots or whole.required_slots}))
        scores |= retention_scores(q[torch.from_numpy(rows)], whole, budgets)
    return {name: round(value, 4) for name, value in scores.items()}


def by_workload(q: Tensor, outcomes: Outcomes, slots: int | None = None) -> dict[str, dict[str, float]]:
    """quality of each workload that has records; groups share budgets within the workload."""
    made = {}
    for number, name in enumerate(outcomes.workloads):
        rows = np.flatnonzero(outcomes.workload == number)
        if len(rows):
            made[name] = quality(q[torch.from_numpy(rows)], outcomes.select(rows), slots)
            made[name]["records"] = len(rows)
    return made


def requirement(scores: dict[str, float], slots: int) -> dict[str, Any] | None:
    """What issue 3 asks for: R² ≥ 0.65, and at mean progress + 2 slots 95% retained and 8 points over a fixed width.

    None where no block was verified whole.
    """
    if f"retention_{slots}_fixed" not in scores:
        return None
    fixed = scores[f"retention_{slots}_fixed"]
    made: dict[str, Any] = {"slots": slots, "r2": scores["r2"], "r2_met": scores["r2"] >= 0.65, "fixed": fixed}
    for lanes in LANES:
        kept = scores[f"retention_{slots}_of_{lanes}"]
        made[f"shared_of_{lanes}"] = kept
        made[f"points_over_fixed_of_{lanes}"] = round(100 * (kept - fixed), 2)
        made[f"retention_met_of_{lanes}"] = kept >= 0.95 and kept - fixed >= 0.08
    return made
