"""Text of a growing output: incremental decoding and stop strings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns tokens into text piece by piece; a piece may be empty while a character is incomplete.

    Pieces joined do not depend on how many tokens a push brings. A copy (copy.copy) goes on from there on its own.
    """

    def push(self, ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        ...

    def finish(self) -> str:
        """What is left when no more tokens come."""
        ...


class TextStream:
    """The visible text of an output. With stop strings, text that may still become one is held back; without any,
    tokens are decoded when their text is asked for, also after the last."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self.decoder, self.stop, self.include_stop = decoder, tuple(stop), include_stop
        self._text = ""
        self._fresh: list[int] = []  # tokens that are not decoded yet
        self._ending = False  # whether what the decoder holds back is still to come, though no more tokens are
        self.stopped_by: str | None = None
        self._taken = 0  # characters of text already handed out

    @property
    def text(self) -> str:
        """The text so far."""
        if self._fresh:
            tokens, self._fresh = self._fresh, []
            self._text += self.decoder.push(tokens)
        if self._ending:
            self._ending = False
            self._text += self.decoder.finish()
        return self._text

    def push(self, tokens: Sequence[int], free: int = 0) -> int | None:
        """Take in tokens; with how many of them a stop string was complete (text is cut there), None: with none.

        A stop string that the first `free` tokens complete is text like any other.
        """
        if not self.stop:
            self._fresh += tokens
            return None
        text, decoder = self._text, copy.copy(self.decoder)
        self._text += self.decoder.push(tokens)
        if not self._find_stop(len(text)):
            return None
        self._text, self.decoder, self.stopped_by = text, decoder, None  # once more, to see with which token
        return self._push_singly(tokens, free)

    def _push_singly(self, tokens: Sequence[int], free: int) -> int | None:
        for count, token in enumerate(tokens, start=1):
            before = len(self._text)
            self._text += self.decoder.push([token])
            if count > free and self._find_stop(before):
                return count
        return None

    def finish(self) -> None:
        """No more tokens come: what is left is text too, unless a stop string already ended it."""
        self._ending = self.stopped_by is None
        if self.stop and self._ending:
            before = len(self._text)
            if len(self.text) > before:
                self._find_stop(before)

    def take(self, final: bool = False) -> str:
        """Text not handed out yet, less what may still turn into a stop string (all of it when final)."""
        text = self.text
        end = len(text) if final else len(text) - self._pending()
        piece = text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _find_stop(self, before: int) -> bool:
        found = []
        for stop in self.stop:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                found.append((at, -len(stop), stop))
        if not found:
            return False
        at, _, stop = min(found)
        self.stopped_by = stop
        self._text = self._text[: at + len(stop)] if self.include_stop else self._text[:at]
        return True

    def _pending(self) -> int:
        """Length of the longest tail of the text that begins some stop string."""
        if self.stopped_by is not None:
            return 0
        longest = max((len(stop) for stop in self.stop), default=0)
        for size in range(min(longest - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(stop.startswith(tail) for stop in self.stop):
                return size
        return 0
