"""Refits: a better fit is handed on, one that is not better is refused, and a process that dies loses only itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from dscale.kernels.top_logits import TopLogits
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.features import confidence_features, feature_size
from dscale.speculation.predictor import Predictor, PredictorConfig, predictor_loss
from dscale.train.predictor import FitConfig, fit_network, predictor_of, split_by_prompt
from dscale.train.quality import Outcomes
from dscale.train.refit import RefitJob, Verdict, refit, top_of
from dscale.train.refit_process import RefitFailed, RefitProcess
from dscale.train.traces import Traces
from tests.train.made_up_traces import GROUPS, made_up

FAST = FitConfig(epochs=25)


def config(width: int = 4) -> PredictorConfig:
    return PredictorConfig(width, "d", GROUPS, hidden_units=16)


def poor(width: int = 4) -> Predictor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Predictor(config(width)).eval().requires_grad_(False)


def good(traces: Traces) -> Predictor:
    fitted = fit_network(traces, FitConfig(features=GROUPS, hidden_units=16, batch=128, epochs=30))
    return predictor_of(fitted.network, config(traces.width))


def holdout_loss(predictor: Predictor, traces: Traces) -> float:
    """Binary cross-entropy of q on the holdout's verified positions, written out."""
    rows = split_by_prompt(traces.prompt, FAST)["holdout"]
    q = predictor.survival(torch.from_numpy(traces.features[rows].astype(np.float32)))[:, 1:].double().numpy()
    total, count = 0.0, 0
    for at, row in enumerate(rows):
        for j in range(1, int(traces.slots[row])):
            chance = min(max(q[at, j - 1], 1e-6), 1 - 1e-6)
            total -= np.log(chance if j <= traces.accepted[row] else 1 - chance)
            count += 1
    return total / count


def test_a_poor_predictor_is_bettered_and_the_scores_are_those_of_the_weights():
    traces, old = made_up(2000), poor()
    verdict = refit(RefitJob(traces, old, None, FAST)).predictor
    assert verdict is not None
    assert verdict.weights is not None
    assert verdict.new["log_loss"] < 0.5 * verdict.old["log_loss"]
    assert verdict.new["r2"] > 0.8
    new = poor()
    new.take(verdict.weights)
    assert verdict.old["log_loss"] == pytest.approx(holdout_loss(old, traces), rel=1e-4)
    assert verdict.new["log_loss"] == pytest.approx(holdout_loss(new, traces), rel=1e-4)


@pytest.mark.parametrize(("prompts", "held"), [(16, 8), (25, 8), (300, 54)])
def test_eight_prompts_judge_at_least_and_no_fit_has_seen_them(monkeypatch, prompts, held):
    fits = []

    def fitting(*arguments, **named):
        fits.append(fit_network(*arguments, **named))
        return fits[-1]

    monkeypatch.setattr("dscale.train.refit.fit_network", fitting)
    traces = made_up(1200, prompts=prompts)
    result = refit(RefitJob(traces, poor(), None, replace(FAST, epochs=1)))
    assert result.prompts["holdout"] == pytest.approx(held, abs=0 if held == 8 else 12)
    assert sum(result.prompts.values()) == len(np.unique(traces.prompt))
    assert min(result.prompts.values()) >= 1
    for fitted in fits:
        assert len(np.unique(traces.prompt[fitted.splits["holdout"]])) == result.prompts["holdout"]
        assert len(fitted.splits["train"]) == result.records["train"]


def test_a_worse_fit_is_refused(monkeypatch):
    """The predictor in force has seen better traffic than the records, whose training labels are false."""
    traces = made_up(2000)
    old = good(traces)
    splits = split_by_prompt(traces.prompt, FAST)
    false = traces.accepted.copy()
    for part in ("train", "validation"):
        false[splits[part]] = 3 - false[splits[part]]
    verdict = refit(RefitJob(replace(traces, accepted=false), old, None, FAST)).predictor
    assert verdict is not None
    assert verdict.weights is None
    assert verdict.new["log_loss"] > verdict.old["log_loss"]


def test_nan_and_a_tie_are_not_better():
    held = Outcomes.of(made_up(50))
    q = torch.linspace(1, 0.2, 4).expand(50, -1)
    weights = {"weight": torch.zeros(1)}
    assert Verdict.between(q, q, held, weights).weights is None
    assert Verdict.between(q, q * torch.nan, held, weights).weights is None
    assert Verdict.between(q * torch.nan, q, held, weights).weights is weights


