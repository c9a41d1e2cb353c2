"""The deterministic mode in Triton's interpreter on a CPU: a token's keys and values have the same bits however it came
into the cache, decoded alone, verified as a draft among others', or recomputed by prefill in one piece or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dscale.config import PAGE_SIZE, SamplingParams
from dscale.engine.llm import LLM
from dscale.engine.request import Request
from dscale.kernels import native
from dscale.kernels import triton as kernels
from dscale.layers.linear import deterministic_twin
from dscale.models.loader import LoadedTarget
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.kernels.exact import exact_products  # noqa: F401  (a fixture)

pytest.importorskip("triton", reason="the triton package is not installed")
from dscale.kernels.triton import attention, linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the kernels")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OTHERS = ([2, 6] * 4,)
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=40)
EMITTED = 3


def twin() -> LoadedTarget:
    target = tiny_target("qwen3", vocab=40)
    model = deterministic_twin(target.model.half())
    return LoadedTarget(model, target.config, None, "tiny")


def engine(policy: str, **options) -> LLM:
    target = twin()
    drafter = tiny_drafter(target, block=4).half() if policy != "off" else None
    return LLM(
        target, drafter=drafter, predictor=None, policy=policy, dtype="float16", device="cpu", slots=2.5,
        num_pages=40, max_requests=4, deterministic=True, **options,
    )  # fmt: skip


def cached(llm: LLM, request: Request, count: int) -> torch.Tensor:
    """Keys and values of the first `count` tokens of a running request, [layers, 2, kv, count, d]."""
    assert request.committed >= count
    at = torch.arange(count)
    pages = torch.tensor(request.pages)[at // PAGE_SIZE]
    return llm.engine.worker.models.target_cache[:, :, pages, :, at % PAGE_SIZE]


def run(llm: LLM, prompt: Sequence[int], emitted: int, others: Sequence[Sequence[int]] = ()) -> Request:
    """Step until a request has emitted enough, among others."""
    request = llm.engine.add("it", prompt, PARAMS, 4)
    for number, other in enumerate(others):
        llm.engine.add(f"other-{number}", other, PARAMS, number)
    while len(request.output) < emitted:
        llm.engine.step()
    return request


@pytest.mark.usefixtures("exact_products")
def test_a_token_has_one_pair_of_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable", lambda x: False)
    monkeypatch.setattr(kernels, "usable", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(attention, "FIXED_ROWS", 16)  # small tiles: the interpreter is slow
    monkeypatch.setattr(linear, "FEW_ROWS", linear.LinearTile(8, 64, 16, 4, 1))
    monkeypatch.setattr(linear, "MANY_ROWS", linear.LinearTile(16, 64, 16, 4, 1))
    alone = engine("off")
    request = run(alone, PROMPT, EMITTED)
    text, count = request.output[:EMITTED], len(PROMPT) + EMITTED - 1
    want = cached(alone, request, count)
    assert want.isfinite().all()
    llm = engine("full")
    verified = run(llm, PROMPT, EMITTED, OTHERS)
    assert verified.output[:EMITTED] == text
    assert max(step.slots for step in verified.steps) > 1
    assert torch.equal(cached(llm, verified, count), want)
    llm = engine("off", max_prefill_tokens=9)
    recomputed = run(llm, PROMPT + text[:-1], 1)
    assert recomputed.output[0] == text[-1]
    assert torch.equal(cached(llm, recomputed, count), want)
