"""Stop strings over growing text."""

from __future__ import annotations

from dscale.engine.text import TextStream


class Pieces:
    """A decoder whose token i is the i-th piece."""

    def __init__(self, *pieces: str, tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, ids):
        return "".join(self.pieces[i] for i in ids)

    def finish(self):
        return self.tail


def run(stream: TextStream, count: int) -> list[bool]:
    return [stream.push(token) for token in range(count)]


def test_stop_string_across_tokens_cuts_the_text():
    stream = TextStream(Pieces("one ", "tw", "o thr", "ee"), stop=["two"])
    assert run(stream, 3) == [False, False, True]
    assert stream.text == "one "
    assert stream.stopped_by == "two"


def test_stop_string_can_be_kept():
    stream = TextStream(Pieces("one ", "two three"), stop=["two"], include_stop=True)
    assert run(stream, 2) == [False, True]
    assert stream.text == "one two"


def test_earliest_stop_wins_and_the_longer_of_two_at_one_place():
    stream = TextStream(Pieces("abcabd"), stop=["abd", "b", "bc"])
    assert stream.push(0)
    assert (stream.text, stream.stopped_by) == ("a", "bc")


def test_text_that_may_become_a_stop_is_held_back():
    stream = TextStream(Pieces("say <", "e", "x> ", "<end"), stop=["<end>"])
    taken = []
    for token in range(4):
        stream.push(token)
        taken.append(stream.take())
    assert taken == ["say ", "", "<ex> ", ""]
    stream.finish()
    assert stream.take(final=True) == "<end"


def test_min_tokens_ignores_stops_until_then():
    stream = TextStream(Pieces("stop", " go"), stop=["stop"])
    assert not stream.push(0, may_stop=False)
    assert not stream.push(1)
    assert stream.text == "stop go"


def test_finish_adds_what_the_decoder_kept():
    stream = TextStream(Pieces("a", tail="�"))
    stream.push(0)
    stream.finish()
    assert stream.text == "a�"
