"""Manifests: order, repetition, hashes, what is warmed up with, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dscale.config import InputError
from dscale.evaluate.manifest import Manifest, Wanted, build_manifest, read_manifest
from dscale.evaluate.prompt_sets import read_prompts
from dscale.evaluate.workloads import Workload


def workload(name: str, count: int) -> Workload:
    prompts = tuple(({"role": "user", "content": f"{name} {number}"},) for number in range(count))
    return Workload(name, "made", "0", tuple(range(10, 10 + count)), prompts)


def test_workloads_take_turns_and_start_over() -> None:
    made = build_manifest([workload("a", 2), workload("b", 9)], Wanted(requests=8, warmup=0, max_tokens=5))
    assert [one.id for one in made.requests] == [
        "a:10#0", "b:10#0", "a:11#0", "b:12#0", "a:10#1", "b:14#0", "a:11#1", "b:16#0"
    ]  # fmt: skip
    assert made.requests[4].prompt_id == made.requests[0].prompt_id
    assert made.requests[4].messages == made.requests[0].messages
    assert made.requests[4].seed != made.requests[0].seed
    summary = made.summary()
    assert (summary["requests"], summary["distinct"], summary["max_tokens"]) == (8, 6, 5)
    assert summary["workloads"] == {"a": 4, "b": 4}


def test_warm_up_takes_prompts_that_are_not_measured_first() -> None:
    made = build_manifest([workload("a", 5)], Wanted(requests=3, warmup=4))
    measured = {one.prompt_id for one in made.requests}
    warm = [one.prompt_id for one in made.warmup]
    assert not measured & set(warm[:2])
    assert set(warm[2:]) <= measured
    assert len({one.id for one in (*made.requests, *made.warmup)}) == 7


def test_the_hash_is_of_the_work_and_the_same_every_time() -> None:
    talks, wanted = [workload("a", 3)], Wanted(requests=4, warmup=1)
    first = build_manifest(talks, wanted).sha256
    assert build_manifest(talks, wanted).sha256 == first
    for change in ({"max_tokens": 9}, {"seed": 1}, {"temperature": 0.5}, {"warmup": 2}, {"requests": 5}):
        assert build_manifest(talks, Wanted(**{"requests": 4, "warmup": 1} | change)).sha256 != first


def test_a_file_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    made = build_manifest([workload("a", 3)], Wanted(requests=4, warmup=1))
    file = tmp_path / "manifest.json"
    made.save(file)
    assert read_manifest(file) == made
    assert read_manifest(file).first(2).requests == made.requests[:2]
    content = json.loads(file.read_text())
    content["requests"][0]["max_tokens"] = 7
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="was changed"):
        read_manifest(file)
    file.write_text(json.dumps(content | {"kind": "bench"}))
    with pytest.raises(InputError, match="no manifest"):
        read_manifest(file)
    file.write_text(json.dumps({**content, "requests": [{"id": 1}]}))
    with pytest.raises(InputError, match="damaged"):
        read_manifest(file)


def test_built_in_prompts_are_many_distinct_and_the_same_for_a_seed() -> None:
    made = read_prompts(["built-in"], 0, seed=0)
    assert [one.name for one in made] == ["stories", "requests", "functions"]
    texts = [prompt[-1]["content"] for one in made for prompt in one.prompts]
    assert len(set(texts)) == len(texts) == 3 * 96
    assert read_prompts(["built-in"], 0, seed=0) == made
    assert read_prompts(["built-in"], 0, seed=1) != made
    assert build_manifest(made, Wanted()).summary()["requests"] == 512


def test_public_sets_come_by_name_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> dict[str, list[object]]:
        asked.append((name, config, split))
        return {"question": ["1 + 1?", "2 + 2?"], "prompt": [["first", "second"]]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    math, chat = read_prompts(["gsm8k", "mt-bench"])
    assert asked == [("openai/gsm8k", "main", "test"), ("HuggingFaceH4/mt_bench_prompts", None, "train")]
    assert (math.name, math.source, len(math.prompts)) == ("gsm8k", "openai/gsm8k", 2)
    assert math.prompts[0][0]["content"].startswith("1 + 1?\nPlease reason")
    assert chat.prompts == (({"role": "user", "content": "first"},),)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="neither a file nor a known set; allowed are gsm8k"):
        read_prompts(["nowhere.jsonl"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs the datasets package"):
        read_prompts(["humaneval"])
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x"}\n')
    with pytest.raises(InputError, match="'a' is given twice"):
        read_prompts([str(file), str(file)])
    with pytest.raises(InputError, match="num-prompts: 0"):
        Wanted(requests=0)
    with pytest.raises(InputError, match="no requests"):
        Manifest("none", ())
