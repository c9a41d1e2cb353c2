"""On a CUDA GPU with tensor cores of eight bits: their product is the plain version's, and captured steps with a
drafter in eight bits give the text of `off`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dscale.kernels import fp8
from tests.engine.test_lossless import GREEDY, SEEDED, prompts, tokens
from tests.gpu.test_graph_steps import on_gpu, waits

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA GPU that multiplies eight bits",
)
POLICIES = ("full", "fixed:3", "dvl", "dvl:seeded", "confidence", "dspark", "auto")


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 12288), (1520, 576), (48, 96)])
def test_products_are_the_plain_versions(columns: int, depth: int) -> None:
    with torch.no_grad():
        weight = fp8.quantise_rows(normal(0, columns, depth) / depth**0.5)
        for rows in (1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 100, 127, 255, 256, 480, 511, 512):
            x = fp8.quantise_rows(normal(rows, rows, depth))
            fast, plain = (
                made.double()
                for made in (
                    fp8.linear_fp8(x, weight, None, torch.bfloat16), fp8.linear_fp8_torch(x, weight, torch.float32)
                )
            )  # fmt: skip
            assert fast.shape == (rows, columns)
            assert (fast - plain).norm() / plain.norm() < 3e-2, rows
            assert (fast - plain).abs().max() < 0.1, rows


def test_kernels_round_as_the_plain_version() -> None:
    with torch.no_grad():
        for shape in ((1, 4096), (33, 12288), (512, 20480)):
            x = normal(0, *shape)
            made, plain = fp8.quantise_rows(x), fp8.quantise_rows_torch(x)
            torch.testing.assert_close(made.scale, plain.scale, rtol=1e-5, atol=0)
            assert (made.values.float() != plain.values.float()).float().mean() < 1e-3


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_captured_steps_change_no_token(policy: str, sampled: bool) -> None:
    params = SEEDED if sampled else GREEDY
    expected = tokens(on_gpu("off", graphs=False, lag=0), prompts(8), params)
    for graphs in (False, True):
        llm = on_gpu(policy, graphs=graphs, max_prefill_tokens=19, draft_weights="fp8")
        assert (llm.engine.worker.graphs is not None) == graphs
        assert tokens(llm, prompts(8), params) == expected, graphs


def test_the_host_never_waits() -> None:
    llm = on_gpu("dvl", draft_weights="fp8")
    assert waits(llm, SEEDED) == []


def test_the_deterministic_mode_takes_it() -> None:
    """Only the target's rows have to be independent."""
    expected = tokens(on_gpu("off", deterministic=True), prompts(8), SEEDED)
    llm = on_gpu("dvl", deterministic=True, draft_weights="fp8")
    assert tokens(llm, prompts(8), SEEDED) == expected
