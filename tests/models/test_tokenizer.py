"""Incremental text equals whole text; SentencePiece merges equal a scalar reference; folders without a tokenizer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dscale.config import InputError
from dscale.models.gguf_tokenizer import gguf_tokenizer
from dscale.models.tokenizer import IncrementalDecoder, Tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end token: every character over ASCII is spelt by several tokens."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>"))


BYTES = byte_tokenizer()


class FakeFile:
    """The part of GGUFCheckpoint that the tokenizer reads, from a dict."""

    name = "fake.gguf"

    def __init__(self, **values: Any) -> None:
        self.values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}

    def value(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)


PIECES = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0} | {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
PIECES |= {"▁": -20.0, "a": -21.0, "b": -22.0, "c": -23.0}
PIECES |= {"ab": -1.0, "bc": -0.5, "▁a": -2.0, "abc": -3.0, "▁ab": -4.0, "aa": -5.0, "▁▁": -6.0, "▁abc": -7.0}
KINDS = [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259)


def sentencepiece(**changes: Any) -> Tokenizer:
    values = {
        "model": "llama",
        "tokens": list(PIECES),
        "scores": list(PIECES.values()),
        "token_type": KINDS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return gguf_tokenizer(FakeFile(**values | changes))  # type: ignore[arg-type]


def scalar_sentencepiece(text: str) -> list[str]:
    """Join, again and again, the neighbours whose joined piece scores highest (the leftmost of equals)."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(PIECES[one + two], -at) for at, (one, two) in enumerate(pairwise(parts)) if one + two in PIECES]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [piece for part in parts for piece in ([part] if part in PIECES else spelt(part))]


def spelt(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abc é", min_size=1, max_size=12))
def test_sentencepiece_equals_the_scalar_reference(text: str) -> None:
    tokenizer = sentencepiece()
    names = tokenizer.backend.convert_ids_to_tokens(tokenizer.encode(text, add_special=False))
    assert names == scalar_sentencepiece(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_start_token_is_added_where_the_file_says_so() -> None:
    assert sentencepiece().encode("a")[0] == 1
    assert sentencepiece(add_bos_token=False).encode("a")[0] != 1
    assert sentencepiece().encode("a", add_special=False)[0] != 1


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=40))
def test_pushed_text_joins_to_the_whole(text: str, sizes: list[int]) -> None:
    check_pushes(BYTES, BYTES.encode(text), sizes)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_pushed_text_joins_to_the_whole_for_any_bytes(ids: list[int], sizes: list[int]) -> None:
    check_pushes(BYTES, ids, sizes)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abc é東", min_size=1, max_size=20), st.lists(st.integers(1, 3), max_size=30))
def test_pushed_text_joins_to_the_whole_with_joining_spaces(text: str, sizes: list[int]) -> None:
    check_pushes(SENTENCEPIECE, SENTENCEPIECE.encode(text), sizes)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abc é東", min_size=1, max_size=20), st.lists(st.integers(1, 3), max_size=30))
def test_pushed_text_joins_to_the_whole_with_metaspaces(text: str, sizes: list[int]) -> None:
    check_pushes(METASPACE, METASPACE.encode(text), sizes)


SENTENCEPIECE = sentencepiece()


def metaspace() -> Tokenizer:
    """The same pieces as Hugging Face's conversions spell them, with an end token and an added word."""
    fast = FastTokenizer(BPE({piece: index for index, piece in enumerate(PIECES)}, [], byte_fallback=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    fast.add_tokens(["cab"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>"))


METASPACE = metaspace()


def check_pushes(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    decoder, done, parts = IncrementalDecoder(tokenizer), 0, []
    for size in sizes:
        parts.append(decoder.push(ids[done : done + size]))
        done += size
    parts.append(decoder.push(ids[done:]))
    parts.append(decoder.finish())
    assert "".join(parts) == tokenizer.decode(ids)


def test_half_a_character_is_held_back() -> None:
    ids = BYTES.encode("a🎉b")
    decoder = IncrementalDecoder(BYTES)
    assert [decoder.push([token]) for token in ids] == ["a", "", "", "", "🎉", "b"]
    cut = IncrementalDecoder(BYTES)
    assert [cut.push(ids[:3]), cut.finish(), cut.finish()] == ["a", "\ufffd", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    end = BYTES.backend.eos_token_id
    ids = [*BYTES.encode("hi"), end]
    assert BYTES.eos_token_ids == (end,)
    assert (BYTES.decode(ids), BYTES.decode(ids, skip_special_tokens=False)) == ("hi", "hi<end>")
    shown = IncrementalDecoder(BYTES, skip_special_tokens=False)
    assert shown.push(ids) + shown.finish() == "hi<end>"
    assert BYTES.token_text(end) == "<end>"


def test_saved_tokenizer_reads_back(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path, [3])
    assert again.eos_token_ids == (3, BYTES.backend.eos_token_id)
    assert again.encode("né") == BYTES.encode("né")
    assert len(again) == 257


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no usable tokenizer") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="has no chat template"):
        BYTES.chat([{"role": "user", "content": "hi"}])
    templated = byte_tokenizer()
    templated.backend.chat_template = "{{ raise_exception('system comes first') }}"
    with pytest.raises(InputError, match=r"refuses them .*system comes first"):
        templated.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(InputError, match="messages: empty"):
        templated.chat([])
    with pytest.raises(InputError, match="tokenizer model 'bert' is not supported"):
        sentencepiece(model="bert")
    with pytest.raises(InputError, match=r"tokenizer.ggml.scores is missing"):
        sentencepiece(scores=None)
