"""The whole engine on the Triton kernels, interpreted on a CPU: the same tokens as on plain torch."""

from __future__ import annotations

import pytest
import torch

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.kernels import native
from dscale.kernels import triton as kernels
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.speculation.predictor import Predictor, PredictorConfig
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.kernels.exact import round_as_a_chip

pytest.importorskip("triton", reason="the triton package is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the engine's own tests run the kernels")

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=3),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=3),
}


def answers(policy: str, params: SamplingParams, **options: str) -> list[list[int]]:
    target = tiny_target("qwen3", vocab=40)
    drafter = tiny_drafter(target, block=4)
    torch.manual_seed(3)
    predictor = Predictor(PredictorConfig(4, drafter_hash(drafter))).eval().requires_grad_(False)
    llm = LLM(
        target, drafter=drafter, predictor=predictor, policy=policy, dtype="float32", device="cpu", slots=2.5,
        num_pages=64, max_requests=4, **options,
    )  # fmt: skip
    prompts = [[3, 1, 4, 1, 5, 9], [2, 6] * 12]
    return [one.outputs[0].token_ids for one in llm.generate(prompt_token_ids=prompts, sampling_params=params)]


@pytest.mark.parametrize(("policy", "kind"), [("dvl", "seeded"), ("dvl:seeded", "greedy")])
def test_same_tokens(policy: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable", lambda x: False)
    plain = answers(policy, PARAMS[kind])
    monkeypatch.setattr(kernels, "usable", lambda x: not torch.is_grad_enabled())
    assert answers(policy, PARAMS[kind]) == plain
    assert [len(one) for one in plain] == [3, 3]


def test_same_tokens_over_caches_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"kv_cache_dtype": "fp8", "draft_kv_cache_dtype": "fp8"}
    round_as_a_chip(monkeypatch)
    monkeypatch.setattr(native, "usable", lambda x: False)
    plain = answers("dvl", PARAMS["greedy"], **options)
    monkeypatch.setattr(kernels, "usable", lambda x: not torch.is_grad_enabled())
    assert answers("dvl", PARAMS["greedy"], **options) == plain
    assert [len(one) for one in plain] == [3, 3]
