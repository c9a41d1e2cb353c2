"""Prompt files: what is read, spread and refused."""

from __future__ import annotations

import json

import pytest

from dscale.config import InputError
from dscale.evaluate.workloads import read_workload, read_workloads, spread


def test_spread():
    assert spread(5, 0) == spread(5, 9) == (0, 1, 2, 3, 4)
    assert spread(10, 4) == (0, 2, 5, 7)


def test_reads_all_three_kinds_of_row(tmp_path):
    said = [("system", "d"), ("user", "e")]
    rows = [
        {"turns": ["a", "b"]},
        {"prompt": "c"},
        {"messages": [{"role": role, "content": text} for role, text in said]},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    one = read_workload(f"{file}=mine", 0)
    assert (one.name, one.source, one.numbers) == ("mine", "mixed.jsonl", (0, 1, 2))
    assert [[turn["content"] for turn in prompt] for prompt in one.prompts] == [["a"], ["c"], ["d", "e"]]
    assert read_workload(str(file), 1).prompts == one.prompts[:1]
    with pytest.raises(InputError, match="'mixed' is given twice"):
        read_workloads([str(file), str(file)], 0)
    for name in ("a/b", "all", "holdout"):
        with pytest.raises(InputError, match=f"workload '{name}'"):
            read_workloads([f"{file}={name}"], 0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "holds no rows"),
        ("{", "line 1: not JSON"),
        ('{"turns": []}', "`turns` is not text or a filled list"),
        ("[1]", "not an object"),
    ],
)
def test_bad_files(tmp_path, text, part):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(InputError, match=part):
        read_workload(str(tmp_path / "bad.jsonl"), 0)
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read"):
        read_workload(str(tmp_path / "none.jsonl"), 0)
