"""What the arms of benchmarks/sglang_h200.py ask of SGLang, which itself is not started."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import sglang_h200

ARGS = argparse.Namespace(
    target="T", drafter="D", load="dummy", dtype="bfloat16", device="cuda", memory=0.85, tp=1, progress=6.09, trace=""
)


def options(name: str, tp: int = 1) -> dict[str, object]:
    return sglang_h200.engine_options(sglang_h200.parse_arm(name), argparse.Namespace(**vars(ARGS) | {"tp": tp}), 32)


def test_prompt_steps_are_captured_as_the_arm_says() -> None:
    plain = options("dflash+fa3")
    assert (plain["disable_prefill_cuda_graph"], plain["cuda_graph_max_bs_decode"]) == (True, 32)
    assert (plain["speculative_algorithm"], plain["attention_backend"]) == ("DFLASH", "fa3")
    default = options("dscale+fa3+piecewise")
    assert "disable_prefill_cuda_graph" not in default
    assert default["cuda_graph_backend_prefill"] == "tc_piecewise"
    assert 512 in default["cuda_graph_bs_prefill"]  # type: ignore[operator]
    assert options("off+fa3+breakable")["cuda_graph_backend_prefill"] == "breakable"
    eager = options("off+fa3+eager+piecewise")
    assert eager["disable_cuda_graph"] is True
    assert "cuda_graph_backend_prefill" not in eager


def test_ranks_speak_through_nccl_alone() -> None:
    assert "disable_custom_all_reduce" not in options("dscale+fa3")
    assert options("dscale+fa3", tp=2)["disable_custom_all_reduce"] is True


def test_an_arm_that_is_not_known() -> None:
    with pytest.raises(SystemExit, match="'eagle' is not known; allowed are off, dflash, dscale"):
        sglang_h200.parse_arm("eagle+fa3")
