"""The real model: the engine says what transformers says, and every policy says what `off` says.

Needs SmolLM2-135M-Instruct from the cache or the package registry; skipped with the reason where neither is there.
"""

from __future__ import annotations

import pytest

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.models.aliases import shipped_drafter, shipped_predictor
from dscale.models.loader import LoadedTarget

POLICIES = ("full", "fixed:4", "dvl", "dvl:seeded", "confidence", "auto")
QUESTIONS = (
    "A farmer has 12 hens. Each lays 5 eggs a week. How many eggs are there after 3 weeks? Think step by step.",
    "Write a Python function that counts the vowels of a word.",
    "What does a compiler do?",
    "Give me three names for a small black dog.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=64)


def engine(target: LoadedTarget, policy: str, **options) -> LLM:
    options = {"dtype": "float32", "device": "cpu", "max_requests": 4, "max_model_len": 512, "slots": 6.0, **options}
    return LLM(target, policy=policy, **options)


def needs_shipped(policy: str) -> None:
    if shipped_drafter("smollm2-135m") is None:
        pytest.skip("no drafter for SmolLM2 in models/")
    if policy.startswith("dvl") and shipped_predictor("smollm2-135m") is None:
        pytest.skip("no predictor for SmolLM2 in models/")


def ask(llm: LLM, params: SamplingParams) -> list[list[int]]:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.outputs[0].token_ids for output in llm.chat(conversations, params)]


@pytest.fixture(scope="module")
def alone(smollm2: LoadedTarget) -> dict[str, list[list[int]]]:
    """What the target says alone, one request at a time."""
    llm = engine(smollm2, "off", max_requests=1)
    return {"greedy": ask(llm, GREEDY), "seeded": ask(llm, SEEDED)}


def test_greedy_text_equals_transformers(smollm2: LoadedTarget, smollm2_greedy):
    llm = engine(smollm2, "off", max_requests=5)
    outputs = llm.generate(
        prompt_token_ids=[one.prompt for one in smollm2_greedy],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True),
    )
    for one, output in zip(smollm2_greedy, outputs, strict=True):
        assert output.outputs[0].token_ids == list(one.tokens)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_every_policy_says_what_the_target_says_alone(smollm2: LoadedTarget, alone, policy: str, kind: str):
    needs_shipped(policy)
    llm = engine(smollm2, policy)
    params = GREEDY if kind == "greedy" else SEEDED
    assert ask(llm, params) == alone[kind]
    assert llm.engine.counters.accepted > 60
    assert llm.engine.scheduler.pool.held == 0


@pytest.mark.parametrize("policy", ["full", "dvl"])
def test_preemption_and_prefix_hits_change_no_token(smollm2: LoadedTarget, alone, policy: str):
    needs_shipped(policy)
    llm = engine(smollm2, policy, num_pages=21, max_requests=4, max_prefill_tokens=24)
    assert ask(llm, SEEDED) == alone["seeded"]
    assert ask(llm, GREEDY) == alone["greedy"]
    assert llm.engine.scheduler.preemptions > 0
    assert llm.engine.scheduler.prefix_hits > 0


def test_stop_string_and_seeds(smollm2: LoadedTarget):
    llm = engine(smollm2, "off")
    question = [{"role": "user", "content": "Explain what a compiler does."}]
    (whole,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=40))
    text = whole.outputs[0].text
    stop = text[30:37]
    (stopped,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=40, stop=[stop]))
    assert stopped.outputs[0].text == text[: text.find(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert len(stopped.outputs[0].token_ids) < len(whole.outputs[0].token_ids)
    (several,) = llm.chat(question, SamplingParams(temperature=1.0, max_tokens=12, n=3, seed=2))
    texts = [one.token_ids for one in several.outputs]
    assert len({tuple(text) for text in texts}) == 3
    (again,) = llm.chat(question, SamplingParams(temperature=1.0, max_tokens=12, n=3, seed=2))
    assert [one.token_ids for one in again.outputs] == texts
