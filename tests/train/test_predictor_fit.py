"""Fitting on made-up traces whose acceptance can be read off the features."""

import numpy as np
import pytest
import torch

from dscale.config import InputError
from dscale.speculation.predictor import Predictor, PredictorConfig
from dscale.train.predictor import FitConfig, fit, quality, retention, split_by_prompt
from dscale.train.traces import Traces

CONFIG = PredictorConfig(width=4, drafter_hash="abc", features=("confidence",))


def made_up(count=3000):
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 4, count)
    features = rng.normal(size=(count, CONFIG.feature_size)) * 5 + 3
    features[:, 7] = accepted * 10 + rng.normal(size=count)
    features[:, 3] = 2.0  # never varies
    prompt = rng.integers(0, 300, count)
    return Traces(
        features.astype(np.float16), accepted.astype(np.int16), prompt.astype(np.int32), np.zeros(count, np.int32)
    )


def test_split_shares_no_prompt_and_loses_no_record():
    prompt = np.random.default_rng(1).integers(0, 100, 2000)
    parts = split_by_prompt(prompt, FitConfig())
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(2000))
    owners = [set(prompt[rows].tolist()) for rows in parts.values()]
    assert not owners[0] & owners[1]
    assert not owners[0] & owners[2]
    assert not owners[1] & owners[2]


def test_fit_finds_what_the_features_say_and_survives_saving(tmp_path):
    predictor, metrics = fit(made_up(), CONFIG, FitConfig(rate=1e-2, batch=256, epochs=25))
    assert metrics["r2"] > 0.9
    assert metrics["mae"] < 0.25
    assert metrics["retention_4_of_8"] == 1.0
    predictor.save(tmp_path)
    again = Predictor.load(tmp_path, "abc")
    features = torch.from_numpy(made_up().features[:5]).float()
    assert torch.allclose(again(features), predictor(features))
    with pytest.raises(InputError, match="fitted for drafter abc"):
        Predictor.load(tmp_path, "other")


def test_quality_of_a_perfect_predictor():
    accepted = torch.tensor([0, 3, 1, 2] * 16)
    z = torch.where(torch.arange(1, 4) <= accepted[:, None], 30.0, -30.0)
    metrics = quality(z, accepted)
    assert metrics["r2"] == pytest.approx(1.0)
    assert metrics["retention_raw"] == pytest.approx((0 + 2 + 0 + 1) / 6)
    assert metrics["retention_4_fixed"] == 1.0


def test_retention_counts_what_fits():
    assert retention(torch.tensor([0, 5, 2]), torch.tensor([4, 4, 4])) == pytest.approx(5 / 7)
