"""Fit predictor and confidence calibration to recent traffic, and say whether that is better than what serves now.

    refit(RefitJob(traces, predictor, confidence)) → Refit

Prompts are split by a hash of their id, as `dscale fit` does, but of few prompts more are held out. Both are judged by
the log-loss of survival on the holdout's prompts, over positions that were verified. What is not better is not handed
on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dscale.config import require
from dscale.kernels.top_logits import TopLogits
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.features import CONFIDENCE
from dscale.speculation.predictor import Predictor, survival
from dscale.train.network import forward
from dscale.train.predictor import (
    FitConfig,
    Fitted,
    columns_of,
    examples_of,
    fit_network,
    network_of,
    predictor_of,
    prompt_places,
    split_by_prompt,
)
from dscale.train.quality import Outcomes, length_scores
from dscale.train.traces import Traces

MIN_PROMPTS = 16  # different ones, of which as many are left to learn from as
MIN_HELD = 8  # prompts judge, so that their score says something
GAIN = 1e-4  # of log-loss, in nats a position, below which nothing was gained
SCORES = ("log_loss", "r2", "ece")


@dataclass(frozen=True)
class RefitJob:
    """Records, and what serves now: a predictor (on the CPU), confidence [W+1] float32, each None where there is none.

    Fits have the features, head and size of the predictor in force. One starts from it, one anew, for it may be far
    off; the validation prompts choose.
    """

    traces: Traces
    predictor: Predictor | None
    confidence: Tensor | None
    fit: FitConfig = field(default_factory=FitConfig)


@dataclass(frozen=True)
class Verdict:
    """Scores on the holdout of what served and of what was fitted: log_loss, r2, ece. weights: of the new one, by name;
    None when it is not better."""

    old: dict[str, float]
    new: dict[str, float]
    weights: dict[str, Tensor] | None

    @classmethod
    def between(cls, old: Tensor, new: Tensor, held: Outcomes, weights: dict[str, Tensor]) -> Verdict:
        """Compare survival [N, W] before and after on the holdout's records."""
        was, now = (_scores(q, held) for q in (old, new))
        better = math.isfinite(now["log_loss"]) and not now["log_loss"] > was["log_loss"] - GAIN
        return cls(was, now, weights if better else None)


@dataclass(frozen=True)
class Refit:
    """What came of a job. records, prompts: by part of the split."""

    predictor: Verdict | None
    confidence: Verdict | None
    records: dict[str, int]
    prompts: dict[str, int]
    seconds: float


def refit(job: RefitJob) -> Refit:
    """Fit both and judge them. InputError for fewer prompts than MIN_PROMPTS."""
    began, traces = time.perf_counter(), job.traces
    job = replace(job, fit=holding_out(job.fit, traces.prompt))
    splits = split_by_prompt(traces.prompt, job.fit)
    held = Outcomes.of(traces.select(splits["holdout"]))
    predictor = None if job.predictor is None else _predictor(job, job.predictor, splits, held)
    confidence = None if job.confidence is None else _confidence(traces, job.confidence, splits, held)
    records = {name: len(rows) for name, rows in splits.items()}
    prompts = {name: len(np.unique(traces.prompt[rows])) for name, rows in splits.items()}
    return Refit(predictor, confidence, records, prompts, time.perf_counter() - began)


def holding_out(fit: FitConfig, prompt: np.ndarray) -> FitConfig:
    """With a holdout of MIN_HELD of the prompts (ids int64 [N]) at least; InputError for too few of them."""
    names = np.unique(prompt)
    require(len(names) >= MIN_PROMPTS, f"traces: {len(names)} prompts; a refit needs {MIN_PROMPTS} at least")
    needed = np.nextafter(np.sort(prompt_places(names, fit.seed))[MIN_HELD - 1], 1.0)
    holdout = max(fit.holdout, float(needed))
    return replace(fit, holdout=holdout, validation=min(fit.validation, (1 - holdout) / 2))


def _predictor(job: RefitJob, old: Predictor, splits: dict[str, np.ndarray], held: Outcomes) -> Verdict:
    config, traces = old.config, job.traces
    batch = min(max(len(splits["train"]) // 64, 32), job.fit.batch)
    fit = replace(
        job.fit, features=config.features, head=config.head, hidden_units=config.hidden_units, members=1, batch=batch
    )
    columns = columns_of(traces.width, traces.groups, config.features)
    checked, rest = (examples_of(traces, splits[name], columns, None, "cpu") for name in ("validation", "holdout"))

    def loss(fitted: Fitted) -> float:
        found = float(checked.loss(forward(fitted.network, checked.features), config.head))
        return found if math.isfinite(found) else math.inf

    best = min((fit_network(traces, fit, start=start) for start in (network_of(old), None)), key=loss)
    before, after = (survival(z, config.head) for z in (forward(old, rest.features), best.z))
    weights = dict(predictor_of(best.network, config).state_dict())
    return Verdict.between(before, after, held, weights)


def _confidence(traces: Traces, old: Tensor, splits: dict[str, np.ndarray], held: Outcomes) -> Verdict:
    part, rest = (traces.select(splits[name]) for name in ("train", "holdout"))
    accepted, slots = (torch.from_numpy(x.astype(np.int64)) for x in (part.accepted, part.slots))
    new = ConfidenceModel.fitted(traces.width, top_of(part), accepted, slots)
    before = ConfidenceModel(old, new.curvature)
    q = [model.survival(top_of(rest)) for model in (before, new)]
    return Verdict.between(q[0], q[1], held, {"weight": new.weight})


def top_of(traces: Traces) -> TopLogits:
    """What the confidence features of records hold of the drafter's head: the best logit of each draft, not its id."""
    drafts = traces.width - 1
    table = torch.from_numpy(traces.features[:, : drafts * CONFIDENCE].astype(np.float32)).view(-1, drafts, CONFIDENCE)
    best, log_probability, entropy = table[..., 0], table[..., CONFIDENCE - 2], table[..., CONFIDENCE - 1]
    ids = torch.zeros(*best.shape, 1, dtype=torch.int64)
    return TopLogits(best[..., None], ids, best - log_probability, entropy)


def _scores(q: Tensor, held: Outcomes) -> dict[str, float]:
    scores = length_scores(q, held)
    return {name: scores[name] for name in SCORES}
