"""Text that follows a grammar, exactly, under speculation (dscale.md §3): xgrammar's automaton over token ids.

A grammar is compiled once for a tokenizer. Each request has a state of its own. For a step it accepts the drafts one by
one, takes the allowed tokens before each, and is rolled back; what was emitted is accepted for good afterwards. So the
row after drafts 1…j is masked as if they had been emitted, and speculation changes nothing. A row behind a draft that
the grammar forbids is never reached, for that draft cannot be drawn; it is left unmasked.

The state lives on the host and needs the step's drafts there; the masks go to the device 32 tokens a word.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dscale.config import Grammar, InputError, require
from dscale.models.tokenizer import Tokenizer
from dscale.speculation.patterns import refuse_unfollowed_regex
from dscale.speculation.schema import enforceable
from dscale.speculation.utf8 import Joins, could_be_utf8

if TYPE_CHECKING:
    import xgrammar

WORD = 32  # tokens in one word of a mask
WHITESPACE = 2  # most characters of white space between two elements of JSON, plus what fits a token
MAX_CACHE_BYTES = 256 << 20
MAX_CACHED = 256


class GrammarState:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, joins: Joins, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._matcher, self._joins, self._vocab_size = matcher, joins, vocab_size
        self._end_ids = list(end_ids)
        self._last: int | None = None
        self._stuck = False

    def allowed(self, drafts: Tensor) -> Tensor:
        """Tokens allowed in row j after drafts 1…j: drafts [k-1] int64 → bool [k, V] on the same device."""
        words = torch.full((len(drafts) + 1, -(-self._vocab_size // WORD)), -1, dtype=torch.int32)
        accepted, before = 0, self._last
        for row, draft in enumerate([*drafts.tolist(), None]):
            if self._matcher.is_terminated():
                break
            self._fill(words, row, before)
            if draft is None or not _allows(words[row], draft) or not self._matcher.accept_token(draft):
                break
            accepted, before = accepted + 1, draft
        if accepted:
            self._matcher.rollback(accepted)
        return unpack(words.to(drafts.device, non_blocking=True), self._vocab_size)

    def commit(self, tokens: Sequence[int]) -> None:
        """The request emitted these tokens."""
        for token in tokens:
            if not self._stuck and not self._matcher.accept_token(token):
                self._stuck = True  # it ended where nothing was allowed
            self._last = token

    def _fill(self, words: Tensor, row: int, before: int | None) -> None:
        """The words of a row. Where no token of the vocabulary can go on, the text can only end."""
        if not self._stuck:
            self._matcher.fill_next_token_bitmask(words, row)
            self._joins.restrict(words[row], before)
            if words[row].any():
                return
        words[row] = 0
        for token in self._end_ids:
            words[row, token // WORD] |= _bit(token)


def _bit(token: int) -> int:
    """The token's bit of its word, as a signed number."""
    bit = 1 << token % WORD
    return bit - (1 << WORD) if token % WORD == WORD - 1 else bit


