"""A drafter in eight bits drafts otherwise and changes no token."""

from __future__ import annotations

import pytest

from dscale.config import InputError
from dscale.engine.llm import LLM
from dscale.layers.fp8 import Fp8Linear
from tests.engine.test_lossless import GREEDY, POLICIES, SEEDED, drafter, engine, prompts, reference, target, tokens


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_eight_bits_change_no_token(policy: str, sampled: bool) -> None:
    llm = engine("qwen3", policy, draft_weights="fp8")
    assert tokens(llm, prompts(8), SEEDED if sampled else GREEDY) == reference("qwen3", sampled)


def test_drafts_are_of_the_rounded_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    llm = engine("qwen3", "full", draft_weights="fp8")
    (line,) = (one for one in capsys.readouterr().err.splitlines() if one.startswith("drafter in fp8: 0.05 MiB of"))
    assert line.endswith("and a copy of the LM head of 0.00 MiB")
    models = llm.engine.worker.models
    assert models.drafter is llm.drafter
    assert llm.drafter is not None
    assert llm.drafter.fp8
    assert isinstance(models.reader.head, Fp8Linear)
    assert not isinstance(models.target.head, Fp8Linear)
    assert not drafter("qwen3").fp8
    assert llm.drafter_hash == engine("qwen3", "full").drafter_hash


def test_it_needs_a_drafter_to_matter() -> None:
    llm = LLM(target("llama"), policy="off", dtype="float32", device="cpu", num_pages=64, draft_weights="fp8")
    assert llm.engine.worker.models.reader is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_weights": "int4"}, "draft_weights: 'int4'; allowed are auto, fp8"),
        ({"draft_weights": "fp8", "tensor_parallel": 2}, "draft_weights: fp8 not with tensor_parallel 2"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LLM("random:tiny", device="cpu", **options)
