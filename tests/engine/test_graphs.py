"""Captured steps on a CPU: what a captured step reads and writes is all in fixed memory, so replays with changing
lanes, lengths and pages give the tokens of eager steps.

Two stand-ins for CUDA graphs. `Closure` calls the step again over the fixed workspace. `Traced` records the step's
operations once, on tensors, as a CUDA graph records kernels: numbers of the host are frozen into it.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dscale.config import SamplingParams
from dscale.engine.graphs import BUDGETS, WARM_RUNS, GraphRunner, Step, buckets
from dscale.engine.llm import LLM
from dscale.engine.recorder import Recorder, RequestTrace
from dscale.engine.request import FinishReason
from dscale.engine.results import OutputRing, Outputs
from dscale.kernels import native
from dscale.kernels import triton as kernels
from dscale.speculation.auto import Auto
from dscale.speculation.costs import ReplayCosts
from dscale.speculation.features import CONTEXT, GROUPS, feature_size
from dscale.speculation.workspace import StepShape
from tests.engine.test_lossless import GREEDY, POLICIES, SEEDED, engine, prompts, reference, tokens


class Closure:
    """Replays by calling the step again; its outputs go where the first ones are."""

    def __init__(self) -> None:
        self.captures, self.counted = 0, 0
        self.runs: list[int] = []

    def capture(self, step: Step, runs: int = WARM_RUNS) -> tuple[Outputs, Callable[[], None]]:
        assert not gc.isenabled()
        self.captures += 1
        self.runs.append(runs)
        fixed = step()

        def replay() -> None:
            _overwrite(fixed, step())

        return fixed, replay

    def seconds(self, before: Callable[[], None], replay: Callable[[], None], repeats: int) -> float:
        before()
        replay()
        return 0.01

    def free(self) -> int:
        self.counted += 1
        return 0


class Traced(Closure):
    """Replays the operations that the capture saw, with whatever the host knew then."""

    def capture(self, step: Step, runs: int = WARM_RUNS) -> tuple[Outputs, Callable[[], None]]:
        self.captures += 1
        kept: list[Outputs] = []

        def traced() -> list[Tensor]:
            outputs = step()
            kept.append(outputs)
            return list(_tensors(outputs).values())

        graph = make_fx(traced)()
        names = list(_tensors(kept[0]))
        fixed = replace(kept[0], **dict(zip(names, graph(), strict=True)))

        def replay() -> None:
            _overwrite(fixed, replace(fixed, **dict(zip(names, graph(), strict=True))))

        return fixed, replay


def _tensors(outputs: Outputs) -> dict[str, Tensor]:
    return {name: value for name, value in vars(outputs).items() if isinstance(value, Tensor)}


def _overwrite(fixed: Outputs, fresh: Outputs) -> None:
    for name, value in _tensors(fixed).items():
        value.copy_(getattr(fresh, name))


def captured(llm: LLM, backend: Closure, most: int = 4) -> GraphRunner:
    """Serve an LLM's steps from captured ones."""
    worker = llm.engine.worker
    worker.ring = OutputRing(most, worker.policy.width, worker.device)
    worker.graphs = GraphRunner(worker.state, worker.models, worker.policy, most, backend)
    return worker.graphs


def fixed_auto(llm: LLM, budgets: tuple[int, ...] = BUDGETS) -> None:
    """`auto` as it is built for a GPU: whole blocks, few budgets, costs from replays."""
    worker = llm.engine.worker
    auto = worker.policy
    costs = ReplayCosts(worker.replay_seconds)
    worker.policy = Auto(auto.full, auto.full, auto.width, costs, False, budgets)
    costs.shapes = worker.policy.shapes


def test_buckets_are_powers_of_two_and_steps_of_eight() -> None:
    assert buckets(128) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(1) == [1]
    assert buckets(40)[-2:] == [32, 40]


def test_rows_of_a_bucket_keep_the_share() -> None:
    shape = StepShape(8, 7, 8, share=2.5)
    assert shape.budget(torch.ones(3)) == 8
    over = shape.over(4)
    assert (over.rows, over.spare) == (10, True)
    live = torch.tensor([True, True, True, False])
    assert int(over.budget(live)) == 8
    assert int(StepShape(8, 7, 24, share=8).over(4).budget(live)) == 24
    assert StepShape(1, 0, 3, share=1).over(4).rows == 4


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["off", *POLICIES])
def test_replays_give_the_tokens_of_eager_steps(policy: str, sampled: bool, lag: int) -> None:
    llm = engine("qwen3", policy, lag=lag, max_prefill_tokens=19)
    if policy == "auto":
        fixed_auto(llm)
    graphs = captured(llm, Closure())
    assert tokens(llm, prompts(8), SEEDED if sampled else GREEDY) == reference("qwen3", sampled)
    assert graphs.counters.graphs >= 2
    assert graphs.backend.captures == graphs.counters.graphs
    assert llm.engine.scheduler.pool.held == 0
    again = tokens(llm, prompts(8), SEEDED if sampled else GREEDY)
    assert again == reference("qwen3", sampled)


