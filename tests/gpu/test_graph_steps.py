"""On a CUDA GPU: captured steps, read late or at once, give the tokens of eager steps; the host never waits."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.engine.recorder import Recorder, RequestTrace
from dscale.models.loader import LoadedTarget
from dscale.speculation.features import GROUPS
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


def waits(llm: LLM, params: SamplingParams) -> list[str]:
    """Where the host waits for the device while requests are served, everything being captured and compiled before."""
    tokens(llm, prompts(8), params)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            tokens(llm, prompts(8), params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_graphs_and_lag_change_no_token(policy: str, sampled: bool) -> None:
    params: SamplingParams = SEEDED if sampled else GREEDY
    kind = "sampled" if sampled else "greedy"
    expected = tokens(on_gpu("off", graphs=False, lag=0), prompts(8), params)
    for graphs in (False, True):
        for lag in (0, 1):
            llm = on_gpu(policy, graphs=graphs, lag=lag, max_prefill_tokens=19, graph_kinds=kind)
            assert tokens(llm, prompts(8), params) == expected, (graphs, lag)
            assert llm.engine.scheduler.pool.held == 0


@pytest.mark.parametrize("policy", ["off", "full", "dvl", "confidence", "auto"])
def test_the_host_never_waits_for_the_device(policy: str) -> None:
    """Prefill and admission included: torch reports every operation that synchronises."""
    llm = on_gpu(policy)
    params = replace(SEEDED, stop_token_ids=[3])
    assert waits(llm, params) == []


@pytest.mark.parametrize("policy", ["full", "dvl"])
def test_a_recorder_looks_on_without_a_wait(policy: str) -> None:
    """Captured steps read late leave the records of eager ones, and the host does not wait for them."""
    kept, slots = [], 8.0 if policy == "dvl" else 3.0
    for graphs in (False, True):
        made: dict[str, RequestTrace] = {}
        recorder = Recorder(GROUPS, seed=4, done=lambda trace, made=made: made.__setitem__(trace.id, trace))
        llm = on_gpu(policy, graphs=graphs, lag=int(graphs), recorder=recorder, slots=slots)
        tokens(llm, prompts(8), SEEDED)
        kept.append(made)
        torch.cuda.set_sync_debug_mode("error" if graphs else "default")
        try:
            tokens(llm, prompts(8), SEEDED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    eager, captured = kept
    assert sorted(eager) == sorted(captured)
    for name, trace in eager.items():
        for column in ("drafts", "accepted", "slots", "position"):
            assert np.array_equal(getattr(trace, column), getattr(captured[name], column)), column


def test_a_refit_reaches_captured_steps() -> None:
    llm = on_gpu("dvl")
    expected = tokens(llm, prompts(8), GREEDY)
    before = llm.engine.counters.accepted
    predictor = llm.load_predictor()
    assert predictor is not None
    predictor.take({name: -3 * value.cpu() for name, value in predictor.state_dict().items()})
    assert tokens(llm, prompts(8), GREEDY) == expected
    assert llm.engine.counters.accepted - before != before  # other rows were verified


def test_capture_cost_is_counted() -> None:
    counters = on_gpu("dvl").engine.worker.graphs.counters
    assert (counters.graphs, counters.greedy, counters.sampled) == (6, 3, 3)
    assert counters.seconds > 0
    assert counters.memory > 0


@pytest.mark.parametrize("policy", ["dvl", "auto"])
def test_nothing_is_captured_while_requests_are_served(policy: str) -> None:
    llm = on_gpu(policy)
    counters = llm.engine.worker.graphs.counters
    prepared = counters.graphs
    assert counters.greedy == counters.sampled == prepared // 2
    for params in (SEEDED, GREEDY):
        tokens(llm, prompts(8), params)
    assert counters.graphs == prepared


def test_steps_that_were_not_prepared_are_captured_when_needed() -> None:
    llm = on_gpu("dvl", graph_kinds="greedy")
    counters = llm.engine.worker.graphs.counters
    assert (counters.greedy, counters.sampled) == (3, 0)
    assert tokens(llm, prompts(8), SEEDED) == tokens(on_gpu("off", graphs=False), prompts(8), SEEDED)
    assert counters.sampled > 0
    llm.switch("full")
    counters = llm.engine.worker.graphs.counters
    assert (counters.greedy, counters.sampled) == (0, 3)  # what ran before the change of policy


def test_switches_of_policy_leave_no_memory_behind() -> None:
    llm = on_gpu("dvl")
    held = []
    for _ in range(3):
        for policy in ("full", "off", "dvl"):
            llm.switch(policy)
            tokens(llm, prompts(4), GREEDY)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[2] - held[1] < 1 << 20
