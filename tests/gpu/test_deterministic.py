"""On a CUDA GPU: in the deterministic mode no bit of a row depends on the others, and bfloat16 texts are equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.kernels.activation import silu_mul
from dscale.kernels.attention import AttentionOptions
from dscale.kernels.norm import add_rms_norm
from dscale.models.aliases import cached_alias
from dscale.models.loader import load_target
from tests.conftest import SMOLLM2_PROMPTS
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.engine.test_lossless import GREEDY, SEEDED, prompts, random_predictor, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = {  # out, in
    "qwen3-8b qkv": (6144, 4096), "qwen3-8b output": (4096, 4096), "qwen3-8b gate-up": (24576, 4096),
    "qwen3-8b down": (4096, 12288), "qwen3-4b down": (2560, 9728), "qwen3-4b qkv": (6144, 2560),
    "smollm2 qkv": (960, 576), "smollm2 output": (576, 576), "smollm2 gate-up": (3072, 576),
    "smollm2 down": (576, 1536), "smollm2 head": (49152, 576), "odd": (200, 100),
}  # fmt: skip
POLICIES = ("off", "full", "fixed:3", "dvl", "confidence", "auto")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(shape: str, dtype: torch.dtype) -> None:
    """Of 1 … 256 rows, and of a prefill of 700, whatever the neighbours: the bits of each row alone."""
    from dscale.kernels.triton import linear as fast

    columns, depth = SHAPES[shape]
    x, weight, bias = (
        normal(n, *size, dtype=dtype) for n, size in enumerate([(700, depth), (columns, depth), (columns,)])
    )
    whole = fast.linear(x, weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    assert ((whole.double() - want).norm() / want.norm()).item() < (1e-5 if dtype is torch.float32 else 5e-3)
    counts = range(1, 257) if dtype is torch.bfloat16 else (1, 2, 16, 63, 64, 65, 128, 129, 256)
    assert [count for count in counts if not torch.equal(fast.linear(x[:count], weight, bias), whole[:count])] == []
    for row in (1, 63, 64, 200, 699):
        assert torch.equal(fast.linear(x[row : row + 1], weight, bias), whole[row : row + 1])
    assert torch.equal(fast.linear(x.flip(0)[:100], weight, bias).flip(0), whole[600:])


@pytest.mark.parametrize("shape", ["qwen3-8b output", "qwen3-8b gate-up", "smollm2 down"])
def test_every_tile_makes_the_same_bits(shape: str) -> None:
    from dscale.kernels.triton import linear as fast

    columns, depth = SHAPES[shape]
    x, weight = normal(0, 130, depth), normal(1, columns, depth)
    tiles = [
        fast.LinearTile(rows, size, turn, rows // 16, 3)
        for rows in (64, 128)
        for size in (32, 64, 128)
        for turn in (64, 128)
    ]
    want = fast.linear(x, weight)
    assert [tile for tile in tiles if not torch.equal(fast.linear(x, weight, tile=tile), want)] == []


def test_norms_and_gates_know_no_other_row() -> None:
    x, residual, weight = normal(0, 300, 4096), normal(1, 300, 4096), normal(2, 4096)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    gated = silu_mul(x)
    for rows in (slice(0, 1), slice(7, 40), slice(299, 300)):
        one, other = add_rms_norm(x[rows], residual[rows], weight, 1e-6)
        assert torch.equal(one, normed[rows])
        assert torch.equal(other, total[rows])
        assert torch.equal(silu_mul(x[rows]), gated[rows])


@pytest.mark.parametrize(("heads", "kv", "size"), [(9, 3, 64), (32, 8, 128), (4, 2, 16), (16, 2, 256)])
@pytest.mark.parametrize("window", [None, 300])
def test_a_row_of_attention_does_not_depend_on_its_batch(heads: int, kv: int, size: int, window: int | None) -> None:
    """Verified in blocks of 16, one row at a time, and as a prefill over several chunks of keys: the same bits."""
    from dscale.kernels.triton import attention as fast
    from tests.kernels.test_attention_triton import ragged, tensors

    counts, contexts = [16, 5, 1, 16], [1500, 0, 513, 2031]
    together = replace(ragged(counts, contexts, options=AttentionOptions(deterministic=True)), path="verify")
    q, keys, values = tensors(together, heads, kv, size, torch.bfloat16)
    want = fast.paged_attention(q, keys, values, together, size**-0.5, window)
    chunked = fast.paged_attention(q, keys, values, replace(together, path="prefill"), size**-0.5, window)
    assert torch.equal(chunked, want)
    row = 0
    for lane, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        for j in range(count):
            alone = replace(
                together, lanes=together.lanes[lane : lane + 1], starts=torch.tensor([0, 1], device="cuda"),
                contexts=torch.tensor([context + j], device="cuda"), max_rows=1,
            )  # fmt: skip
            got = fast.paged_attention(q[row + j : row + j + 1], keys, values, alone, size**-0.5, window)
            assert torch.equal(got, want[row + j : row + j + 1]), (lane, j)
        row += count


def tiny(policy: str, **options) -> LLM:
    target = tiny_target("qwen3", vocab=40)
    drafter = tiny_drafter(target)
    predictor = random_predictor(drafter, drafter.config.width) if policy.startswith("dvl") else None
    moved = replace(target, model=copy.deepcopy(target.model).to("cuda", torch.bfloat16))
    options = {"slots": 3.0, "num_pages": 64, "max_requests": 4, "deterministic": True, **options}
    return LLM(
        moved, drafter=copy.deepcopy(drafter).to("cuda", torch.bfloat16), predictor=predictor, policy=policy,
        dtype="bfloat16", device="cuda", **options,
    )  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tiny_texts_in_bfloat16(policy: str, sampled: bool) -> None:
    """Against one request at a time: in company, with tokens recomputed in small chunks, eager."""
    params: SamplingParams = SEEDED if sampled else GREEDY
    rows = prompts(8)
    expected = tokens(tiny("off", max_requests=1), rows, params)
    assert tokens(tiny(policy), rows, params) == expected
    assert tokens(tiny(policy, graphs=False), rows, params) == expected
    few = tiny(policy, num_pages=13, max_prefill_tokens=17)
    assert tokens(few, rows, params) == expected
    assert tokens(few, rows, params) == expected, "with prefixes from the first time"
    assert few.engine.scheduler.preemptions > 0


def smollm2_texts(policy: str, params: SamplingParams, **options) -> Sequence[Sequence[int]]:
    llm = LLM(
        load_target("smollm2-135m", torch.bfloat16, "cuda"), policy=policy, dtype="bfloat16", device="cuda",
        deterministic=True, **{"max_requests": 8, "max_model_len": 512, "num_pages": 300, **options},
    )  # fmt: skip
    outputs = llm.chat([[{"role": "user", "content": one}] for one in SMOLLM2_PROMPTS], params)
    return [one.outputs[0].token_ids for one in outputs]


@pytest.mark.skipif(cached_alias("smollm2-135m") is None, reason="SmolLM2 is not in the cache")
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_smollm2_texts_in_bfloat16(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=5, max_tokens=160, ignore_eos=True)
    expected = smollm2_texts("off", params, max_requests=1)
    for policy in ("off", "full", "dvl", "auto"):
        assert smollm2_texts(policy, params) == expected, policy
    assert smollm2_texts("dvl", params, num_pages=36, max_prefill_tokens=40) == expected, "recomputed"
