"""Masks of verification rows against what the grammar's texts say; schemas that can be enforced, and those refused."""

from __future__ import annotations

import json
import pickle
import random
from contextlib import suppress
from itertools import product

import jsonschema
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dscale.config import Grammar, InputError, SamplingParams
from dscale.models.tokenizer import Tokenizer
from dscale.speculation.edits import LogitEdits, apply_edits
from dscale.speculation.grammar import GrammarCompiler, unpack
from dscale.speculation.utf8 import could_be_utf8
from tests.models.test_tokenizer import byte_tokenizer, sentencepiece

pytest.importorskip("xgrammar")
TOKENIZER = byte_tokenizer()
END = len(TOKENIZER) - 1
VOCAB = len(TOKENIZER) + 6  # a head wider than its tokenizer
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
LETTER = {TOKENIZER.encode(chr(byte))[0]: bytes([byte]) for byte in range(128)}
BYTE_OF = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
ID = {letter.decode(): token for token, letter in LETTER.items()}


def rows(state, drafts: list[int], vocab: int = VOCAB) -> list[set[int]]:
    mask = state.allowed(torch.tensor(drafts, dtype=torch.int64))
    assert mask.shape == (len(drafts) + 1, vocab)
    return [set(row.nonzero().flatten().tolist()) for row in mask]


def next_of(choices: list[str], before: str) -> set[int]:
    """Brute force: what may follow when the whole has to be one of the choices."""
    following = {ID[one[len(before)]] for one in choices if one.startswith(before) and len(one) > len(before)}
    return following | ({END} if before in choices else set())


CHOICES = ["ab", "abc", "abd", "b", "bcd", "ca"]


@pytest.mark.parametrize("kind", ["choice", "regex", "ebnf"])
@pytest.mark.parametrize("seed", range(20))
def test_rows_are_masked_as_if_the_drafts_were_emitted(kind: str, seed: int) -> None:
    """Committed text, drafts right and wrong: every row that can be reached holds exactly what may follow."""
    grammar = {
        "choice": Grammar.choice(CHOICES),
        "regex": Grammar("regex", "|".join(CHOICES)),
        "ebnf": Grammar("ebnf", "root ::= " + " | ".join(f'"{one}"' for one in CHOICES)),
    }[kind]
    rng = random.Random(seed)
    state, text = COMPILER.compile(grammar).begin([END]), ""
    while True:
        planned = [*rng.choice([one for one in CHOICES if one.startswith(text)])[len(text) :], None]
        drafts = [END if one is None else ID[one] for one in planned][: rng.randint(0, 5)]
        drafts = [token if rng.random() < 0.7 else rng.choice([*ID.values(), END, VOCAB - 1]) for token in drafts]
        before = text
        for row, allowed in enumerate(rows(state, drafts)):
            assert allowed == next_of(CHOICES, before)
            if row == len(drafts) or drafts[row] not in allowed or drafts[row] == END:
                break
            before += TOKENIZER.decode([drafts[row]])
        emitted = [rng.choice(sorted(next_of(CHOICES, text)))]
        state.commit(emitted)
        if emitted == [END]:
            return
        text += TOKENIZER.decode(emitted)


def random_text(grammar: Grammar, rng: random.Random, steps: int = 400) -> str | None:
    """A text drawn from the masks, in steps of several tokens, or None when it did not end."""
    state, output = COMPILER.compile(grammar).begin([END]), []
    for _ in range(steps):
        (allowed,) = rows(state, [])
        assert allowed, "nothing is allowed"
        closing = allowed & {END, ID['"'], ID["}"], ID["]"]}
        plain = [token for token in allowed if token in LETTER and LETTER[token] >= b" "]
        pool = closing if closing and rng.random() < 0.3 else plain if plain and rng.random() < 0.9 else allowed
        token = rng.choice(sorted(pool))
        if token == END:
            return TOKENIZER.decode(output)
        output.append(token)
        state.commit([token])
    return None


