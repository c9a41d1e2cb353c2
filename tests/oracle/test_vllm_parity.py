"""DScale against vLLM on CPU, float32: equal greedy tokens, equal steps, drafts and accepted drafts (docs/oracles.md).

Runs only where DSCALE_VLLM_PYTHON names the Python interpreter of an environment with vLLM. DSCALE_ORACLE_PAIRS may
name a folder that keeps the trained pairs between runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dscale import LLM, SamplingParams
from tests.oracle.make_pair import WIDTH, make_pair, prompts

INTERPRETER = os.environ.get("DSCALE_VLLM_PYTHON")
TOKENS, PROMPTS = 48, 16
SCRIPT = Path(__file__).with_name("vllm_dflash.py")

pytestmark = [
    pytest.mark.skipif(not INTERPRETER, reason="DSCALE_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained target and drafter of the family."""
    kept = os.environ.get("DSCALE_ORACLE_PAIRS")
    folder = (Path(kept) if kept else tmp_path_factory.mktemp("pairs")) / request.param
    if not (folder / "drafter" / "model.safetensors").is_file():
        make_pair(folder, request.param)
    return folder


@cache
def ask_vllm(pair: Path, *options: str) -> dict[str, Any]:
    """The record of vllm_dflash.py for the test's prompts."""
    command = [str(INTERPRETER), str(SCRIPT), str(pair / "target"), "--max-tokens", str(TOKENS), *options]
    done = subprocess.run(
        command, input=json.dumps(prompts(PROMPTS)), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def engine(pair: Path, policy: str, width: int | None = None) -> LLM:
    drafter = str(pair / "drafter") if policy != "off" else None
    return LLM(str(pair / "target"), drafter=drafter, predictor=None, policy=policy, width=width, dtype="float32")


def generate(llm: LLM, rows: list[list[int]], tokens: int) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return llm.generate(prompt_token_ids=rows, sampling_params=params)


def test_greedy_tokens_are_vllms_without_speculation(pair: Path) -> None:
    theirs = ask_vllm(pair)["token_ids"]
    assert [output.outputs[0].token_ids for output in generate(engine(pair, "off"), prompts(PROMPTS), TOKENS)] == theirs


@pytest.mark.parametrize("width", [WIDTH, 4])
def test_tokens_and_draft_counts_are_vllms(pair: Path, width: int) -> None:
    """vLLM samples the first token before it drafts, DScale drafts from the last prompt token: to compare step by step
    DScale is given vLLM's first token as the end of its prompt."""
    theirs = ask_vllm(pair, "--drafter", str(pair / "drafter"), "--width", str(width))
    assert theirs["batch"]["accepted"] > PROMPTS * 5  # else the comparison says little
    rows = [[*prompt, tokens[0]] for prompt, tokens in zip(prompts(PROMPTS), theirs["token_ids"], strict=True)]
    outputs = generate(engine(pair, "full", width), rows, TOKENS - 1)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens[1:] for tokens in theirs["token_ids"]]
    for output, request in zip(outputs, theirs["requests"], strict=True):
        # The last step may overrun the cap: vLLM counts its drafts in full, DScale those whose tokens were kept.
        overrun = 1 + request["steps"] + request["accepted"] - TOKENS
        kept = request["accepted"] - max(overrun - 1, 0)
        metrics = output.metrics
        assert (metrics.steps, metrics.drafted, metrics.accepted) == (request["steps"], request["drafted"], kept)
    assert sum(output.metrics.drafted for output in outputs) == theirs["batch"]["drafted"]
