"""A drafter in eight bits beside the one it was made of."""

from __future__ import annotations

import copy

import pytest
import torch

from dscale.config import PAGE_SIZE, InputError
from dscale.layers import fp8 as layers
from dscale.layers.fp8 import Fp8Linear
from dscale.layers.linear import Linear
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.models.fp8 import fp8_drafter, fp8_head
from tests.engine.pairs import tiny_drafter, tiny_target


def some_linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
    linear = Linear(inputs, outputs, bias)
    generator = torch.Generator().manual_seed(outputs)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    return linear.requires_grad_(False)


def error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float((made - exact).norm() / exact.norm())


def test_the_drafter_given_stays_as_it_is_and_shares_its_norms() -> None:
    drafter = tiny_drafter(tiny_target("llama"))
    before, weights = drafter_hash(drafter), copy.deepcopy(drafter.state_dict())
    made = fp8_drafter(drafter)
    assert made.fp8
    assert not drafter.fp8
    assert drafter_hash(drafter) == before
    assert all(torch.equal(weights[name], value) for name, value in drafter.state_dict().items() if name in weights)
    assert made.stack.norm.weight is drafter.stack.norm.weight
    assert made.stack.blocks[0].input_norm.weight is drafter.stack.blocks[0].input_norm.weight
    assert not any(isinstance(module, Linear) for module in made.modules())
    assert not any(parameter.is_meta for parameter in made.parameters())
    assert fp8_drafter(made) is made
    joined = made.context_projection
    made.prepare()
    assert made.context_projection is joined


def test_context_rows_are_close() -> None:
    drafter = tiny_drafter(tiny_target("llama"))
    drafter.prepare()
    taps = torch.randn(5, 2 * 48, generator=torch.Generator().manual_seed(0))
    angles = torch.cat([torch.ones(5, 8), torch.zeros(5, 8)], dim=-1)
    caches = []
    for one in (drafter, fp8_drafter(drafter)):
        cache = torch.zeros(2, 2, 1, 2, PAGE_SIZE, 16)
        with torch.no_grad():
            one.write_context(taps, cache, angles, torch.arange(5))
        caches.append(cache)
    assert 0.005 < error(caches[1], caches[0]) < 0.1


def test_the_head_is_a_copy_and_all_else_is_shared() -> None:
    target = tiny_target("qwen3", vocab=37).model
    reader = fp8_head(target)
    hidden = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    exact = target.logits(hidden)
    assert isinstance(target.head, Linear)
    assert reader.stack is target.stack
    assert reader.embedding is target.embedding
    assert 0.005 < error(reader.logits(hidden), exact) < 0.08
    assert reader.head.bytes == 37 * 48 + 4 * 37


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_padded_for_tensor_cores(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = some_linear(32, 37, bias), torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    plain = Fp8Linear(linear, "a layer")(x)
    monkeypatch.setattr(layers, "on_tensor_cores", lambda weight: True)
    padded = Fp8Linear(linear, "a layer")
    assert padded.values.shape == (48, 32)
    assert torch.equal(padded(x), plain)
    assert padded(x).is_contiguous()
    assert error(plain, linear(x)) < 0.08


def test_odd_inputs_are_refused_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "on_tensor_cores", lambda weight: True)
    with pytest.raises(InputError, match=r"^draft_weights: fp8 needs inputs in multiples of 16; the LM head has 40$"):
        Fp8Linear(some_linear(40, 16), "the LM head")
