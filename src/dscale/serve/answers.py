"""Answers in OpenAI's shapes: whole ones, events of a stream, log-probabilities and usage."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dscale.engine.request import TokenLogprob
from dscale.models.tokenizer import Tokenizer
from dscale.serve.messages import Delta, Usage
from dscale.serve.tools import Piece, ToolCall, ToolParser

LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


@dataclass
class Answer:
    """One sequence as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Take in what a step brought."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.usage, self.finish_reason, self.stop_reason = delta.usage, delta.finish_reason, delta.stop_reason


class TokenNames:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(1 << 16)(tokenizer.token_text)
        self._special = tokenizer.special_ids

    def bytes(self, token: int) -> list[int]:
        """UTF-8 of a token, also of one that spells part of a character where the vocabulary is of bytes."""
        text = self.text(token)
        if "\ufffd" in text and token not in self._special:
            spelt = self._tokenizer.backend.convert_ids_to_tokens(token)
            table = byte_table()
            if isinstance(spelt, str) and all(letter in table for letter in spelt):
                return [table[letter] for letter in spelt]
        return list(text.encode())


@lru_cache(1)
def byte_table() -> dict[str, int]:
    """Letters by which byte-level vocabularies spell bytes: printable ones themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


def chat_logprobs(names: TokenNames, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The logprobs object of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": finite(logprob), "bytes": names.bytes(token)}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(id, value) for id, value in one.top.items()]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(names: TokenNames, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The logprobs object of a completion choice; offset: characters before the first token."""
    texts = [names.text(one.token_id) for one in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [finite(one.logprob) for one in tokens],
        "top_logprobs": [{names.text(id): finite(value) for id, value in one.top.items()} for one in tokens],
        "text_offset": offsets,
    }


