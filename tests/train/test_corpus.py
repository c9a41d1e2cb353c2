"""Selecting, decontaminating and packing conversations; the tokenizer here splits at characters."""

from dataclasses import fields

import numpy as np
import pytest

from dscale.config import InputError
from dscale.train.corpus import (
    CorpusConfig,
    Decontamination,
    ngrams,
    pack,
    read_prompts,
    select,
    tokenise,
    turn_frame,
)
from dscale.train.generation import Conversations
from dscale.train.prompts import STEPS_SUFFIX, Script
from dscale.train.rows import read_rows, write_rows


class Characters:
    """One token per character; the template is `<` turn `>`."""

    def encode(self, text, add_special=True):
        return [ord(c) for c in text]

    def render(self, messages):
        return "s<" + messages[0]["content"] + ">"


def talks(turns, answer=10):
    """Conversations of shared prefix 2, these turns, tail 1 and an answer of `answer` tokens."""
    ends = [2 + len(t) + 1 + answer for t in turns]
    tokens = np.zeros((len(turns), 200), np.uint16)
    for row, turn in enumerate(turns):
        filled = [1, 2, *(ord(c) for c in turn), 3, *range(100, 100 + answer)]
        tokens[row, : len(filled)] = filled
    start = np.array([end - answer for end in ends], np.int32)
    return Conversations(
        tokens, np.full(len(turns), 2, np.int32), start, np.array(ends, np.int32), np.arange(len(turns))
    )


def test_tokenise_splits_scripts_into_head_and_tail():
    made = tokenise([Script("ab ", False, "?"), Script("cd", True, "!")], Characters(), CorpusConfig(greedy=1.0), 50, 0)
    assert turn_frame(Characters()) == ("s<", ">")
    assert made.shared == 2
    assert bytes(made.head[0, : made.head_length[0]].tolist()) == b"s<ab"
    assert bytes(made.tail[0, : made.tail_length[0]].tolist()) == b"?>"
    assert bytes(made.head[1, : made.head_length[1]].tolist()) == b"s<cd!"
    assert bytes(made.tail[1, : made.tail_length[1]].tolist()) == b">"
    assert made.complete.tolist() == [False, True]
    assert made.temperature.tolist() == [0.0, 0.0]


def test_ngrams_are_equal_exactly_for_equal_runs():
    a, b = np.arange(20), np.concatenate([[99], np.arange(3, 18), [98]])
    shared = set(ngrams(a).tolist()) & set(ngrams(b).tolist())
    assert len(shared) == len(ngrams(np.arange(3, 18)))
    assert len(ngrams(np.arange(12))) == 0


def test_decontamination_refuses_equal_and_overlapping_turns_but_not_generic_instructions():
    refused = Decontamination(["the quick brown fox jumps" + STEPS_SUFFIX, "short"], Characters())
    encode = Characters().encode

    def hit(text):
        return refused.refuses(np.array(encode(text)))

    assert hit("short")
    assert hit("the quick brown fox jumps")
    assert hit("xx quick brown fox yy")  # 13 characters in a row
    assert not hit("xx quick brow yy")
    assert not hit("something else" + STEPS_SUFFIX)


def test_select_drops_empty_repeated_and_refused_turns():
    made = talks(["hello there", "hello there", "hi", "refused turn", "other turn"])
    refused = Decontamination(["refused turn"], Characters())
    rows = select(made, CorpusConfig(heldout=0.0), 1, refused)
    assert rows["train"].tolist() == [0, 4]
    assert len(rows["heldout"]) == 0


def test_heldout_share_follows_the_prompt():
    made = talks([f"prompt number {n}" for n in range(400)])
    rows = select(made, CorpusConfig(heldout=0.25), 1, None)
    assert 60 < len(rows["heldout"]) < 140
    again = select(talks([f"prompt number {n}" for n in range(399, -1, -1)]), CorpusConfig(heldout=0.25), 1, None)
    assert sorted((399 - again["heldout"]).tolist()) == rows["heldout"].tolist()


def test_packed_rows_hold_every_conversation_once(tmp_path):
    made = talks([f"turn {'x' * (n % 40)} {n}" for n in range(30)])
    packed = pack(made, np.arange(30), 128, np.ones(30, bool), bins=4)
    found = []
    for row in range(len(packed.ids)):
        for at in np.flatnonzero(packed.first[row] == np.arange(128)):
            length = int((packed.first[row] == at).sum())
            if length > 1:
                found.append(
                    (packed.ids[row, at : at + length].tolist(), int(packed.answer[row, at : at + length].sum()))
                )
    assert sorted(found) == sorted((made.tokens[n, : made.end[n]].tolist(), 10) for n in range(30))
    assert len(packed.ids) <= 14
    assert sorted(packed.prompt.tolist()) == sorted(made.script.tolist())
    shard = write_rows(tmp_path, "train-0.safetensors", packed, "train")
    again = read_rows(tmp_path, shard)
    assert all(np.array_equal(getattr(packed, f.name), getattr(again, f.name)) for f in fields(packed))


def test_a_broken_prompt_file_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"turns": ["a"]}\n{"no": 1}\n')
    with pytest.raises(InputError, match=r"p\.jsonl: not a prompt file"):
        read_prompts(tmp_path / "p.jsonl")
