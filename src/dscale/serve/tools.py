"""Tool calls in the text of an answer.

Hermes, Qwen   text <tool_call>{"name": …, "arguments": {…}}</tool_call> …
SmolLM2        the same with a list of calls between the tags
Llama 3        the whole answer is {"name": …, "parameters": {…}}, maybe after <|python_tag|>, maybe several with ;
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dscale.serve.errors import clean

OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass
class Piece:
    """What some more text of an answer brought: text for the reader, and calls that are now complete."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolParser:
    """Splits the text of an answer, as it grows, into content and calls. What is no call is content, unchanged."""

    def __init__(self) -> None:
        self._held = ""  # text that may still turn out to be a call
        self._bare: bool | None = None  # the answer is JSON without tags; None: nothing but spaces so far
        self.calls = 0

    def push(self, text: str, final: bool = False) -> Piece:
        """Take in more text; final: there is no more."""
        self._held += text
        if self._bare is None and self._held.strip():
            start = self._held.lstrip()
            self._bare = start.startswith(("{", PYTHON_TAG)) or (PYTHON_TAG.startswith(start) and not final)
        piece = self._whole(final) if self._bare else self._tagged(final)
        self.calls += len(piece.calls)
        return piece

    def _whole(self, final: bool) -> Piece:
        start = self._held.lstrip()
        if not start.startswith("{") and not PYTHON_TAG.startswith(start[: len(PYTHON_TAG)]):
            self._bare = False
            return self._tagged(final)
        if not final:
            return Piece()
        held, self._held = self._held, ""
        calls = parse_calls(held.strip().removeprefix(PYTHON_TAG))
        return Piece("", calls) if calls else Piece(held)

    def _tagged(self, final: bool) -> Piece:
        text: list[str] = []
        calls: list[ToolCall] = []
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                keep = 0 if final else _beginning(self._held)
                text.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            inside, closed, after = rest.partition(CLOSE)
            if not closed and not final:
                text.append(before)
                self._held = opened + rest
                break
            found = parse_calls(inside)
            text.append(before if found else before + opened + inside + closed)
            calls += found
            self._held = after
        joined = "".join(text)
        return Piece("" if (calls or self.calls) and not joined.strip() else joined, tuple(calls))


def _beginning(text: str) -> int:
    """Length of the longest tail of text that begins OPEN."""
    return next((size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-size:])), 0)


def parse_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls in JSON text: an object, a list of them, or several parted by ; – () when it is anything else."""
    decoder, calls, place = json.JSONDecoder(), [], 0
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return ()
        for one in value if isinstance(value, list) else [value]:
            call = _call(one)
            if call is None:
                return ()
            calls.append(call)
        while place < len(text) and text[place] in "; \n\t\r":
            place += 1
    return tuple(calls)


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
        return None
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(clean(name), clean(arguments))
