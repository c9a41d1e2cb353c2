"""Prompt files and data sets: what is answered, what is context, and which line is wrong."""

import builtins
import json

import pytest

from dscale.config import InputError
from dscale.train.prompts import TEMPLATES, Script, only
from dscale.train.sources import SourceConfig, dataset_source, gather, made_up, prompt_file, user_texts, with_system


def lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_the_last_user_turn_is_answered_and_the_earlier_ones_are_context(tmp_path):
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "not used"},
    ]
    path = lines(tmp_path / "p.jsonl", {"prompt": "one"}, "", {"messages": talk}, {"turns": ["x", "y"]})
    source = prompt_file(path)
    assert [one.text for one in source.scripts] == ["one", "c", "x"]
    assert source.scripts[1].context == (("system", "s"), ("user", "a"), ("assistant", "b"))
    assert all(one.complete and one.source == "p.jsonl" for one in source.scripts)
    assert source.record["count"] == 3
    assert len(source.record["sha256"]) == 64
    assert user_texts(path)[0] == ["one", "a", "c", "x", "y"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ({"no": 1}, "none of its columns"),
        ({"prompt": "a", "turns": ["b"]}, "prompt and turns"),
        ({"prompt": " "}, "`prompt` is empty"),
        ({"turns": []}, "not text or a filled list"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "user"}]}, "no `role` and `content`"),
        ({"messages": [{"role": "user", "content": ""}]}, "last user turn of `messages` is empty"),
    ],
)
def test_a_wrong_row_is_named_with_file_and_line(tmp_path, row, reason):
    path = lines(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(InputError, match=r"p\.jsonl line 2: .*" + reason) as raised:
        prompt_file(path)
    assert "\n" not in str(raised.value)


def test_missing_and_empty_files_and_no_sources_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read"):
        prompt_file(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="holds no rows"):
        prompt_file(lines(tmp_path / "e.jsonl", ""))
    with pytest.raises(InputError, match="nothing to answer"):
        gather(SourceConfig(), 0)
    with pytest.raises(InputError, match=r"corpus\.gym: -1"):
        SourceConfig(gym=-1)


def test_sources_keep_their_order_and_a_system_message_is_put_where_there_is_none(tmp_path):
    path = lines(tmp_path / "p.jsonl", {"prompt": "one"})
    made = gather(SourceConfig(prompts=(str(path),), templates=3, synthesise=2, system="be brief"), 5)
    assert [source.record["kind"] for source in made] == ["prompts", "synthesise", "templates"]
    assert [len(source.scripts) for source in made] == [1, 2, 3]
    assert all(one.context == (("system", "be brief"),) for source in made for one in source.scripts)
    assert not any(one.complete for one in made[1].scripts)
    own = Script("a", True, context=(("system", "own"),))
    assert with_system(own, "other") is own
    assert made_up("templates", only(TEMPLATES, 5), 3).record == made[2].record
    assert made_up("templates", only(TEMPLATES, 6), 3).record["sha256"] != made[2].record["sha256"]


def test_a_local_dataset_is_read_as_file_and_as_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = lines(tmp_path / "d.jsonl", {"question": "q1", "n": 1}, {"question": "q2", "n": 2})
    source = dataset_source(f"{path}:train[:1]")
    assert [one.text for one in source.scripts] == ["q1"]
    assert source.record["column"] == "question"
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    datasets.Dataset.from_list([{"talk": talk}]).save_to_disk(str(tmp_path / "saved"))
    (one,) = dataset_source(f"{tmp_path / 'saved'}:train:talk").scripts
    assert (one.text, one.context) == ("c", (("user", "a"), ("assistant", "b")))
    datasets.Dataset.from_list([{"prompt": "p"}]).to_parquet(str(tmp_path / "d.parquet"))
    assert dataset_source(str(tmp_path / "d.parquet")).scripts[0].text == "p"
    with pytest.raises(InputError, match="no column of prompts; it has n"):
        dataset_source(str(lines(tmp_path / "n.jsonl", {"n": 1})))
    with pytest.raises(InputError, match="no column talk; it has question, n"):
        dataset_source(f"{path}:train:talk")


def test_without_the_datasets_package_one_line_says_so(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="needs the datasets package"):
        dataset_source("owner/name")
