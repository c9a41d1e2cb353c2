"""Predictors compared on the same splits and seeds: feature groups, heads, sizes, and features that are not served.

base      confidence + context, the predictor that is shipped
full      all groups, 1735 features for W = 16 (the paper's)
bare      confidence without context
hazard    z_j speaks of draft j once those before it passed: q = Π σ(z), learned from positions that were reached
wide      four times the hidden units
ensemble  five networks, logits averaged (one wider network when served)
path      base + what a position inherits: running sum of log-probabilities, running least gap, running greatest
          entropy, whether the draft repeats the one before it, whether it occurs earlier in the block
history   base + accepted drafts of the request's last two steps and how far the answer is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dscale.config import InputError
from dscale.speculation.features import CONFIDENCE, GROUPS
from dscale.train.predictor import FitConfig
from dscale.train.quality import RESAMPLES, Outcomes, share
from dscale.train.traces import Traces

ENSEMBLE, WIDER = 5, 4
CONTRAST_LANES = 8  # requests that share the budget in the table's retention


@dataclass(frozen=True)
class Variant:
    """config fits it; extra makes columns [N, E] from traces that no feature group holds (such a one is not served)."""

    name: str
    config: FitConfig
    extra: Callable[[Traces], np.ndarray] | None = None


def variants(config: FitConfig, stored: tuple[str, ...]) -> list[Variant]:
    """Those that traces with the groups `stored` allow; the first is what the others are compared with."""
    groups = tuple(group for group in ("confidence", "context") if group in stored)
    base = replace(config, features=groups, head="survival", members=1)
    made = [Variant("base", base)]
    if set(GROUPS) <= set(stored):
        made.append(Variant("full", replace(base, features=GROUPS)))
        made.append(Variant("full hazard", replace(base, features=GROUPS, head="hazard")))
    if len(groups) == 2:
        made.append(Variant("bare", replace(base, features=("confidence",))))
    hazard = replace(base, head="hazard")
    return [
        *made,
        Variant("hazard", hazard),
        Variant("wide", replace(base, hidden_units=WIDER * base.hidden_units)),
        Variant("ensemble", replace(base, members=ENSEMBLE)),
        Variant("path", base, path_features),
        Variant("history", base, history_features),
        Variant("hazard ensemble", replace(hazard, members=ENSEMBLE)),
        Variant("hazard path", hazard, path_features),
        Variant("hazard path history", hazard, _path_and_history),
    ]


def path_features(traces: Traces) -> np.ndarray:
    """float32 [N, 5·D]: for each position, over the block up to it (D positions): Σ log p, least gap, greatest
    entropy, repeats the draft before (0/1), occurs earlier in the block (0/1)."""
    drafts, count = traces.drafts, traces.width - 1
    if "confidence" not in traces.groups:
        raise InputError(f"traces: hold {', '.join(traces.groups)}; path features are made from confidence")
    table = traces.features[:, : count * CONFIDENCE].reshape(-1, count, CONFIDENCE)
    log_p, gap, entropy = (table[:, :, at].astype(np.float32) for at in (CONFIDENCE - 2, 1, CONFIDENCE - 1))
    earlier = np.tril(np.ones((count, count), bool), -1)
    repeated = np.zeros(drafts.shape, np.float32)
    repeated[:, 1:] = drafts[:, 1:] == drafts[:, :-1]
    occurred = ((drafts[:, :, None] == drafts[:, None, :]) & earlier).any(-1).astype(np.float32)
    running = (np.cumsum(log_p, 1), np.minimum.accumulate(gap, 1), np.maximum.accumulate(entropy, 1))
    return np.concatenate([*running, repeated, occurred], axis=1)


def history_features(traces: Traces) -> np.ndarray:
    """float32 [N, 3]: accepted drafts of the request's last step and of the one before (-1: there was none), and
    log(1 + answer tokens so far)."""
    order = np.lexsort((traces.position, traces.request))
    request, accepted = traces.request[order], traces.accepted[order].astype(np.float32)
    out = np.full((len(order), 3), -1.0, np.float32)
    for back in (1, 2):
        same = np.zeros(len(order), bool)
        same[back:] = request[back:] == request[:-back]
        out[order[same], back - 1] = accepted[np.flatnonzero(same) - back]
    out[:, 2] = np.log1p(traces.position)
    return out


def _path_and_history(traces: Traces) -> np.ndarray:
    return np.concatenate([path_features(traces), history_features(traces)], axis=1)


@dataclass(frozen=True)
class PromptSums:
    """Sums over each prompt's records [P]: what R² and retention at a budget are made of, for resampling prompts."""

    count: np.ndarray
    accepted: np.ndarray
    squares: np.ndarray
    residual: np.ndarray
    shared: np.ndarray  # accepted drafts of records that took part in a shared budget
    kept: np.ndarray  # and those that survived

    @classmethod
    def of(cls, q: Tensor, outcomes: Outcomes, slots: int) -> PromptSums:
        """From survival q [N, W] of all holdout records; sharing is among blocks verified whole."""
        names, of_row = np.unique(outcomes.prompt, return_inverse=True)
        y = outcomes.accepted.double()
        length = (q[:, 1:].double() * outcomes.seen).sum(-1)
        whole = outcomes.whole
        took, kept = np.zeros(len(y)), np.zeros(len(y))
        if len(whole):
            shared = share(q[torch.from_numpy(whole)], slots, CONTRAST_LANES)
            rows = whole[shared.rows.numpy()]
            took[rows] = outcomes.accepted.numpy()[rows]
            kept[rows] = np.minimum(took[rows], shared.k.numpy() - 1)
        parts = (np.ones(len(y)), y.numpy(), (y * y).numpy(), ((length - y) ** 2).numpy(), took, kept)
        return cls(*(np.bincount(of_row.reshape(-1), part, len(names)) for part in parts))

    def scores(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """r2 and retention under prompt weights [B, P]: [B] each."""
        count, total, squares, residual, took, kept = (
            weights @ part for part in (self.count, self.accepted, self.squares, self.residual, self.shared, self.kept)
        )
        spread = np.maximum(squares - total**2 / np.maximum(count, 1), 1e-9)
        return {"r2": 1 - residual / spread, "retention": kept / np.maximum(took, 1)}


def comparison(
    survivals: dict[str, Tensor], outcomes: Outcomes, slots: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Per variant r2 and retention at `slots`, their 95% intervals, and the differences from the first variant with
    theirs; prompts are resampled, the same draws for all variants."""
    prompts = len(np.unique(outcomes.prompt))
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES).astype(np.float64)
    weights = np.concatenate([np.ones((1, prompts)), weights])  # the first row is the sample itself
    scored = {name: PromptSums.of(q, outcomes, slots).scores(weights) for name, q in survivals.items()}
    first = next(iter(scored.values()))
    return {
        name: {
            metric: _interval(values) | {"difference": _interval(values - first[metric])}
            for metric, values in scores.items()
        }
        for name, scores in scored.items()
    }


def _interval(values: np.ndarray) -> dict[str, Any]:
    """The sample's value (first) and the 95% percentile interval of its resamples."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return {"value": round(float(values[0]), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
