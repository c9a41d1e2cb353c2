"""DSCALE on SGLang against this project's engine: the same text, with fewer steps. On request (docs/sglang.md)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dscale import LLM, SamplingParams
from dscale.speculation.predictor import random_predictor
from tests.oracle.make_pair import WIDTH, make_pair, prompts

PYTHON = os.environ.get("DSCALE_SGLANG_PYTHON", "")
SCRIPT = Path(__file__).parent / "sglang_texts.py"
TOKENS = 24

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="DSCALE_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tiny pair, kept in DSCALE_ORACLE_PAIRS where that is set."""
    kept = os.environ.get("DSCALE_ORACLE_PAIRS")
    folder = Path(kept) / request.param if kept else tmp_path_factory.mktemp(request.param)
    if not (folder / "drafter" / "config.json").is_file():
        torch.set_num_threads(1)
        make_pair(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def expected(pair: Path) -> list[list[int]]:
    """Texts of this project's engine without speculation."""
    llm = LLM(str(pair / "target"), policy="off", dtype="float32", device="cpu")
    given = prompts(4)
    wanted = [SamplingParams(temperature=0.0, max_tokens=TOKENS + 3 * i, ignore_eos=True) for i in range(len(given))]
    return [output.outputs[0].token_ids for output in llm.generate(None, wanted, prompt_token_ids=given)]


def run(pair: Path, folder: Path, rounds: list[dict[str, Any]], tp: int = 1, **settings: str) -> Any:
    """What SGLang made of the rounds by DSCALE on `tp` ranks."""
    job, out = folder / "job.json", folder / "out.json"
    record = {"target": str(pair / "target"), "drafter": str(pair / "drafter"), "algorithm": "DSCALE"}
    job.write_text(json.dumps(record | {"rounds": rounds, "tp": tp}))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DSCALE_")} | settings
    done = subprocess.run([PYTHON, SCRIPT, job, out], env=environment, capture_output=True, text=True, timeout=800)
    assert out.is_file(), done.stderr[-4000:]
    return json.loads(out.read_text())


def rounds_for(expected: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy, the same again behind a prefix that is cached, sampled, and a request that must be refused."""
    given = prompts(4)
    longer = [prompt + text[:8] for prompt, text in zip(given, expected, strict=True)]
    warm = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
    return [
        {"prompts": given, "tokens": TOKENS, "sampling": {"temperature": 0}},
        {"prompts": longer, "tokens": TOKENS - 8, "sampling": {"temperature": 0}},
        {"prompts": given, "tokens": TOKENS, "sampling": warm},
        {"prompts": given[:1], "tokens": TOKENS, "sampling": {"temperature": 0, "presence_penalty": 1.0}},
    ]


def check_greedy(made: Any, expected: list[list[int]]) -> None:
    """Two rounds of the expected text in clearly fewer steps than tokens; prefixes were found in the cache."""
    first, second = made["rounds"][:2]
    assert [one["ids"] for one in first] == expected
    assert [one["ids"] for one in second] == [text[8:] for text in expected]
    assert sum(one["steps"] for one in first) < 0.6 * sum(len(text) for text in expected)
    assert all(one["cached"] > 0 for one in second)


def test_texts_are_those_of_plain_decoding(pair: Path, expected: list[list[int]], tmp_path: Path) -> None:
    random_predictor(WIDTH).save(tmp_path / "predictor")
    rounds = rounds_for(expected)
    full = run(pair, tmp_path, rounds, DSCALE_POLICY="full")
    assert full["plugin"]["policy"] == "full"
    assert (full["plugin"]["rows"], full["plugin"]["graphs"]) == (WIDTH, 0)
    check_greedy(full, expected)

    settings = {"DSCALE_POLICY": "dvl", "DSCALE_SLOTS": "4", "DSCALE_PREDICTOR": str(tmp_path / "predictor")}
    dvl = run(pair, tmp_path, rounds, DSCALE_GRAPHS="2", **settings)  # greedy steps over the memory of captured ones
    assert (dvl["plugin"]["policy"], dvl["plugin"]["rows"], dvl["plugin"]["graphs"]) == ("dvl", 4, 3)
    check_greedy(dvl, expected)

    # By this project's noise: the same text under both policies where the first token, SGLang's own, is the same.
    pairs = [(a["ids"], b["ids"]) for a, b in zip(full["rounds"][2], dvl["rounds"][2], strict=True)]
    alike = [(a, b) for a, b in pairs if a[0] == b[0]]
    assert alike
    assert all(a == b for a, b in alike)
    assert [a for a, _ in pairs] != expected

    assert "DSCALE does not support presence_penalty" in dvl["rounds"][3]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a core for each rank")
@pytest.mark.parametrize("kernels", ["0", "interpret"])  # plain torch; Triton's interpreter
def test_two_ranks_give_the_same_text(pair: Path, expected: list[list[int]], tmp_path: Path, kernels: str) -> None:
    settings = {"DSCALE_POLICY": "dvl", "DSCALE_SLOTS": "4", "DSCALE_PREDICTOR": "random", "DSCALE_CHECK_RANKS": "1"}
    settings["DSCALE_TRITON"] = kernels
    made = run(pair, tmp_path, rounds_for(expected)[:3], 2, SGLANG_CPU_OMP_THREADS_BIND="0|1", **settings)
    check_greedy(made, expected)
    assert all(len(one["ids"]) == TOKENS + 3 * i for i, one in enumerate(made["rounds"][2]))  # sampled
    longest = [max(one["steps"] for one in part) for part in made["rounds"]]
    assert made["plugin"]["steps_compared"] >= sum(longest)


def test_a_wrong_setting_ends_the_start(pair: Path, tmp_path: Path) -> None:
    job, out = tmp_path / "job.json", tmp_path / "out.json"
    record = {"target": str(pair / "target"), "drafter": str(pair / "drafter"), "algorithm": "DSCALE", "rounds": []}
    job.write_text(json.dumps(record))
    environment = os.environ | {"DSCALE_POLICY": "fixed:99"}
    done = subprocess.run([PYTHON, SCRIPT, job, out], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode != 0
    assert not out.is_file()
    assert "a block of this drafter has 8 rows" in done.stderr
