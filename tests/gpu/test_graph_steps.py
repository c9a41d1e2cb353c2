"""On a CUDA GPU: captured steps, read late or at once, give the tokens of eager steps; the host never waits."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.models.loader import LoadedTarget
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.engine.test_lossless import GREEDY, SEEDED, prompts, random_predictor, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
POLICIES = ("off", "full", "fixed:3", "dvl", "dvl:seeded", "confidence", "auto")


def on_gpu(policy: str, **options) -> LLM:
    target: LoadedTarget = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    predictor = random_predictor(drafter, drafter.config.width) if policy.startswith("dvl") else None
    moved = replace(target, model=copy.deepcopy(target.model).cuda())
    options = {"slots": 3.0, "num_pages": 64, "max_requests": 4, **options}
    return LLM(
        moved, drafter=copy.deepcopy(drafter).cuda(), predictor=predictor, policy=policy, dtype="float32",
        device="cuda", **options,
    )  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_graphs_and_lag_change_no_token(policy: str, sampled: bool) -> None:
    params: SamplingParams = SEEDED if sampled else GREEDY
    expected = tokens(on_gpu("off", graphs=False, lag=0), prompts(8), params)
    for graphs in (False, True):
        for lag in (0, 1):
            llm = on_gpu(policy, graphs=graphs, lag=lag, max_prefill_tokens=19)
            assert tokens(llm, prompts(8), params) == expected, (graphs, lag)
            assert llm.engine.scheduler.pool.held == 0


@pytest.mark.parametrize("policy", ["off", "full", "dvl", "confidence", "auto"])
def test_the_host_never_waits_for_the_device(policy: str) -> None:
    """Prefill and admission included: torch reports every operation that synchronises."""
    llm = on_gpu(policy)
    params = replace(SEEDED, stop_token_ids=[3])
    tokens(llm, prompts(8), params)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            tokens(llm, prompts(8), params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [f"{one.filename}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)] == []


def test_capture_cost_is_counted() -> None:
    counters = on_gpu("dvl").engine.worker.graphs.counters
    assert counters.graphs == 3
    assert counters.seconds > 0
    assert counters.memory > 0
