"""What benchmarks/sglang_tp.py makes of texts and of processes that fail; SGLang itself is not started."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import sglang_tp


def arguments(folder: Path, **given: Any) -> argparse.Namespace:
    known = {
        "pairs": folder, "families": "qwen3,llama", "tp": 2, "prompts": 3, "tokens": 8, "operations": "native",
        "torch_nccl": False, "device": "cuda", "together": 2, "each": 20.0, "tail": 3, "logs": str(folder / "logs"),
    }  # fmt: skip
    return argparse.Namespace(**known | given)


def answers(*texts: list[int], steps: int | None = 2) -> list[dict[str, Any]]:
    return [{"ids": text, "steps": steps, "cached": 0} for text in texts]


def test_texts_are_compared_with_those_of_their_reference() -> None:
    plain = {"family": "qwen3", "arm": "off", "tp": 1, "dtype": "float32", "plugin": None}
    plain["rounds"] = {"greedy": answers([1, 2, 3], [4, 5, 6], steps=None)}
    one = plain | {"arm": "dscale+dvl+4", "plugin": {"graphs": 3}}
    one["rounds"] = {"greedy": answers([1, 2, 3], [4, 5, 6]), "seeded": answers([7, 8, 9], [1, 1, 1])}
    two = one | {"tp": 2, "plugin": {"steps_compared": 9}}
    two["rounds"] = {"greedy": answers([1, 2, 3], [4, 5, 7]), "seeded": answers([7, 8, 9], [2, 1, 1])}
    failed = {"family": "qwen3", "arm": "dscale+full", "tp": 2, "dtype": "float32", "problem": "exit code 1"}
    rows = sglang_tp.report([plain, one, two, failed])
    found = [(row["arm"], row["tp"], row.get("sampling"), row.get("comparable"), row.get("equal")) for row in rows]
    assert found == [
        ("off", 1, "greedy", None, None),  # the reference itself
        ("dscale+dvl+4", 1, "greedy", 2, 2),
        ("dscale+dvl+4", 1, "seeded", None, None),
        ("dscale+dvl+4", 2, "greedy", 2, 1),
        ("dscale+dvl+4", 2, "seeded", 1, 1),  # the other text starts with another token of SGLang's own
        ("dscale+full", 2, None, None, None),
    ]
    assert rows[3]["tokens_before_difference"] == [2]
    assert (rows[3]["steps"], rows[3]["steps_compared"], rows[0]["steps"]) == (4, 9, None)
    assert rows[5]["problem"] == "exit code 1"


def test_arms_of_one_rank_come_first_and_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    args = arguments(tmp_path)
    planned = sglang_tp.plan(args)
    assert [one[2] for one in planned] == [1, 1, 1, 1, 2, 2, 2, 2]
    children = [sglang_tp.Child(one, i, "float32", args, tmp_path / str(i)) for i, one in enumerate(planned)]
    variables = [child.variables() for child in children]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in variables] == ["4", "6", "4", "6", "4,6", "4,6", "4,6", "4,6"]
    assert [one["DSCALE_CHECK_RANKS"] for one in variables] == list("00001111")
    assert variables[0]["NCCL_NVLS_ENABLE"] == "0"
    jobs = [child.job() for child in children]
    assert [job["options"].get("disable_custom_all_reduce") for job in jobs[3:5]] == [None, True]
    assert len({job["options"]["nccl_port"] for job in jobs}) == len(jobs)
    assert {job["options"]["attention_backend"] for job in jobs} == {"dscale"}
    assert [job["kinds"] for job in jobs[:2]] == [["greedy"], ["greedy", "seeded"]]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import sys; print('a'); print('b'); print('c'); sys.exit('why it failed')", "exit code 1"),
        ("import time; print('started', flush=True); time.sleep(60)", "did not end within 2 s"),
    ],
)
def test_what_fails_or_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    texts = tmp_path / "texts.py"
    texts.write_text(script)
    monkeypatch.setattr(sglang_tp, "TEXTS", texts)
    args = arguments(tmp_path, each=2.0 if "sleep" in script else 60.0)
    if "sleep" in script:
        monkeypatch.setattr(sglang_tp, "SHORTEST", 1.0)
    child = sglang_tp.Child(("llama", "dscale+full", 2), 0, "float32", args, tmp_path / "work")
    row = child.run(time.time() + 60)
    assert row["problem"] == problem
    assert row["log"] == (["started"] if "sleep" in script else ["b", "c", "why it failed"])
    assert child.run(time.time() - 1)["problem"] == "time is up"
