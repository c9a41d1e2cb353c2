"""Scripts as tokens: what is fed to the target before it samples a turn, between turn and answer, and with which seeds.

    head    template up to the user turn, earlier messages included, and the turn (or its beginning)
    tail    instruction suffix, end of the turn, header of the assistant's turn

Seeds come from (corpus seed, number of the script, number of the answer) alone, so the text of a conversation does not
depend on what is decoded beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from dscale.config import require
from dscale.engine.request import derive_seed
from dscale.models.tokenizer import Tokenizer
from dscale.train.prompts import Script

MARK = "USERTURN"


@dataclass(frozen=True)
class TokenScripts:
    """One row per conversation to be made, rows in order of (script, answer).

    head int32 [N, P] and head_length [N]; tail int32 [N, Q] and tail_length [N]; the rest [N]. closing: the template's
    own tokens at the end of the tail. turn: where the first user turn begins. complete: the turn ends with the head.
    temperature: of the answer. script, answer: number of the script in the corpus, and which of its answers.
    """

    head: np.ndarray
    head_length: np.ndarray
    tail: np.ndarray
    tail_length: np.ndarray
    closing: np.ndarray
    turn: np.ndarray
    complete: np.ndarray
    temperature: np.ndarray
    turn_seed: np.ndarray
    seed: np.ndarray
    script: np.ndarray
    answer: np.ndarray

    def __len__(self) -> int:
        return len(self.head_length)

    @property
    def shared(self) -> int:
        """How many leading tokens all heads have in common."""
        if not len(self):
            return 0
        same = (self.head == self.head[0]).all(0).cumprod().sum()
        return int(min(same, self.head_length.min()))

    def take(self, rows: np.ndarray) -> TokenScripts:
        """Some of the rows."""
        return TokenScripts(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class Draws:
    """How conversations are drawn: corpus seed, answers per script, share of greedy ones, temperature of the others."""

    seed: int = 0
    answers: int = 1
    greedy: float = 0.75
    temperature: float = 0.7

    def temperatures(self, script: int) -> list[float]:
        """Of every answer of a script; at most one is greedy, since greedy answers are all the same."""
        base, out = derive_seed(self.seed, script), []
        for answer in range(self.answers):
            cold = derive_seed(base, -1 - answer) < self.greedy * 2.0**63 and 0.0 not in out
            out.append(0.0 if cold else self.temperature)
        return out

    def seeds(self, script: int) -> tuple[int, list[int]]:
        """Seed of the sampled user turn, and of every answer."""
        base = derive_seed(self.seed, script)
        return derive_seed(base, 0), [derive_seed(base, 1 + answer) for answer in range(self.answers)]


class Frames:
    """What the chat template puts around the user turn, for any messages before it."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool = False) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        self._known: dict[tuple[tuple[str, str], ...], tuple[str, str]] = {}
        self._openings: dict[tuple[tuple[str, str], ...], list[int]] = {}

    def of(self, context: tuple[tuple[str, str], ...]) -> tuple[str, str]:
        """(text before the user turn, text after it up to where the answer begins)."""
        if context not in self._known:
            messages = [{"role": role, "content": content} for role, content in (*context, ("user", MARK))]
            text = self.tokenizer.render(messages, enable_thinking=self.thinking)
            before, mark, after = text.rpartition(MARK)
            require(bool(mark), "chat template: it leaves the last user turn out; another target is needed")
            if any(role != "system" for role, _ in context):
                return before, after  # each has its own: not worth keeping
            self._known[context] = before, after
        return self._known[context]

    def opening(self, context: tuple[tuple[str, str], ...]) -> list[int]:
        """Tokens before the first user turn."""
        system = tuple(message for message in context if message[0] == "system")
        if system not in self._openings:
            self._openings[system] = self.tokenizer.encode(self.of(system)[0], add_special=False)
        return self._openings[system]


def end_tokens(tokenizer: Tokenizer, eos: Sequence[int], frames: Frames) -> tuple[int, ...]:
    """Tokens that end a turn: the target's end tokens and, where it is a special token, what the template ends with."""
    closing = tokenizer.encode(frames.of(())[1].lstrip(), add_special=False)[:1]
    special = [token for token in closing if token in tokenizer.special_ids]
    return tuple(dict.fromkeys([*eos, *special]))


def tokenise(
    wanted: Sequence[Script], first: int, frames: Frames, draws: Draws, longest: int, turn_cap: int
) -> TokenScripts:
    """Scripts numbered from `first` on as tokens, draws.answers rows for each.

    Those whose prompt could be longer than `longest` tokens (a sampled turn has up to turn_cap) are left out.
    """
    tokenizer = frames.tokenizer
    texts, endings = [], []
    for one in wanted:
        before, after = frames.of(one.context)
        texts.append(before + (one.text + one.suffix if one.complete else one.text.rstrip(" ")))
        endings.append(("" if one.complete else one.suffix, after))
    heads, tails = tokenizer.encode_batch(texts), {}
    for suffix, after in dict.fromkeys(endings):
        closing = tokenizer.encode(after, add_special=False)
        tails[suffix, after] = tokenizer.encode(suffix + after, add_special=False), len(closing)
    rows: list[tuple[list[int], list[int], tuple[object, ...]]] = []
    for index, (one, head, ending) in enumerate(zip(wanted, heads, endings, strict=True)):
        tail, closing_length = tails[ending]
        if len(head) + len(tail) + (0 if one.complete else turn_cap) > longest:
            continue
        number, turn = first + index, common_prefix(frames.opening(one.context), head)
        turn_seed, seeds = draws.seeds(number)
        for answer, (temperature, seed) in enumerate(zip(draws.temperatures(number), seeds, strict=True)):
            numbers = (closing_length, turn, one.complete, temperature, turn_seed, seed, number, answer)
            rows.append((head, tail, numbers))
    types = (np.int32, np.int32, bool, np.float32, np.int64, np.int64, np.int64, np.int32)
    columns = [np.array([row[2][at] for row in rows], kind) for at, kind in enumerate(types)]
    return TokenScripts(*padded([row[0] for row in rows]), *padded([row[1] for row in rows]), *columns)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def padded(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """int32 [N, longest] filled up with 0, and lengths int32 [N]."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    out = np.zeros((len(sequences), int(lengths.max(initial=0))), np.int32)
    for row, sequence in enumerate(sequences):
        out[row, : len(sequence)] = sequence
    return out, lengths
