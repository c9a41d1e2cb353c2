"""The matrix product with independent rows, in Triton's interpreter on a CPU: values, and bits that do not move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dscale.layers.linear import Linear, deterministic_twin
from tests.kernels.exact import exact_products  # noqa: F401  (a fixture)
from tests.kernels.test_attention_triton import DEVICE, HALF

pytest.importorskip("triton", reason="the triton package is not installed")
from dscale.kernels import triton as kernels
from dscale.kernels.triton import linear as fast


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tensors(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns + depth)
    x = torch.randn(rows, depth, generator=generator)
    weight = torch.randn(columns, depth, generator=generator) / depth**0.5
    bias = torch.randn(columns, generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", {HALF, torch.float16, torch.float32})
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(1, 40, 48), (7, 128, 64), (65, 200, 100), (130, 72, 576), (3, 130, 2048), (0, 8, 16)],
)
def test_values(dtype: torch.dtype, biased: bool, rows: int, columns: int, depth: int) -> None:
    x, weight, bias = tensors(rows, columns, depth, dtype)
    got = fast.linear(x, weight, bias if biased else None)
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert got.dtype is dtype
    assert got.shape == want.shape
    exact = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=exact, atol=exact)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    ("dtype", "columns", "depth"), [(HALF, 72, 64), (HALF, 40, 2176), (torch.float32, 72, 64), (torch.float32, 8, 2100)]
)
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype, columns: int, depth: int) -> None:
    """Alone, among 17, 64 and 129 rows, beside other neighbours, as a strided view: the same bits."""
    x, weight, bias = tensors(129, columns, depth, dtype)
    chosen = [0, 16, 63, 64, 128]
    alone = {row: fast.linear(x[row : row + 1], weight, bias) for row in chosen}
    for count in (17, 64, 129):
        got = fast.linear(x[:count], weight, bias)
        assert [torch.equal(got[row : row + 1], alone[row]) for row in chosen if row < count].count(False) == 0, count
    others = torch.randn_like(x) * 100
    others[5] = x[16]
    assert torch.equal(fast.linear(others, weight, bias)[5:6], alone[16])
    wide = torch.cat([x, others], dim=1)
    assert torch.equal(fast.linear(wide[60:65, :depth], weight, bias)[4:], alone[64])


@pytest.mark.usefixtures("exact_products")
def test_parts_added_apart_or_in_turn_are_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = tensors(20, 136, 3100, HALF)
    assert fast.parts_of(136, 3100) == 3
    apart = fast.linear(x, weight, bias)
    monkeypatch.setattr(fast, "PROGRAMS", 1)  # already enough tiles: one program takes all parts
    monkeypatch.setattr(fast, "parts_of", lambda columns, depth: 3)
    assert torch.equal(apart, fast.linear(x, weight, bias))


def test_parts_follow_from_the_weight_alone() -> None:
    """Qwen3-8B's projections: qkv, output, gate and up, down, head; then SmolLM2's, which are small."""
    shapes = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (576, 1536), (49152, 576)]
    assert [fast.parts_of(*shape) for shape in shapes] == [3, 4, 1, 4, 1, 1, 1]


def test_a_twin_shares_parameters_and_alone_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable", lambda x: not torch.is_grad_enabled())
    called = []
    monkeypatch.setattr(fast, "linear", lambda x, weight, bias: called.append(weight) or x @ weight.T)
    model = torch.nn.Sequential(Linear(8, 4), torch.nn.SiLU(), Linear(4, 2)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_()
    twin = deterministic_twin(model)
    assert [one.data_ptr() for one in twin.parameters()] == [one.data_ptr() for one in model.parameters()]
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), twin(x))
    assert [one is two for one, two in zip(called, [model[0].weight, model[2].weight], strict=True)] == [True, True]
