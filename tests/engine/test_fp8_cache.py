"""Keys and values in eight bits: the text of every policy is that of `off` with the same cache."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from dscale.config import EngineConfig, InputError
from dscale.engine import llm as module
from dscale.engine.llm import LLM
from dscale.engine.request import FinishReason
from dscale.kernels import native
from dscale.speculation.state import CacheTypes
from tests.engine.pairs import FAMILY_FLAGS
from tests.engine.test_lossless import (
    GREEDY,
    POLICIES,
    SEEDED,
    drafter,
    engine,
    prompts,
    random_predictor,
    reference,
    target,
    tokens,
)

EIGHT = torch.float8_e4m3fn


@cache
def rounded_reference(family: str, sampled: bool) -> list[list[int]]:
    """What the target says alone, one request at a time, over rounded keys and values."""
    llm = engine(family, "off", max_requests=1, kv_cache_dtype="fp8")
    return [tokens(llm, [row], SEEDED if sampled else GREEDY)[0] for row in prompts(8)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["off", *POLICIES])
def test_policies_agree_over_rounded_keys(policy: str, sampled: bool) -> None:
    params, want = SEEDED if sampled else GREEDY, rounded_reference("qwen3", sampled)
    for draft, rows in (("fp8", 512), ("auto", 7)):
        options = {"kv_cache_dtype": "fp8_e4m3", "draft_kv_cache_dtype": draft, "max_prefill_tokens": rows}
        llm = engine("qwen3", policy, **options)
        assert tokens(llm, prompts(8), params) == want
        assert llm.engine.scheduler.pool.held == 0


@pytest.mark.parametrize("family", list(FAMILY_FLAGS))
def test_rounding_matters_and_only_the_targets(family: str) -> None:
    assert rounded_reference(family, False) != reference(family, False)
    llm = engine(family, "full", draft_kv_cache_dtype="fp8")
    models = llm.engine.worker.models
    assert models.draft_cache is not None
    assert (models.target_cache.dtype, models.draft_cache.dtype) == (torch.float32, EIGHT)
    assert tokens(llm, prompts(8), GREEDY) == reference(family, False)
    assert models.draft_cache.view(torch.uint8).count_nonzero() > 1000


@pytest.mark.parametrize("policy", ["off", "full", "dvl", "confidence"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_mixed_arrivals_preemption_and_prefix_hits_change_no_token(policy: str, sampled: bool) -> None:
    params, want = SEEDED if sampled else GREEDY, rounded_reference("llama", sampled)
    options = {"kv_cache_dtype": "fp8", "draft_kv_cache_dtype": "fp8", "num_pages": 13, "max_prefill_tokens": 17}
    llm, rows, rng = engine("llama", policy, **options), prompts(8), random.Random(5)
    order = [rng.randrange(8) for _ in range(24)]
    requests = []
    while order or llm.engine.busy:
        if order and rng.random() < 0.5:
            which = order.pop()
            requests.append((which, llm.engine.add(f"r{len(requests)}", rows[which], params, 11)))
        llm.engine.step()
    assert all(one.finish_reason is FinishReason.LENGTH for _, one in requests)
    for which, one in requests:
        assert one.output == want[which]
    assert llm.engine.scheduler.preemptions > 0
    assert llm.engine.scheduler.prefix_hits > 0
    assert llm.engine.scheduler.pool.held == 0


@pytest.mark.skipif(not native.status().startswith("loaded"), reason=f"native kernels: {native.status()}")
@pytest.mark.parametrize("policy", ["full", "dvl"])
def test_bfloat16_is_exact_too_on_native_kernels(policy: str) -> None:
    loaded = target("qwen3")
    half = replace(loaded, model=copy.deepcopy(loaded.model).to(torch.bfloat16))
    draft = copy.deepcopy(drafter("qwen3")).to(torch.bfloat16)
    options = {"dtype": "bfloat16", "device": "cpu", "kv_cache_dtype": "fp8"}
    alone = LLM(half, policy="off", num_pages=64, max_requests=1, **options)
    llm = LLM(
        half, drafter=draft, predictor=random_predictor(draft, 8), policy=policy, num_pages=16, max_requests=4,
        slots=3.0, max_prefill_tokens=19, draft_kv_cache_dtype="fp8", **options,
    )  # fmt: skip
    assert tokens(llm, prompts(8), SEEDED) == [tokens(alone, [row], SEEDED)[0] for row in prompts(8)]


def test_the_same_memory_holds_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of target and drafter: 16 tokens, keys and values, (3 + 2) layers of 2 heads of 16."""
    monkeypatch.setattr(module, "free_memory", lambda device: 1 << 20)
    cases = {("auto", "auto"): 5 * 4, ("fp8", "auto"): 3 + 2 * 4, ("auto", "fp8"): 3 * 4 + 2, ("fp8", "fp8"): 5}
    for (target_kind, draft_kind), size in cases.items():
        options = {"kv_cache_dtype": target_kind, "draft_kv_cache_dtype": draft_kind}
        llm = engine("llama", "full", num_pages=None, max_requests=64, memory_fraction=0.25, **options)
        pages = llm.engine.worker.models.target_cache.shape[2]
        assert pages == (1 << 18) // (16 * 2 * 2 * 16 * size)
        assert llm.engine.scheduler.pool.config.num_pages == pages


def test_auto_is_the_models_dtype() -> None:
    model = copy.deepcopy(target("llama").model).to(torch.bfloat16)
    assert CacheTypes.of(EngineConfig(), model) == (torch.bfloat16, torch.bfloat16)
    assert CacheTypes.of(EngineConfig(kv_cache_dtype="fp8"), model) == (EIGHT, torch.bfloat16)
    assert CacheTypes.of(EngineConfig(draft_kv_cache_dtype="fp8_e4m3"), model) == (torch.bfloat16, EIGHT)


@pytest.mark.parametrize("name", ["kv_cache_dtype", "draft_kv_cache_dtype"])
def test_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: 'int8'; allowed are auto, fp8, fp8_e4m3$"):
        LLM("random:tiny", device="cpu", **{name: "int8"})


@pytest.mark.parametrize("name", ["kv_cache_dtype", "draft_kv_cache_dtype"])
def test_a_gpu_without_eight_bits_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnOldGpu:
        is_cuda, device, dtype = True, "cuda", torch.bfloat16

    class OldTarget:
        embedding = OnOldGpu()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InputError, match=f"^{name}: fp8 needs compute capability 8.9; this GPU has 8.0$"):
        CacheTypes.of(EngineConfig(**{name: "fp8"}), OldTarget())  # type: ignore[arg-type]
