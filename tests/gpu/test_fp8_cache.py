"""On a CUDA GPU that knows eight bits: captured steps over a cache in eight bits give the text of `off` over it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from dscale.engine.llm import LLM
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.engine.test_lossless import GREEDY, SEEDED, prompts, random_predictor, tokens
from tests.gpu.test_graph_steps import on_gpu, waits

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA GPU that knows eight bits",
)
POLICIES = ("off", "full", "fixed:3", "dvl", "dvl:seeded", "confidence", "dspark", "auto")
EIGHT = {"kv_cache_dtype": "fp8", "draft_kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_captured_steps_give_the_text_of_off(policy: str, sampled: bool) -> None:
    """In the deterministic mode: else a last bit of float32 may decide how a key is rounded."""
    params = SEEDED if sampled else GREEDY
    alone = on_gpu("off", graphs=False, lag=0, deterministic=True, kv_cache_dtype="fp8")
    expected = tokens(alone, prompts(8), params)
    for graphs in (False, True):
        llm = on_gpu(policy, graphs=graphs, max_prefill_tokens=19, deterministic=True, **EIGHT)
        assert (llm.engine.worker.graphs is not None) == graphs
        assert llm.engine.worker.models.target_cache.dtype is torch.float8_e4m3fn
        assert tokens(llm, prompts(8), params) == expected, graphs


def test_the_drafters_cache_changes_no_token() -> None:
    expected = tokens(on_gpu("off"), prompts(8), SEEDED)
    assert tokens(on_gpu("full", draft_kv_cache_dtype="fp8"), prompts(8), SEEDED) == expected
    assert tokens(on_gpu("off", kv_cache_dtype="fp8"), prompts(8), SEEDED) != expected


@pytest.mark.parametrize("policy", ["full", "dvl", "auto"])
def test_deterministic_bfloat16_is_exact_too(policy: str) -> None:
    loaded = tiny_target("qwen3")
    half = replace(loaded, model=copy.deepcopy(loaded.model).to("cuda", torch.bfloat16))
    draft = tiny_drafter(loaded).to("cuda", torch.bfloat16)
    options = {"dtype": "bfloat16", "device": "cuda", "deterministic": True}
    alone = LLM(half, policy="off", num_pages=64, max_requests=1, kv_cache_dtype="fp8", **options)
    llm = LLM(
        half, drafter=draft, predictor=random_predictor(draft, 8) if policy == "dvl" else None, policy=policy,
        num_pages=16, max_requests=4, slots=3.0, max_prefill_tokens=19, **options, **EIGHT,
    )  # fmt: skip
    for params in (GREEDY, SEEDED):
        assert tokens(llm, prompts(8), params) == [tokens(alone, [row], params)[0] for row in prompts(8)]


def test_the_host_never_waits() -> None:
    llm = on_gpu("dvl", **EIGHT)
    assert waits(llm, SEEDED) == []