def schema(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties)}


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}
TAGGED = [schema(kind={"const": "a"}, x={"type": "integer"}), schema(kind={"enum": ["b"]}, x={"type": "null"})]
ENFORCED = {
    "bounded": schema(a={"type": "string", "minLength": 2, "maxLength": 5}),
    "range": schema(
        a={"type": "integer", "minimum": -3, "exclusiveMaximum": 120}, b={"type": "number", "minimum": 0.5}
    ),
    "enum beside type": schema(a={"type": "string", "enum": ["x", "y", 3]}, b={"const": {"k": [1, None]}}),
    "pattern": schema(a={"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, b={"type": "string", "pattern": '[^a]"?'}),
    "format gives way": schema(a={"type": "string", "format": "date", "maxLength": 4}),
    "array": schema(a={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
    "tuple": schema(a={"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1]}], "items": False}),
    "optional": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["b"]},
    "required, not described": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["zz"]},
    "types": schema(a={"type": ["string", "null", "integer"], "maxLength": 3}),
    "implied type": schema(a={"minimum": 5}, b={"properties": {"c": {"type": "null"}}}),
    "recursive": {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    "tagged oneOf": schema(a={"oneOf": TAGGED}),
    "anyOf": schema(a={"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}),
    "open": {"type": "object", "additionalProperties": {"type": "integer"}},
    "names": {"type": "object", "propertyNames": {"maxLength": 3}, "maxProperties": 2},
    "keys to escape": schema(**{'a"b\n': {"type": "null"}, "é": {"type": "null"}}),
}


@pytest.mark.parametrize("name", list(ENFORCED))
def test_every_complete_text_parses_and_validates(name: str) -> None:
    validator = jsonschema.Draft202012Validator(ENFORCED[name])
    texts = [random_text(Grammar.json_schema(ENFORCED[name]), random.Random(seed)) for seed in range(12)]
    whole = [text for text in texts if text is not None]
    assert len(whole) >= 6
    for text in whole:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("seed", range(8))
def test_json_object_gives_objects(seed: int) -> None:
    text = random_text(Grammar("json_object"), random.Random(seed))
    assert text is None or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (schema(a={"type": "integer", "multipleOf": 3}), "'multipleOf' at #/properties/a cannot be enforced"),
        (schema(a={"type": "array", "uniqueItems": True}), "'uniqueItems' at #/properties/a"),
        (schema(a={"type": "string", "not": {"const": "a"}}), "'not' at #/properties/a"),
        (schema(a={"enum": [1, 5], "minimum": 4}), "'minimum' beside 'enum' at #/properties/a"),
        (schema(a={"allOf": [{"minimum": 3}, {"maximum": 5}]}), "'allOf' of several schemas"),
        (schema(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "'oneOf' at #/properties/a overlap"),
        (schema(a={"type": "string", "pattern": "a+", "maxLength": 3}), r"'pattern' beside \['maxLength'\]"),
        (schema(a={"type": "string", "pattern": 'a"b'}), "JSON escapes"),
        (schema(a={"type": "string", "pattern": "^[^é]$"}), "JSON escapes"),
        (schema(a={"type": "string", "pattern": "a$b"}), "anchors"),
        (schema(a={"type": "string", "pattern": "(?=a)a"}), "look-around"),
        (schema(a={"$ref": "#/$defs/none"}), "points nowhere"),
        (schema(a={"$ref": "https://example.org/x"}), "points nowhere"),
        (schema(a={"type": "text"}), "type 'text' at #/properties/a; allowed are object"),
        (schema(a={"type": "integer", "minimum": 5, "maximum": 3}), "minimum greater than maximum"),
        ({"type": "object", "patternProperties": {"^a": {}}, "properties": {"ab": {}}}, "'patternProperties' at #"),
        ({"type": "object", "additionalProperties": True, "minProperties": 3}, "'minProperties' at #"),
        (Grammar("json_schema", "{"), "json_schema: not JSON"),
        (Grammar("json_schema", '{"items":' * 300 + "{}" + "}" * 300), "nested deeper than 64"),
        (Grammar("json_schema", "[" * 50_000), "not JSON"),
        (schema(a={"type": "string", "pattern": r"\Aab\Z"}), "anchors"),
        (Grammar("regex", "a$b"), "regex: only \\^ and \\$ are allowed as anchors"),
        (Grammar("regex", "(?i)a"), "regex: flags cannot be enforced"),
        (Grammar("regex", "a(b"), "regex: Regex parsing error at position 4: The parenthesis is not closed"),
        (Grammar("ebnf", 'root ::= "a" x'), 'Rule "x" is not defined'),
        (Grammar("ebnf", "root ::= root"), "no text that this model's tokens can spell"),
        (Grammar("choice", "[1]"), "choice: give a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(grammar: Grammar | dict, message: str) -> None:
    one = grammar if isinstance(grammar, Grammar) else Grammar.json_schema(grammar)
    with pytest.raises(InputError, match=message) as caught:
        COMPILER.compile(one)
    assert "\n" not in str(caught.value)


def test_special_tokens_and_tokens_past_the_tokenizer_are_no_text() -> None:
    (allowed,) = rows(COMPILER.compile(Grammar("regex", ".*")).begin([END]), [])
    assert END in allowed  # the empty text is complete
    assert not allowed & set(range(len(TOKENIZER), VOCAB))
    (started,) = rows(COMPILER.compile(Grammar("regex", ".+")).begin([END]), [])
    assert END not in started


def test_a_stop_id_that_is_text_stays_text() -> None:
    state = COMPILER.compile(Grammar.choice(["a}", "b"])).begin([END, ID["}"]])
    assert rows(state, [ID["a"]]) == [{ID["a"], ID["b"]}, {ID["}"]}]


def test_complete_text_ends_even_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=9, grammar=Grammar.choice(["a", "ab"]))
    state = COMPILER.compile(params.grammar).begin([END])
    edits = LogitEdits.begin(params, [1], VOCAB, [END], grammar=state)
    edited = apply_edits(torch.zeros(3, VOCAB), edits, torch.tensor([ID["a"], ID["b"]]))
    assert [set((row > -torch.inf).nonzero().flatten().tolist()) for row in edited] == [{ID["a"]}, {ID["b"]}, {END}]


def test_grammars_are_compiled_once_and_travel_between_processes() -> None:
    grammar = Grammar.json_schema(ENFORCED["range"])
    assert COMPILER.compile(grammar) is COMPILER.compile(pickle.loads(pickle.dumps(grammar)))
    assert hash(grammar) == hash(Grammar("json_schema", json.dumps(ENFORCED["range"])))


def test_the_oldest_compiled_grammars_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dscale.speculation.grammar.MAX_CACHED", 2)
    compiler = GrammarCompiler(TOKENIZER, VOCAB)
    grammars = [Grammar("regex", text) for text in ("a", "b", "c")]
    a, b = compiler.compile(grammars[0]), compiler.compile(grammars[1])
    assert compiler.compile(grammars[0]) is a
    compiler.compile(grammars[2])
    assert compiler.compile(grammars[0]) is a
    assert compiler.compile(grammars[1]) is not b
    assert compiler._bytes == sum(one.compiled.memory_size_bytes for one in compiler._kept.values())


@pytest.mark.parametrize(
    "bad", [lambda: Grammar("xml"), lambda: Grammar("regex", "a" * 70_000), lambda: Grammar.choice([])]
)
def test_grammars_check_themselves(bad) -> None:
    with pytest.raises(InputError):
        bad()
    with pytest.raises(InputError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, grammar=Grammar("json_object"))


def test_tokenizers_that_put_spaces_between_their_tokens_are_refused() -> None:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    fast = FastTokenizer(WordLevel({"<end>": 0, "a": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
    words = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>"))
    with pytest.raises(InputError, match="puts more between its tokens than they spell"):
        GrammarCompiler(words, 4).compile(Grammar("regex", "ab"))


def test_sentencepiece_tokens_spell_their_text() -> None:
    """Spaces are ▁, bytes are <0x..>, and the space before the first word is not part of the text."""
    tokenizer = sentencepiece()
    state = GrammarCompiler(tokenizer, len(tokenizer)).compile(Grammar.choice(["a bé", "abc"])).begin([2])
    spelt = {tokenizer.backend.convert_ids_to_tokens(id) for id in rows(state, [], len(tokenizer))[0]}
    assert spelt >= {"a", "ab", "abc"}
    assert not spelt & {"b", "▁▁", "</s>"}
    for text in ("a bé", "abc"):
        ids = [id for id in tokenizer.encode(text) if id not in tokenizer.special_ids]
        assert tokenizer.decode(ids) == text


def begins_utf8(start: bytes) -> bool:
    """Brute force: some tail of at most three bytes makes it UTF-8."""
    for tail in (tail for size in range(4) for tail in product(b"\x80\x9f\xa0\xbf", repeat=size)):
        with suppress(UnicodeDecodeError):
            (start + bytes(tail)).decode()
            return True
    return False


def test_texts_are_utf8() -> None:
    """Byte by byte, with drafts: what may follow is exactly what still can become UTF-8."""
    token = {byte: TOKENIZER.backend.convert_tokens_to_ids(symbol) for symbol, byte in BYTE_OF.items()}
    for start in ([], [0xE0], [0xED], [0xED, 0x9F], [0xF0], [0xF4], [0xF1, 0x80], [0xC3]):
        expected = {token[byte] for byte in range(256) if begins_utf8(bytes([*start, byte]))}
        state = COMPILER.compile(Grammar("regex", "[^q]{3}")).begin([END])
        drafts = [token[byte] for byte in start]
        assert rows(state, drafts)[-1] == expected - {ID["q"]}
        state.commit(drafts)
        assert rows(state, [])[0] == expected - {ID["q"]}
    assert could_be_utf8("é".encode()[1:] + "aé".encode()[:-1])
    assert not could_be_utf8(b"a\x80")
    assert not could_be_utf8(b"a\xed\xa0")


def test_masks_are_unpacked_lowest_bit_first() -> None:
    words = torch.tensor([[1, -(1 << 31)], [6, 0]], dtype=torch.int32)
    assert [row.nonzero().flatten().tolist() for row in unpack(words, 64)] == [[0, 63], [1, 2]]
    assert unpack(words, 40).shape == (2, 40)