def _allows(words: Tensor, token: int) -> bool:
    return bool(int(words[token // WORD]) >> token % WORD & 1)


def unpack(words: Tensor, vocab_size: int) -> Tensor:
    """Masks int32 [k, ⌈V/32⌉], lowest bit first, as bool [k, V]."""
    return _bits_of_byte(words.device)[words.view(torch.uint8).long()].flatten(1)[:, :vocab_size]


@cache
def _bits_of_byte(device: torch.device) -> Tensor:
    """Row b holds the bits of byte b, lowest first: bool [256, 8]."""
    return ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).bool().to(device)


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar over the tokens of one model. special_ids: tokens that are no text."""

    compiled: xgrammar.CompiledGrammar
    joins: Joins
    vocab_size: int
    special_ids: frozenset[int]

    def begin(self, end_ids: Sequence[int]) -> GrammarState:
        """The state before the first token. end_ids: tokens that end the request; those that are text stay text."""
        import xgrammar

        ends = [token for token in end_ids if token in self.special_ids]
        matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=ends)
        return GrammarState(matcher, self.joins, self.vocab_size, ends)


class GrammarCompiler:
    """Compiles grammars for a tokenizer and keeps the latest. Threads may share it.

    vocab_size: tokens of the target's head, of which those past the tokenizer's own are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def knows(self, grammar: Grammar) -> bool:
        """True when `compile` would not have to work."""
        return grammar in self._kept

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar; InputError in one line when it is wrong or cannot be enforced."""
        with self._lock:
            found = self._kept.get(grammar)
        if found is None:  # outside the lock: one slow grammar holds up no other
            found = CompiledGrammar(self._compile(grammar), self._joins, self._vocab_size, self.special_ids)
        with self._lock:
            return self._keep(grammar, found)

    def _keep(self, grammar: Grammar, fresh: CompiledGrammar) -> CompiledGrammar:
        """Note a use; the oldest go when they are too many or too large."""
        if grammar not in self._kept:
            self._bytes += fresh.compiled.memory_size_bytes
        found = self._kept.setdefault(grammar, fresh)
        self._kept.move_to_end(grammar)
        while len(self._kept) > 1 and (self._bytes > MAX_CACHE_BYTES or len(self._kept) > MAX_CACHED):
            self._bytes -= self._kept.popitem(last=False)[1].compiled.memory_size_bytes
        return found

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        _require_xgrammar(grammar.kind)
        by_kind: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json_object": lambda _: self._schema({"type": "object"}),
            "json_schema": lambda text: self._schema(enforceable(_json(text, "json_schema"))),
            "regex": self._regex,
            "choice": lambda text: self._text.compile_grammar(_alternatives(_json(text, "choice"))),
            "ebnf": lambda text: self._text.compile_grammar(text),
        }
        try:
            compiled = by_kind[grammar.kind](grammar.text)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # xgrammar raises RuntimeError and its own kinds
            raise InputError(f"{grammar.kind}: {_reason(error)}") from None
        _refuse_nothing(grammar.kind, compiled, self._vocab_size)
        return compiled

    def _regex(self, text: str) -> xgrammar.CompiledGrammar:
        refuse_unfollowed_regex(text)
        return self._text.compile_regex(text)

    def _schema(self, schema: Any) -> xgrammar.CompiledGrammar:
        return self._json.compile_json_schema(json.dumps(schema), max_whitespace_cnt=WHITESPACE)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: left out when the answer is decoded, so no grammar may count them as text."""
        backend = self._tokenizer.backend
        marked = {id for id, token in backend.added_tokens_decoder.items() if token.special}
        return frozenset(marked | set(backend.all_special_ids) | set(self._tokenizer.eos_token_ids))

    @cached_property
    def _whole(self) -> xgrammar.TokenizerInfo:
        """Every token as xgrammar reads it."""
        import xgrammar

        ends = list(self._tokenizer.eos_token_ids) or None
        return xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.backend, vocab_size=self._vocab_size, stop_token_ids=ends
        )

    @cached_property
    def _tokens(self) -> list[bytes]:
        """The bytes of every token; none for what is no text or cannot stand in UTF-8."""
        decoded, special = self._whole.decoded_vocab, self.special_ids
        self._require_plain_text(decoded)
        return [b"" if id in special or not could_be_utf8(token) else token for id, token in enumerate(decoded)]

    @cached_property
    def _joins(self) -> Joins:
        return Joins.of(self._tokens)

    @cached_property
    def _text(self) -> xgrammar.GrammarCompiler:
        return self._compiler(lambda token: True)

    @cached_property
    def _json(self) -> xgrammar.GrammarCompiler:
        """Without control characters other than line feed, which JSON forbids in strings and xgrammar's strings of
        bounded length do not."""
        return self._compiler(lambda token: all(byte >= 0x20 or byte == 0x0A for byte in token))

    def _compiler(self, keep: Callable[[bytes], bool]) -> xgrammar.GrammarCompiler:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            [token if keep(token) else b"" for token in self._tokens],
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=list(self._whole.stop_token_ids),
            add_prefix_space=self._whole.add_prefix_space,
        )
        return xgrammar.GrammarCompiler(info, max_threads=min(4, os.cpu_count() or 1), cache_enabled=False)

    def _require_plain_text(self, decoded: Sequence[bytes]) -> None:
        """InputError unless an answer is its tokens' bytes one after another, as a grammar takes it to be."""
        plain = [id for id, token in enumerate(decoded) if token.isascii() and token.isalnum()]
        sample = [id for id in plain[:: len(plain) // 64 + 1] if id not in self.special_ids]
        spelt, text = b"".join(decoded[id] for id in sample).decode("ascii"), self._tokenizer.decode(sample)
        require(
            bool(sample) and spelt == text,
            "grammar: this tokenizer puts more between its tokens than they spell; it cannot follow grammars",
        )


def _require_xgrammar(kind: str) -> None:
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        raise InputError(f"{kind}: structured output needs the package xgrammar; install dscale[serve]") from None


def _json(text: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{kind}: not JSON ({error})") from None


def _alternatives(texts: Any) -> str:
    """The grammar of one of these texts."""
    good = isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts)
    require(bool(good), "choice: give a list of at least one text")
    return "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in texts)


def _reason(error: Exception) -> str:
    """The message in one line, without the place in xgrammar's source."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[\d:]+\] \S+: (Check failed: \(.*?\) is false: )?", "", text)[:300] or type(error).__name__


def _refuse_nothing(kind: str, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
    """InputError when no token can begin a text of the grammar."""
    import xgrammar

    words = torch.zeros(1, -(-vocab_size // WORD), dtype=torch.int32)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(words)
    require(bool(words.any()), f"{kind}: no text that this model's tokens can spell satisfies it")