def prompt_scores(
    names: TokenNames, tokens: Sequence[TokenLogprob | None] | None
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's prompt_logprobs: by position, token id to log-probability and text; None for the first token."""
    if tokens is None:
        return None
    rows: list[dict[str, dict[str, Any]] | None] = []
    for one in tokens:
        known = {} if one is None else {one.token_id: one.logprob, **one.top}
        named = {str(id): {"logprob": finite(value), "decoded_token": names.text(id)} for id, value in known.items()}
        rows.append(None if one is None else named)
    return rows


def finite(value: float) -> float:
    """JSON has no infinity; OpenAI's clients know -9999 as minus infinity."""
    return max(value, -9999.0)


def usage_of(parts: Sequence[Usage], prompts: int = 1) -> dict[str, Any]:
    """Usage of a request: prompts are counted once, their n sequences in all. parts: of each sequence, by prompt."""
    each = max(len(parts) // max(prompts, 1), 1)
    first = parts[::each]
    prompt, completion = sum(one.prompt_tokens for one in first), sum(one.completion_tokens for one in parts)
    details = {name: sum(getattr(one, name) for one in parts) for name in ("steps", "drafted", "accepted", "slots")}
    trimmed = sum(one.trimmed for one in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in first)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": details["accepted"],
            "rejected_prediction_tokens": max(details["slots"] - details["steps"] - details["accepted"], 0),
            "accepted_draft_tokens": details["accepted"],
            "drafted_tokens": details["drafted"],
            "trimmed_draft_tokens": trimmed,
            "verified_slots": details["slots"],
            "decode_steps": details["steps"],
        },
    }


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer share. kind: "chat" or "text"."""

    id: str
    kind: str
    model: str
    names: TokenNames
    logprobs: bool = False
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One event of a stream."""
        head = self._head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        return {**head, "choices": choices, **({"usage": usage} if usage is not None else {})}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def scores(self, tokens: Sequence[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
        """The logprobs object of some tokens, None where none was asked for."""
        if not self.logprobs:
            return None
        if self.kind == "chat":
            return chat_logprobs(self.names, tokens or [])
        return completion_logprobs(self.names, tokens or [], offset)


def call_object(call: ToolCall, id: str, index: int | None = None) -> dict[str, Any]:
    """A tool call of a message, or (with its index) of a stream's delta."""
    place = {} if index is None else {"index": index}
    function = {"name": call.name, "arguments": call.arguments}
    return {**place, "id": id, "type": "function", "function": function}


def chat_choice(envelope: Envelope, index: int, answer: Answer, tools: bool) -> dict[str, Any]:
    """A choice of a whole chat answer."""
    piece = ToolParser().push(answer.text, final=True) if tools else Piece(answer.text)
    message: dict[str, Any] = {"role": "assistant", "content": piece.text or (None if piece.calls else "")}
    message["refusal"] = None
    if piece.calls:
        message["tool_calls"] = [
            call_object(call, call_id(envelope, index, number)) for number, call in enumerate(piece.calls)
        ]
    reason = "tool_calls" if piece.calls and answer.finish_reason == "stop" else answer.finish_reason
    return {"index": index, "message": message, **_ending(envelope, answer, reason)}


def text_choice(envelope: Envelope, index: int, answer: Answer) -> dict[str, Any]:
    """A choice of a whole completion."""
    return {"index": index, "text": answer.text, **_ending(envelope, answer, answer.finish_reason)}


def _ending(envelope: Envelope, answer: Answer, reason: str | None) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if answer.prompt_logprobs is not None:
        extra["prompt_logprobs"] = prompt_scores(envelope.names, answer.prompt_logprobs)
    if envelope.token_ids:
        extra["token_ids"] = answer.token_ids
    scores = envelope.scores(answer.logprobs, 0)
    return {"logprobs": scores, "finish_reason": reason, "stop_reason": answer.stop_reason, **extra}


def call_id(envelope: Envelope, index: int, number: int) -> str:
    """Name of a tool call, unique among answers."""
    return f"call-{envelope.id.rpartition('-')[2]}-{index}-{number}"


class ChoiceStream:
    """Events of one sequence. details: its deltas carry what the page shows of each step."""

    def __init__(self, envelope: Envelope, index: int, tools: bool, details: bool = False) -> None:
        self.envelope, self.index, self.details = envelope, index, details
        self.parser = ToolParser() if tools else None
        self.usage = Usage()
        self._characters = 0

    def opening(self) -> dict[str, Any]:
        """The first choice of a chat stream, which names the role."""
        return {
            "index": self.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        """Choices that this delta makes; none when nothing can be shown yet."""
        self.usage = delta.usage
        final = delta.finish_reason is not None
        piece = self.parser.push(delta.text, final) if self.parser else Piece(delta.text)
        scores = self.envelope.scores(delta.logprobs, self._characters)
        self._characters += len(delta.text)
        shown = piece.text or piece.calls or final or (scores and delta.logprobs)
        if not shown and not (self.details or self.envelope.token_ids):
            return []
        content = self._chat(piece) if self.envelope.kind == "chat" else {"text": piece.text}
        reason = delta.finish_reason
        if reason == "stop" and self.parser and self.parser.calls:
            reason = "tool_calls"
        choice = {"index": self.index, **content, "logprobs": scores, "finish_reason": reason}
        return [{**choice, **self._extra(delta, final)}]

    def _chat(self, piece: Piece) -> dict[str, Any]:
        content: dict[str, Any] = {"content": piece.text} if piece.text or not piece.calls else {}
        if piece.calls:
            assert self.parser is not None
            first = self.parser.calls - len(piece.calls)
            content["tool_calls"] = [
                call_object(call, call_id(self.envelope, self.index, number), number)
                for number, call in enumerate(piece.calls, start=first)
            ]
        return {"delta": content}

    def _extra(self, delta: Delta, final: bool) -> dict[str, Any]:
        extra: dict[str, Any] = {"stop_reason": delta.stop_reason} if final else {}
        if self.envelope.token_ids:
            extra["token_ids"] = delta.token_ids
        if delta.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_scores(self.envelope.names, delta.prompt_logprobs)
        if self.details:
            texts = [self.envelope.names.text(token) for token in delta.token_ids]
            extra["dscale"] = {"steps": [vars(step) for step in delta.steps], "token_texts": texts}
        return extra


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event. Characters that Python's splitlines takes for line ends are escaped, for clients that read
    lines with it."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        for character, escape in LINE_ENDS:
            text = text.replace(character, escape)
    return f"data: {text}\n\n".encode("utf-8", "replace")
