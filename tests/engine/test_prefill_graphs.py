"""Captured prefills on a CPU: fixed memory holds all they read, so the texts are those of eager prefills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dscale.engine.llm import LLM
from dscale.engine.prefill_graphs import LANES, PrefillRunner, capacities
from dscale.kernels import native
from tests.engine.test_lossless import GREEDY, SEEDED, engine, prompts, reference, tokens


class Closure:
    """Replays by calling the prefill again; its rows go where the first ones are."""

    captures = 0

    def capture(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.captures += 1
        fixed = step()
        return fixed, lambda: self.replay(fixed, step)

    def replay(self, fixed: Tensor, step: Callable[[], Tensor]) -> None:
        fixed.copy_(step())

    def seconds(self, before: Callable[[], None], replay: Callable[[], None], repeats: int) -> float:
        raise AssertionError("a prefill is not timed")

    def free(self) -> int:
        return 0


class Traced(Closure):
    """Replays the operations that the capture saw, with whatever the host knew then."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        return super().capture(make_fx(step)())


def captured(llm: LLM, backend: Closure, most: int) -> PrefillRunner:
    worker = llm.engine.worker
    worker.prefills = PrefillRunner(worker.state, worker.models, most, backend)
    return worker.prefills


def test_capacities_end_with_the_most_rows() -> None:
    assert capacities(512) == [64, 128, 256, 384, 512]
    assert capacities(2048)[-4:] == [768, 1024, 1536, 2048]
    assert capacities(19) == [19]
    assert capacities(300) == [64, 128, 256, 300]


@pytest.mark.parametrize("backend", [Closure, Traced])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["off", "dvl"])
def test_replays_give_the_tokens_of_eager_prefills(
    policy: str, sampled: bool, backend: type[Closure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "usable", lambda *_: False)  # its kernels are no torch operations
    llm = engine("qwen3", policy, max_prefill_tokens=70)
    runner = captured(llm, backend(), 70)
    assert tokens(llm, prompts(8), SEEDED if sampled else GREEDY) == reference("qwen3", sampled)
    assert runner.counters.graphs == runner.backend.captures
    assert set(runner._captured) <= {(64, False), (70, False)}


def test_more_chunks_than_lanes_take_several_replays() -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    many = [prompt[:5] for prompt in prompts(LANES + 4)]
    plain = engine("qwen3", "off", max_requests=LANES + 4, max_prefill_tokens=64)
    graphs = engine("qwen3", "off", max_requests=LANES + 4, max_prefill_tokens=64)
    runner = captured(graphs, Closure(), 64)
    for expected, got in zip(
        plain.generate(prompt_token_ids=many, sampling_params=params),
        graphs.generate(prompt_token_ids=many, sampling_params=params),
        strict=True,
    ):
        scores = [[one.logprob for one in output.prompt_logprobs[1:]] for output in (expected, got)]
        assert torch.allclose(*(torch.tensor(row) for row in scores), atol=1e-5)
        assert got.outputs[0].token_ids == expected.outputs[0].token_ids
    assert set(runner._captured) == {(64, True)}, "what nobody scores has no hidden rows"
