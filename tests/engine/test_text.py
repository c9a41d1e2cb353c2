"""Stop strings over growing text; tokens that come several at a time give the text of tokens that come one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.engine.text import TextStream
from dscale.models.tokenizer import REPLACEMENT, IncrementalDecoder, Tokenizer
from tests.models.test_tokenizer import BYTES, METASPACE, SENTENCEPIECE


class Pieces:
    """A decoder whose token i is the i-th piece."""

    def __init__(self, *pieces: str, tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, ids):
        return "".join(self.pieces[i] for i in ids)

    def finish(self):
        return self.tail


def run(stream: TextStream, count: int) -> list[int | None]:
    return [stream.push([token]) for token in range(count)]


def test_stop_string_across_tokens_cuts_the_text():
    stream = TextStream(Pieces("one ", "tw", "o thr", "ee"), stop=["two"])
    assert run(stream, 3) == [None, None, 1]
    assert stream.text == "one "
    assert stream.stopped_by == "two"


def test_push_tells_with_which_token_a_stop_was_complete():
    stream = TextStream(Pieces("one ", "tw", "o thr", "ee two"), stop=["three", "two"])
    assert stream.push([0, 1, 2, 3]) == 3
    assert (stream.text, stream.stopped_by) == ("one ", "two")


def test_stop_string_can_be_kept():
    stream = TextStream(Pieces("one ", "two three"), stop=["two"], include_stop=True)
    assert run(stream, 2) == [None, 1]
    assert stream.text == "one two"


def test_earliest_stop_wins_and_the_longer_of_two_at_one_place():
    stream = TextStream(Pieces("abcabd"), stop=["abd", "b", "bc"])
    assert stream.push([0]) == 1
    assert (stream.text, stream.stopped_by) == ("a", "bc")


def test_text_that_may_become_a_stop_is_held_back():
    stream = TextStream(Pieces("say <", "e", "x> ", "<end"), stop=["<end>"])
    taken = []
    for token in range(4):
        stream.push([token])
        taken.append(stream.take())
    assert taken == ["say ", "", "<ex> ", ""]
    stream.finish()
    assert stream.take(final=True) == "<end"


def test_min_tokens_ignores_stops_until_then():
    stream = TextStream(Pieces("stop", " go"), stop=["stop"])
    assert stream.push([0], free=1) is None
    assert stream.push([1]) is None
    assert stream.text == "stop go"
    several = TextStream(Pieces("stop", " go", " stop"), stop=["stop"])
    assert several.push([0, 1, 2, 1], free=2) == 3
    assert several.text == "stop go "


def test_tokens_are_decoded_when_their_text_is_asked_for():
    decoder = Pieces("a", "b", "c")
    pushed = []
    decoder.push = lambda ids, push=decoder.push: (pushed.append(list(ids)), push(ids))[1]
    stream = TextStream(decoder)
    assert [stream.push([0]), stream.push([1, 2])] == [None, None]
    assert pushed == []
    assert stream.take() == "abc"
    stream.push([0])
    stream.finish()
    assert pushed == [[0, 1, 2]]
    assert (stream.take(), stream.text, pushed) == ("a", "abca", [[0, 1, 2], [0]])


def test_what_the_decoder_kept_comes_when_the_text_is_asked_for():
    stream = TextStream(Pieces("a", tail="?"))
    stream.push([0])
    stream.finish()
    assert (stream.text, stream.take(final=True)) == ("a?", "a?")


def test_finish_adds_what_the_decoder_kept():
    stream = TextStream(Pieces("a", tail="�"))
    stream.push([0])
    stream.finish()
    assert stream.text == "a�"


class OneByOne:
    """The plainest decoder: one token at a time, and all since the last text but one is decoded twice."""

    def __init__(self, tokenizer: Tokenizer, skip: bool) -> None:
        self.tokenizer, self.skip = tokenizer, skip
        self.ids, self.context, self.done = [], 0, 0

    def push(self, token: int) -> str:
        self.ids.append(token)
        text, known = self.decoded(len(self.ids)), self.decoded(self.done)
        if text.endswith(REPLACEMENT) or len(text) <= len(known):
            return ""
        self.context, self.done = self.done, len(self.ids)
        return text[len(known) :]

    def finish(self) -> str:
        return self.decoded(len(self.ids))[len(self.decoded(self.done)) :]

    def decoded(self, end: int) -> str:
        return self.tokenizer.decode(self.ids[self.context : end], self.skip)


def expected(decoder: OneByOne, ids: list[int], stops: list[str], free: int) -> tuple[str, str | None, int | None]:
    """Text, the stop string that cut it, and the number of tokens that it took."""
    text = ""
    for count, token in enumerate(ids, start=1):
        before, text = len(text), text + decoder.push(token)
        found = earliest(text, stops, before) if count > free else None
        if found is not None:
            return text[: found[0]], found[1], count
    before, text = len(text), text + decoder.finish()
    found = earliest(text, stops, before)
    return (text, None, None) if found is None else (text[: found[0]], found[1], None)


def earliest(text: str, stops: list[str], before: int) -> tuple[int, str] | None:
    """Where the first stop string begins that ends after `before`, and which; of two at one place the longer."""
    ends = [(at, -len(one), one) for one in stops for at in occurrences(text, one) if at + len(one) > before]
    return (min(ends)[0], min(ends)[2]) if ends else None


def occurrences(text: str, part: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(part, at)]


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE, METASPACE], ids=["bytes", "sentencepiece", "metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_does_not_depend_on_how_tokens_come(tokenizer: Tokenizer, data: st.DataObject) -> None:
    written = st.text(alphabet="abc é東🎉", min_size=1, max_size=12).map(lambda text: tokenizer.encode(text, False))
    noise = st.lists(st.integers(0, len(tokenizer) - 1), max_size=4)  # special tokens and half characters too
    ids = [token for part in data.draw(st.lists(st.one_of(written, noise), max_size=5)) for token in part]
    stops = data.draw(st.lists(st.text(alphabet="abc é東", min_size=1, max_size=3), max_size=3))
    free, skip = data.draw(st.integers(-1, 6)), data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 7), max_size=40))
    stream, done, stop = TextStream(IncrementalDecoder(tokenizer, skip), stops), 0, None
    for size in [*sizes, len(ids)]:
        stop = stream.push(ids[done : done + size], free - done)
        if stop is not None:
            stop += done
            break
        done += size
    stream.finish()
    assert (stream.text, stream.stopped_by, stop) == expected(OneByOne(tokenizer, skip), ids, stops, free)
