"""What `auto` finds in models/: the shipped predictor only beside the drafter it was fitted for."""

from __future__ import annotations

import pytest

from dscale.config import InputError
from dscale.engine.llm import LLM
from dscale.models.aliases import shipped_drafter, shipped_predictor
from dscale.models.drafter_checkpoint import random_drafter, read_drafter
from dscale.models.loader import LoadedTarget
from dscale.speculation.policies import ConfidenceScorer, PredictorScorer

SMALL = {"dtype": "float32", "device": "cpu", "max_requests": 1, "max_model_len": 64}


@pytest.mark.skipif(shipped_predictor("smollm2-135m") is None, reason="no predictor for SmolLM2 in models/")
def test_shipped_predictor_goes_with_its_own_drafter_only(smollm2: LoadedTarget):
    own = LLM(smollm2, policy="auto", **SMALL).engine.worker.policy
    assert isinstance(own.full, PredictorScorer)
    config = read_drafter(shipped_drafter("smollm2-135m")).config
    other = random_drafter(config, seed=0)
    assert isinstance(LLM(smollm2, drafter=other, policy="auto", **SMALL).engine.worker.policy.full, ConfidenceScorer)
    with pytest.raises(InputError, match="fitted for drafter"):
        LLM(smollm2, drafter=other, predictor=str(shipped_predictor("smollm2-135m")), policy="dvl", **SMALL)
