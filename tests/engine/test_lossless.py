"""Losslessness in float32: every policy gives, token for token, what the target gives alone."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from dscale.config import AnchorLayout, SamplingParams
from dscale.engine.llm import LLM
from dscale.engine.request import FinishReason, Status
from dscale.kernels import native
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.predictor import Predictor, PredictorConfig
from tests.engine.pairs import FAMILY_FLAGS, make_llm, tiny_drafter, tiny_target

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=40)
POLICIES = ("full", "fixed:3", "dvl", "dvl:seeded", "confidence", "dspark", "auto")


@cache
def target(family):
    return tiny_target(family)


@cache
def drafter(family, layout=AnchorLayout.MASKED):
    return tiny_drafter(target(family), layout)


def random_predictor(of, width: int) -> Predictor:
    torch.manual_seed(3)
    return Predictor(PredictorConfig(width=width, drafter_hash=drafter_hash(of))).eval().requires_grad_(False)


def engine(family: str, policy: str, layout=AnchorLayout.MASKED, **options) -> LLM:
    if policy == "off":
        return make_llm(target(family), "off", **options)
    draft = drafter(family, layout)
    llm_options = {"slots": 3.0, **options}
    predictor = random_predictor(draft, draft.config.width) if policy.startswith("dvl") else None
    return LLM(
        target(family), drafter=draft, predictor=predictor, policy=policy, dtype="float32", device="cpu",
        **{"num_pages": 64, "max_requests": 4, **llm_options},
    )  # fmt: skip


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def tokens(llm: LLM, rows, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompt_token_ids=rows, sampling_params=params)]


@cache
def reference(family: str, sampled: bool) -> list[list[int]]:
    params = SEEDED if sampled else GREEDY
    llm = engine(family, "off", max_requests=1)
    return [tokens(llm, [row], params)[0] for row in prompts(8)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["off", *POLICIES])
@pytest.mark.parametrize("family", list(FAMILY_FLAGS))
def test_policy_changes_no_token(family: str, policy: str, sampled: bool):
    params = SEEDED if sampled else GREEDY
    alone = engine(family, policy, max_requests=1)
    assert tokens(alone, prompts(8)[:2], params) == reference(family, sampled)[:2]
    batched = engine(family, policy)
    assert tokens(batched, prompts(8), params) == reference(family, sampled)
    assert batched.engine.scheduler.pool.held == 0


@pytest.mark.parametrize("policy", ["full", "dvl"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_anchor_first_layout_and_narrow_blocks_change_no_token(policy: str, sampled: bool):
    params = SEEDED if sampled else GREEDY
    wide = engine("qwen3", policy, AnchorLayout.ANCHOR_FIRST)
    assert wide.engine.worker.policy.width == 9
    assert tokens(wide, prompts(8), params) == reference("qwen3", sampled)
    narrow = engine("qwen3", "full", width=4)
    assert tokens(narrow, prompts(8), params) == reference("qwen3", sampled)


@pytest.mark.parametrize("policy", ["off", "full", "dvl", "confidence"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_mixed_arrivals_preemption_and_prefix_hits_change_no_token(policy: str, sampled: bool):
    """Few pages, requests that come and go, repeated prompts: still each text is the one the target gives alone."""
    params = SEEDED if sampled else GREEDY
    llm = engine("llama", policy, num_pages=13, max_prefill_tokens=17)
    rows = prompts(8)
    expected = reference("llama", sampled)
    rng = random.Random(5)
    order = [rng.randrange(8) for _ in range(24)]
    requests = []
    while order or llm.engine.busy:
        if order and rng.random() < 0.5:
            which = order.pop()
            requests.append((which, llm.engine.add(f"r{len(requests)}", rows[which], params, 11)))
        if requests and rng.random() < 0.02:
            llm.engine.abort(rng.choice(requests)[1].id)
        llm.engine.step()
    finished = [(which, one) for which, one in requests if one.finish_reason is FinishReason.LENGTH]
    assert len(finished) >= 15
    for which, one in finished:
        assert one.output == expected[which]
    for which, one in requests:
        assert one.status is Status.FINISHED
        assert one.output == expected[which][: len(one.output)]
    assert llm.engine.scheduler.preemptions > 0
    assert llm.engine.scheduler.prefix_hits > 0
    assert llm.engine.scheduler.pool.held == 0


def test_some_drafts_are_accepted():
    """The comparison above means something only when multi-token steps occur."""
    llm = engine("llama", "full")
    outputs = llm.generate(prompt_token_ids=prompts(8), sampling_params=GREEDY)
    assert sum(output.metrics.accepted for output in outputs) > 10
    assert max(record.accepted for output in outputs for record in output.metrics.records) >= 2


def test_prefix_hit_keeps_acceptance():
    """Cached pages carry draft keys: a hit drafts exactly as the first run did."""
    llm = engine("llama", "full")
    row = prompts(1, seed=9)[0] * 3
    first = llm.generate(prompt_token_ids=[row], sampling_params=GREEDY)[0]
    again = llm.generate(prompt_token_ids=[row], sampling_params=GREEDY)[0]
    assert again.metrics.cached_tokens >= 16
    assert [r.accepted for r in again.metrics.records] == [r.accepted for r in first.metrics.records]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("policy", ["full", "dvl"])
def test_edits_of_logits_are_exact_under_speculation(policy: str):
    params = SamplingParams(
        temperature=0.9, seed=4, max_tokens=40, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2,
        logit_bias={2: 1.5}, min_tokens=12, stop_token_ids=[3], logprobs=2,
    )  # fmt: skip
    one = engine("llama", "off", max_requests=1)
    expected = [one.generate(prompt_token_ids=[row], sampling_params=params)[0].outputs[0] for row in prompts(6)]
    got = engine("llama", policy).generate(prompt_token_ids=prompts(6), sampling_params=params)
    for want, output in zip(expected, got, strict=True):
        have = output.outputs[0]
        assert have.token_ids == want.token_ids
        assert have.finish_reason == want.finish_reason
        assert have.stop_reason == want.stop_reason
        assert [p.logprob for p in have.logprobs] == pytest.approx([p.logprob for p in want.logprobs], abs=1e-4)
        assert [list(p.top) for p in have.logprobs] == [list(p.top) for p in want.logprobs]
    assert any(want.finish_reason == "stop" for want in expected)
    assert all(len(want.token_ids) >= 12 for want in expected)


@pytest.mark.skipif(not native.status().startswith("loaded"), reason=f"native kernels: {native.status()}")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["full", "dvl", "confidence"])
def test_bfloat16_is_exact_too_on_native_kernels(policy: str, sampled: bool):
    """A row's bits do not depend on the rows beside it, so even rounding agrees."""
    params = SEEDED if sampled else GREEDY
    loaded = target("qwen3")
    half = replace(loaded, model=copy.deepcopy(loaded.model).to(torch.bfloat16))
    draft = copy.deepcopy(drafter("qwen3")).to(torch.bfloat16)
    alone = LLM(half, policy="off", dtype="bfloat16", device="cpu", num_pages=64, max_requests=1)
    llm = LLM(
        half, drafter=draft, predictor=random_predictor(draft, 8), policy=policy, dtype="bfloat16", device="cpu",
        num_pages=16, max_requests=4, slots=3.0, max_prefill_tokens=19,
    )  # fmt: skip
    assert tokens(llm, prompts(8), params) == [tokens(alone, [row], params)[0] for row in prompts(8)]