def test_the_stand_in_freezes_what_the_host_knew() -> None:
    known, memory = [1], torch.zeros(2, 5, dtype=torch.int64)
    fixed, replay = Traced().capture(lambda: Outputs(memory + known[0], None, 0, False, False))
    known[0] = 9
    memory.fill_(3)
    replay()
    assert fixed.counts.tolist() == [[4] * 5] * 2


@pytest.mark.parametrize(
    ("policy", "sampled"),
    [("off", True), ("full", False), ("dvl", True), ("dvl:seeded", False), ("confidence", False), ("auto", True)],
)
def test_nothing_of_the_host_is_frozen_into_a_step(policy: str, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One captured step serves one, two and three requests, with few pages, preemption and prefix hits."""
    monkeypatch.setattr(native, "usable", lambda x: False)
    monkeypatch.setattr("dscale.speculation.decode_step.draw", draw_as_on_a_device)
    llm = engine("qwen3", policy, lag=1, max_prefill_tokens=19, num_pages=11, max_requests=3)
    if policy == "auto":
        fixed_auto(llm, (3, 6))
    graphs = captured(llm, Traced(), most=3)
    graphs.sizes = [3]
    assert tokens(llm, prompts(8), SEEDED if sampled else GREEDY) == reference("qwen3", sampled)
    assert graphs.backend.captures <= (6 if policy == "auto" else 1)  # auto times greedy steps too
    assert llm.engine.scheduler.preemptions > 0


def draw_as_on_a_device(logits: Tensor, rows, all_greedy: bool) -> Tensor:
    from dscale.speculation.sampling import argmax, draw_on_device

    greedy = argmax(logits)
    return greedy if all_greedy else draw_on_device(logits, rows, greedy)


def test_capture_moves_nobody_on() -> None:
    llm = engine("llama", "dvl")
    graphs = captured(llm, Closure())
    state = llm.engine.worker.state
    for row in range(4):
        state.set_anchor(row, 20 + row, 3, 9, True)
        state.set_pages(row, [3 * row + 1, 3 * row + 2, 3 * row + 3])
    llm.engine.worker.models.target_cache.normal_()
    before = {name: value.clone() for name, value in vars(state).items() if isinstance(value, Tensor)}
    cache = llm.engine.worker.models.target_cache.clone()
    graphs.prepare()
    assert graphs.seconds(3, llm.engine.worker.policy.shape(3)) == 0.01
    for name, value in before.items():
        assert torch.equal(getattr(state, name)[:-1], value[:-1]), name
    assert int(state.length[-1]) == 0
    assert torch.equal(llm.engine.worker.models.target_cache[:, :, 1:], cache[:, :, 1:])
    assert not graphs.work.live.any()


def test_whole_blocks_of_auto_are_captured_without_scores() -> None:
    llm = engine("qwen3", "auto")
    fixed_auto(llm, (4, 8))
    graphs = captured(llm, Closure())
    off, narrow, whole = (
        graphs._find(graphs._key(2, shape, True)).outputs for shape in llm.engine.worker.policy.shapes(2)
    )
    assert (off.drafts, narrow.drafts, whole.drafts) == (0, 7, 7)
    assert (narrow.scored, whole.scored) == (True, False)
    assert whole.signals is None
    assert whole.counts.shape == narrow.counts.shape


def test_whole_blocks_of_auto_are_recorded_with_their_features() -> None:
    recorder = Recorder(GROUPS, seed=4)
    llm = engine("qwen3", "auto", recorder=recorder)
    seen = llm.engine.worker.policy
    costs = ReplayCosts(lambda live, shape: 0.01)
    seen.policy = auto = Auto(seen.policy.full, seen.policy.full, seen.width, costs, False, (4, 8))
    costs.shapes = auto.shapes
    auto.shape = lambda live: auto.shapes(live)[-1]
    assert tokens(llm, prompts(8), GREEDY) == reference("qwen3", False)
    assert recorder.recorded > 8
    assert recorder.skipped["other width"] == 0


def test_requests_that_need_the_host_run_eagerly_among_captured_steps() -> None:
    scored = replace(SEEDED, logprobs=1, presence_penalty=0.5)
    params = [SEEDED, scored, SEEDED, SEEDED, scored, SEEDED, SEEDED, SEEDED]
    plain = engine("llama", "full").generate(prompt_token_ids=prompts(8), sampling_params=params)
    llm = engine("llama", "full", lag=1)
    captured(llm, Closure())
    outputs = llm.generate(prompt_token_ids=prompts(8), sampling_params=params)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    assert len(outputs[1].outputs[0].logprobs) == 40


@pytest.mark.parametrize("policy", ["dvl", "auto"])
def test_random_arrivals_and_aborts_between_replays(policy: str) -> None:
    llm = engine("llama", policy, num_pages=14, max_prefill_tokens=17, lag=1)
    if policy == "auto":
        fixed_auto(llm)
    captured(llm, Closure())
    rows, expected, rng = prompts(8), reference("llama", True), random.Random(3)
    made = []
    while len(made) < 30 or llm.engine.busy:
        if len(made) < 30 and rng.random() < 0.5:
            which = rng.randrange(8)
            made.append((which, llm.engine.add(f"r{len(made)}", rows[which], SEEDED, 11)))
        if made and rng.random() < 0.05:
            llm.engine.abort(rng.choice(made)[1].id)
        llm.engine.step()
    for which, one in made:
        assert one.output == expected[which][: len(one.output)]
        assert one.finish_reason is FinishReason.ABORT or len(one.output) == 40
    assert llm.engine.scheduler.preemptions > 0
    assert llm.engine.scheduler.pool.held == 0


def test_confidence_learns_from_what_the_ring_brings() -> None:
    weights = []
    for graphs in (False, True):
        llm = engine("llama", "confidence", lag=1)
        if graphs:
            captured(llm, Closure())
        tokens(llm, prompts(8), GREEDY)
        weights.append(llm.engine.worker.policy.scorer.model.weight)
    assert weights[0].tolist() != [0.0] * 7 + [1.0, 0.0]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-4)


def test_interpreted_kernels_replay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the triton package is not installed")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernels are compiled, not interpreted")
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=3)
    rows = [[3, 1, 4], [2, 0], [4, 4]]
    expected = tokens(engine("qwen3", "dvl", width=8), rows, params)
    monkeypatch.setattr(native, "usable", lambda x: False)
    monkeypatch.setattr(kernels, "usable", lambda x: not torch.is_grad_enabled())
    llm = engine("qwen3", "dvl", lag=1, max_requests=2)
    captured(llm, Closure(), most=2).sizes = [2]
    assert tokens(llm, rows, params) == expected


@pytest.mark.parametrize(("policy", "stand_in"), [("full", Closure), ("dvl", Traced)])
def test_captured_steps_read_late_are_recorded_as_eager_ones(
    policy: str, stand_in: type[Closure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, acceptance and features by request; how many ran beside it may differ, so budgets are whole blocks."""
    if stand_in is Traced:
        monkeypatch.setattr(native, "usable", lambda x: False)
        monkeypatch.setattr("dscale.speculation.decode_step.draw", draw_as_on_a_device)
    kept: list[dict[str, RequestTrace]] = []
    params = replace(SEEDED, temperature=3.0, stop_token_ids=[3], max_tokens=17)
    for lag in (0, 1):
        made: dict[str, RequestTrace] = {}
        recorder = Recorder(GROUPS, seed=4, done=lambda trace, made=made: made.__setitem__(trace.id, trace))
        llm = engine("llama", policy, lag=lag, recorder=recorder, slots=8.0)
        graphs = captured(llm, stand_in()) if lag else None
        tokens(llm, prompts(8), params)
        assert graphs is None or graphs.counters.graphs > 0
        kept.append(made)
    eager, late = kept
    assert sorted(eager) == sorted(late)
    assert sum(int((trace.accepted > 0).sum()) for trace in late.values()) > 5
    live = feature_size(8, GROUPS) - CONTEXT
    for id, trace in eager.items():
        other = late[id]
        assert (trace.prompt, trace.output) == (other.prompt, other.output)
        for name in ("drafts", "accepted", "slots", "position"):
            assert np.array_equal(getattr(trace, name), getattr(other, name)), name
        assert set(other.features[:, live].tolist()) <= {1, 2, 3, 4}
        mine, theirs = (one.features.astype(np.float32) for one in (trace, other))
        mine[:, live] = theirs[:, live]
        assert np.allclose(mine, theirs, atol=2e-3, rtol=2e-3)


def test_replays_read_the_weights_that_a_refit_put_in_place() -> None:
    """A captured step reads the predictor where it lies: new weights change what is verified, and no token."""
    llm = engine("llama", "dvl", lag=1)
    captured(llm, Closure())
    assert tokens(llm, prompts(8), GREEDY) == reference("llama", False)
    predictor = llm.load_predictor()
    assert predictor is not None
    before = [one.data_ptr() for one in predictor.parameters()]
    predictor.take({name: -3 * value.clone() for name, value in predictor.state_dict().items()})
    assert [one.data_ptr() for one in predictor.parameters()] == before
    assert tokens(llm, prompts(8), GREEDY) == reference("llama", False)
