"""Survival probabilities q of recorded drafts, as each policy would have believed them (dscale.md §6).

predictor   the trained network on the recorded features, told how many requests are live
confidence  the logistic on the draft's own top-1 logit that learns while it serves (speculation/confidence.py)
dspark      product of the drafter's own confidences, each with a temperature. DSpark's drafter has a confidence head;
            a plain DFlash drafter has none, so the probability of its top-1 token stands for it. Temperatures are
            fitted one position after the other, the earlier ones fixed, on the half of the prompts that a record is
            not in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dscale.config import require
from dscale.kernels.top_logits import TopLogits
from dscale.speculation.confidence import ConfidenceModel, signals
from dscale.speculation.dspark import fit_temperatures, tempered
from dscale.speculation.features import CONFIDENCE, CONTEXT
from dscale.speculation.policies import ConfidenceScorer
from dscale.speculation.predictor import Predictor
from dscale.train.predictor import columns_of
from dscale.train.traces import Traces

CHUNK = 8192  # records at once
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Recorded:
    """Of n records: accepted drafts y and slots int64 [n] (traces.py: slots bound what was seen), what the drafter
    itself thought (top: the highest logit alone), half [n] in {0, 1}: of the prompts; width W."""

    accepted: Ints
    slots: Ints
    top: TopLogits
    half: Ints
    width: int


def recorded(traces: Traces) -> Recorded:
    """What the policies without a predictor need; InputError when the traces hold no confidence features."""
    columns = columns_of(traces.width, traces.groups, ("confidence",))
    drafts = traces.width - 1
    features = torch.from_numpy(traces.features[:, columns].astype(np.float32)).view(len(traces), drafts, CONFIDENCE)
    highest = features[..., :1].contiguous()
    log_sum_exp, entropy = highest[..., 0] - features[..., -2], features[..., -1].contiguous()
    top = TopLogits(highest, torch.zeros(1, 1, 1, dtype=torch.int64).expand_as(highest), log_sum_exp, entropy)
    half = np.searchsorted(np.unique(traces.prompt), traces.prompt) % 2
    return Recorded(traces.accepted.astype(np.int64), traces.slots.astype(np.int64), top, half, traces.width)


@torch.no_grad()
def predictor_survival(predictor: Predictor, traces: Traces, lanes: int) -> Floats:
    """q float32 [n, W] of all records for `lanes` live requests, whatever was recorded as their number."""
    config = predictor.config
    require(config.width == traces.width, f"predictor: for width {config.width}; the traces have {traces.width}")
    columns = columns_of(traces.width, traces.groups, config.features)
    parts = []
    for start in range(0, len(traces), CHUNK):
        features = torch.from_numpy(traces.features[start : start + CHUNK][:, columns].astype(np.float32))
        if "context" in config.features:
            features[:, features.shape[1] - CONTEXT] = lanes
        parts.append(predictor.survival(features))
    return torch.cat(parts).float().numpy()


def confidence_replay(recorded: Recorded, rows: Ints, allocate: Callable[[Floats], Ints]) -> tuple[Ints, Floats]:
    """Replay the online logistic over steps rows [S, N]: (k [S, N], q [S, N, W] as believed at each step).

    allocate turns q [s, N, W] into k. The model is refitted every REFIT_EVERY steps from all of them, as when serving.
    """
    model = ConfidenceModel.day_one(recorded.width)
    lengths, beliefs = [], []
    for start in range(0, len(rows), ConfidenceScorer.REFIT_EVERY):
        part = rows[start : start + ConfidenceScorer.REFIT_EVERY]
        records = torch.from_numpy(part.reshape(-1))
        top = recorded.top.select(records)
        q = model.survival(top).numpy().reshape(*part.shape, -1)
        k = allocate(q)
        accepted = np.minimum(recorded.accepted[part], k - 1)
        seen = np.minimum(recorded.slots[part], k)
        if len(part) == ConfidenceScorer.REFIT_EVERY:
            model.observe(top, torch.from_numpy(accepted.reshape(-1)), torch.from_numpy(seen.reshape(-1)))
        lengths.append(k)
        beliefs.append(q)
    return np.concatenate(lengths), np.concatenate(beliefs)


def dspark_survival(recorded: Recorded) -> Floats:
    """q float32 [n, W]: products of tempered confidences; a record's temperatures come from the other half."""
    odds = signals(recorded.top)[0]
    q = np.empty((len(odds), recorded.width), np.float32)
    for half in (0, 1):
        inside = recorded.half == half
        others = ~inside if (~inside).any() else inside  # a single prompt has no other half
        temperatures = fit_temperatures(odds[torch.from_numpy(others)], *_of(recorded, others))
        q[inside] = tempered(odds[torch.from_numpy(inside)], torch.from_numpy(temperatures)).numpy()
    return q


def _of(recorded: Recorded, chosen: NDArray) -> tuple[Ints, Ints]:
    return recorded.accepted[chosen], recorded.slots[chosen]
