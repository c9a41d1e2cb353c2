"""Tokenising, selecting, splitting and packing; the tokenizer here splits at characters."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from dscale.config import InputError
from dscale.train.artifacts import silent
from dscale.train.corpus import REASONS, Selection, bare_text, places
from dscale.train.corpus_config import CorpusConfig
from dscale.train.dedup import Evaluation, Turns, prompt_ids
from dscale.train.generation import Conversations, join
from dscale.train.packing import in_pieces, pack
from dscale.train.prompts import STEPS_SUFFIX, Script
from dscale.train.rows import join_rows, read_rows, write_rows
from dscale.train.scripts import Draws, Frames, end_tokens, tokenise


class Characters:
    """One token per character; a template of `<user>`, `[assistant]` and `{system}`, thinking as `!`."""

    special_ids = frozenset([ord(">")])

    def encode(self, text, add_special=True):
        return [ord(c) for c in text]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def render(self, messages, enable_thinking):
        marks = {"user": "<{}>", "assistant": "[{}]", "system": "{{{}}}"}
        spoken = "".join(marks[one["role"]].format(one["content"]) for one in messages)
        return "s" + spoken + "=" + ("!" if enable_thinking else "")


def spelt(padded, lengths, row):
    return "".join(map(chr, padded[row, : lengths[row]]))


def talks(turns, answer=10, script=None, temperature=0.0, ended=True):
    """Conversations of prefix 2, these turns (texts), a closing token and `answer` tokens."""
    texts = [[1, 2, *(ord(c) for c in turn), 3, *range(100, 100 + answer)] for turn in turns]
    joined, count = Turns.of(texts), len(turns)
    lengths = np.array([len(turn) for turn in turns], np.int32)
    return Conversations(
        tokens=joined.tokens,
        bounds=joined.bounds,
        turn=np.full(count, 2, np.int32),
        turn_end=2 + lengths,
        start=3 + lengths,
        script=np.arange(count) if script is None else np.array(script),
        answer=np.zeros(count, np.int32),
        temperature=np.full(count, temperature, np.float32),
        ended=np.full(count, ended),
    )


def reasons(made, evaluation=None, **config):
    making = SimpleNamespace(config=CorpusConfig(**config))
    drop = Selection(making, evaluation, silent).reasons(made, prompt_ids(made.turns))
    return [REASONS[at] if at >= 0 else "" for at in drop]


def test_scripts_become_head_and_tail_with_earlier_turns_as_context():
    context = (("system", "x"), ("user", "u"), ("assistant", "a"))
    wanted = [Script("ab ", False, "?"), Script("cd", True, "!"), Script("ef", True, context=context)]
    made = tokenise(wanted, 5, Frames(Characters()), Draws(greedy=1.0), 50, turn_cap=9)
    assert [spelt(made.head, made.head_length, row) for row in range(3)] == ["s<ab", "s<cd!", "s{x}<u>[a]<ef"]
    assert [spelt(made.tail, made.tail_length, row) for row in range(3)] == ["?>=", ">=", ">="]
    assert made.turn.tolist() == [2, 2, 5]
    assert made.closing.tolist() == [2, 2, 2]
    assert made.complete.tolist() == [False, True, True]
    assert made.script.tolist() == [5, 6, 7]
    assert made.shared == 1
    assert made.take(np.array([0, 1])).shared == 2
    assert spelt(tokenise(wanted[:1], 0, Frames(Characters(), True), Draws(), 50, 9).tail, [4], 0) == "?>=!"
    assert end_tokens(Characters(), (7,), Frames(Characters())) == (7, ord(">"))


def test_prompts_that_could_grow_too_long_are_left_out():
    wanted = [Script("a" * 10, True), Script("a" * 10, False), Script("a" * 5, False)]
    made = tokenise(wanted, 0, Frames(Characters()), Draws(), 16, turn_cap=6)  # template: 4 tokens
    assert made.script.tolist() == [0, 2]


def test_seeds_and_temperatures_belong_to_the_script_and_at_most_one_answer_is_greedy():
    draws = Draws(seed=3, answers=4, greedy=0.5, temperature=0.9)
    wanted = [Script(f"{n}", True) for n in range(200)]
    made = tokenise(wanted, 0, Frames(Characters()), draws, 50, 9)
    later = tokenise(wanted[150:], 150, Frames(Characters()), draws, 50, 9)
    for field in ("seed", "turn_seed", "temperature", "script", "answer"):
        assert np.array_equal(getattr(made, field)[600:], getattr(later, field))
    assert len(set(made.seed.tolist())) == 800
    assert len(set(made.turn_seed.tolist())) == 200
    cold = (made.temperature == 0).reshape(200, 4).sum(1)
    assert set(cold.tolist()) == {0, 1}
    assert 0.85 < cold.mean() < 1.0  # 1 - 0.5^4
    single = Draws(seed=3, greedy=0.25)
    assert 0.15 < np.mean([single.temperatures(n) == [0.0] for n in range(400)]) < 0.35


def test_the_first_reason_that_applies_is_given():
    made = talks(
        ["hello there", "hello there", "hi", "refused turn", "hello there!", "other turn", "a turn of many words"]
    )
    refused = Evaluation([[ord(c) for c in "refused turn"]], [], 13)
    want = ["", "exact duplicate", "short", "evaluation prompt", "near duplicate", "", ""]
    assert reasons(made, refused, near=0.7) == want
    want[4] = ""
    assert reasons(made, refused, near=1.0) == want
    assert reasons(made, refused, shortest_answer=11) == ["short"] * 7
    cut = talks(["hello there"], ended=False)
    assert reasons(cut) == [""]
    assert reasons(cut, keep_unfinished=False) == ["unfinished"]


def test_all_answers_of_a_prompt_stay_but_another_script_with_it_goes():
    made = talks(["hello there"] * 3 + ["other words"], script=[0, 0, 4, 5])
    assert reasons(made) == ["", "", "exact duplicate", ""]
    first_is_short = join([talks(["hello there"], answer=2, script=[0]), talks(["hello there"] * 2, script=[0, 4])])
    assert reasons(first_is_short) == ["short", "", "exact duplicate"]


def test_parts_follow_the_prompt_in_their_shares_and_none_stays_empty():
    ids = prompt_ids(Turns.of([[n, n + 1] for n in range(4000)]))
    place = places(ids, 0.25, 0.1)
    assert np.array_equal(places(ids[::-1].copy(), 0.25, 0.1), place[::-1])
    assert np.array_equal(places(np.repeat(ids, 2), 0.25, 0.1), np.repeat(place, 2))
    share = np.bincount(place, minlength=3) / 4000
    assert np.allclose(share, [0.65, 0.25, 0.1], atol=0.03)
    few = np.array([3 << 60, 5 << 60, 7 << 60, 7 << 60])
    assert places(few, 0.01, 0.01).tolist() == [2, 1, 0, 0]
    assert places(few, 0.01, 0.0).tolist() == [1, 0, 0, 0]
    assert places(few[:1], 0.01, 0.01).tolist() == [0]


def test_packed_rows_hold_every_conversation_once(tmp_path):
    made = talks([f"turn {'x' * (n % 40)} {n}" for n in range(30)])
    made.temperature[7] = 0.7
    packed = pack(made, np.arange(30), np.arange(30) + 500, 128, bins=4)
    found = []
    for row in range(len(packed.ids)):
        for at in np.flatnonzero(packed.first[row] == np.arange(128)):
            length = int((packed.first[row] == at).sum())
            if length > 1:
                found.append(
                    (packed.ids[row, at : at + length].tolist(), packed.answer[row, at : at + length].tolist())
                )
    want = []
    for n in range(30):
        tokens = made.tokens[made.bounds[n] : made.bounds[n + 1]].tolist()
        want.append((tokens, [False] * (len(tokens) - 10) + [True] * 10))
    order = [want.index(one) for one in found]
    assert sorted(order) == list(range(30))
    assert packed.prompt.tolist() == [n + 500 for n in order]
    assert packed.greedy.tolist() == [n != 7 for n in order]
    assert len(packed.ids) <= 14
    pieces = list(in_pieces(packed, 4))
    assert [len(piece) for piece in pieces[:-1]] == [4] * (len(pieces) - 1)
    assert all(np.array_equal(getattr(join_rows(pieces), f.name), getattr(packed, f.name)) for f in fields(packed))
    assert [len(p.prompt) for p in pieces] == [int((np.diff(p.answer.astype(int)) == 1).sum()) for p in pieces]
    shard = write_rows(tmp_path, "train-0.safetensors", packed, "train")
    again = read_rows(tmp_path, shard)
    assert all(np.array_equal(getattr(packed, f.name), getattr(again, f.name)) for f in fields(packed))


def test_generic_instructions_are_taken_off_evaluation_prompts():
    assert bare_text("How many?" + STEPS_SUFFIX) == "How many?"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"greedy": 1.5}, r"corpus\.greedy: 1\.5"),
        ({"validation": 0.6, "holdout": 0.5}, "nothing to train on"),
        ({"row": 100}, r"corpus\.row: 100 must be a multiple of 128"),
        ({"row": 128}, r"corpus\.row: 128 is under longest_prompt \+ answer_cap = 672"),
        ({"temperature": 0.0}, r"corpus\.temperature"),
        ({"near": 0.0}, r"corpus\.near"),
        ({"generator": "vllm"}, "allowed are auto, engine, lanes"),
        ({"min_p": 0.0}, r"generation\.min_p"),
        ({"part": 0}, r"corpus\.part"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        CorpusConfig(**changes)
