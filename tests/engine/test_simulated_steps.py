"""Simulated acceptance in captured steps: nothing of it is frozen, and it is what eager steps accept."""

from __future__ import annotations

import pytest

from dscale import LLM, SamplingParams
from dscale.kernels import native
from tests.engine.test_graphs import Closure, Traced, captured

PARAMS = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=seed) for seed in range(5)]
PROMPTS = [[index + 2] * (9 + 5 * index) for index in range(5)]


def engine(policy: str, lag: int) -> LLM:
    return LLM(
        "random:tiny", predictor="random", policy=policy, simulate=6.09, slots=6.0, dtype="float32", device="cpu",
        max_requests=2, max_model_len=256, lag=lag, max_prefill_tokens=19,
    )  # fmt: skip


def outcome(llm: LLM, count: int = 5) -> list[tuple[list[int], list[int]]]:
    """Tokens and accepted drafts of every request."""
    outputs = llm.generate(prompt_token_ids=PROMPTS[:count], sampling_params=PARAMS[:count])
    return [(one.outputs[0].token_ids, [record.accepted for record in one.metrics.records]) for one in outputs]


@pytest.mark.parametrize("backend", [Closure, Traced])
def test_captured_steps_accept_what_eager_ones_do(backend: type[Closure], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks, whose outcome no batch can change; several different lengths occur."""
    monkeypatch.setattr(native, "usable", lambda x: False)
    plain = outcome(engine("full", lag=0), count=2)
    llm = engine("full", lag=1)
    captured(llm, backend())
    assert outcome(llm, count=2) == plain
    assert len({count for _, accepted in plain for count in accepted}) > 4


@pytest.mark.parametrize(("policy", "backend"), [("dvl", Traced), ("dspark", Closure)])
def test_captured_budgets_follow_made_up_scores(
    policy: str, backend: type[Closure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "usable", lambda x: False)
    llm = engine(policy, lag=1)
    captured(llm, backend())
    made = outcome(llm, count=2)
    accepted = [count for _, counts in made for count in counts]
    assert sum(accepted) / len(accepted) > 2
    assert all(len(tokens) == 40 for tokens, _ in made)