def test_positions_that_were_not_verified_teach_nothing():
    """Of blocks cut at two rows only the first draft counts: what features say of later ones leaves no mark."""
    traces = made_up(600)
    cut = replace(traces, slots=np.full(600, 2, np.int16), accepted=np.minimum(traces.accepted, 1).astype(np.int16))
    other = replace(cut, accepted=cut.accepted.copy())
    z = torch.zeros(600, 3, requires_grad=True)
    predictor_loss(z, torch.from_numpy(cut.accepted).long(), torch.from_numpy(cut.slots).long()).backward()
    assert z.grad[:, 1:].abs().max() == 0
    verdict = refit(RefitJob(cut, poor(), None, FAST)).predictor
    again = refit(RefitJob(other, poor(), None, FAST)).predictor
    assert verdict.new == again.new
    rows = split_by_prompt(traces.prompt, FAST)["holdout"]
    new = poor()
    new.take(verdict.weights)
    held = torch.from_numpy(cut.features[rows].astype(np.float32))
    first = new.survival(held)[:, 1].double()
    label = torch.from_numpy(cut.accepted[rows] >= 1).double()
    loss = torch.nn.functional.binary_cross_entropy(first, label)
    assert verdict.new["log_loss"] == pytest.approx(float(loss), rel=1e-4)


def drafts(count: int, width: int, seed: int) -> TopLogits:
    rng = torch.Generator().manual_seed(seed)
    values = torch.rand(count, width - 1, 16, generator=rng).sort(-1, descending=True).values * 6 + 12
    log_p = -3 * torch.rand(count, width - 1, generator=rng)
    return TopLogits(values, values.long(), values[..., 0] - log_p, torch.rand(count, width - 1, generator=rng))


def confidence_traces(count: int = 8000, width: int = 4, bias: float = -0.8) -> Traces:
    """Drafts that pass less often than the drafter believes, by `bias` in log-odds."""
    top, rng = drafts(count, width, 0), np.random.default_rng(1)
    features = np.zeros((count, feature_size(width, GROUPS)), np.float32)
    features[:, : 18 * (width - 1)] = confidence_features(top).flatten(1).numpy()
    p = top.log_probability.double().exp().numpy()
    chance = 1 / (1 + np.exp(-(np.log(p / (1 - p)) + bias)))
    accepted = (rng.random(p.shape) < chance).astype(int).cumprod(1).sum(1)
    made = made_up(count, width)
    return replace(made, features=features.astype(np.float16), accepted=accepted.astype(np.int16))


def test_the_head_is_read_back_from_the_features():
    traces, top = confidence_traces(), drafts(8000, 4, 0)
    found = top_of(traces)
    assert torch.allclose(found.values[..., 0], top.values[..., 0], atol=2e-2)
    assert torch.allclose(found.log_probability, top.log_probability, atol=2e-3)
    assert torch.allclose(found.entropy, top.entropy, atol=1e-3)


def test_calibration_is_fitted_and_a_good_one_is_kept():
    traces = confidence_traces()
    day_one = ConfidenceModel.day_one(4).weight
    verdict = refit(RefitJob(traces, None, day_one, FAST)).confidence
    assert verdict is not None
    assert verdict.weights is not None
    weight = verdict.weights["weight"]
    assert torch.allclose(weight[:3], torch.full((3,), -0.8), atol=0.25)
    assert abs(weight[3] - 1.0) < 0.2
    assert verdict.new["log_loss"] < verdict.old["log_loss"]
    assert verdict.new["ece"] < 0.02 < verdict.old["ece"]
    again = refit(RefitJob(traces, None, weight, FAST)).confidence
    assert again.weights is None


def test_a_job_in_its_own_process_gives_the_same_result():
    job = RefitJob(made_up(600), poor(), ConfidenceModel.day_one(4).weight, FAST)
    here, there = refit(job), RefitProcess().run(job)
    assert there.records == here.records
    assert sum(here.records.values()) == 600
    assert there.predictor.new == pytest.approx(here.predictor.new, rel=1e-3)
    for name, value in there.predictor.weights.items():
        assert torch.allclose(value, here.predictor.weights[name], atol=1e-4)


def test_failures_have_a_reason_in_one_line():
    few = RefitJob(made_up(400, prompts=15), poor(), None, FAST)
    with pytest.raises(RefitFailed, match="code 2: traces: 15 prompts; a refit needs 16 at least"):
        RefitProcess().run(few)
    with pytest.raises(RefitFailed, match=r"took longer than 0\.01 s and was ended"):
        RefitProcess(limit=0.01).run(few)


def test_a_killed_process_and_a_closed_one():
    process, said = RefitProcess(), []
    job = RefitJob(made_up(3000), poor(), None, replace(FAST, epochs=100_000, patience=100_000))

    def run() -> None:
        with pytest.raises(RefitFailed) as error:
            process.run(job)
        said.append(str(error.value))

    for end in (lambda: os.kill(process._child.pid, signal.SIGKILL), process.close):
        thread = threading.Thread(target=run)
        thread.start()
        while process._child is None:
            time.sleep(0.01)
        end()
        thread.join(20)
    assert said == ["its process ended with code -9"] * 2
    with pytest.raises(RefitFailed, match="the engine is stopping"):
        process.run(job)
