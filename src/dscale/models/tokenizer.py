"""Text to token ids and back, chat templates, and text that grows while tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.models.checkpoint import read_json

REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are not yet a whole character
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Tokenizer:
    """A fast tokenizer (transformers' PreTrainedTokenizerFast) behind the few calls that serving needs."""

    def __init__(self, backend: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self.backend = backend
        self._native = backend.backend_tokenizer if _decodes_natively(backend) else None
        own = [backend.eos_token_id] if backend.eos_token_id is not None else []
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_token_ids, *own]))

    @classmethod
    def from_folder(cls, folder: Path, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Read tokenizer.json (or what transformers converts to it) from a checkpoint folder; InputError if none."""
        try:
            backend = _read_fast(folder)
        except Exception as error:  # transformers raises many kinds
            raise InputError(f"{folder}: no usable tokenizer ({' '.join(str(error).split())[:200]})") from None
        require(
            backend.is_fast, f"{folder}: its tokenizer has no fast form; allowed are tokenizers with tokenizer.json"
        )
        return cls(backend, eos_token_ids)

    def __len__(self) -> int:
        return len(self.backend)

    @property
    def has_chat_template(self) -> bool:
        """True for instruct models, whose conversations are rendered by a template."""
        return bool(self.backend.chat_template)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of text, with the tokenizer's own start token where it adds one and add_special is set."""
        return self.backend.encode(text, add_special_tokens=add_special)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts at once, without special tokens of the tokenizer's own."""
        return self.backend(list(texts), add_special_tokens=False)["input_ids"] if len(texts) else []

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text: start, end and template tokens."""
        return frozenset(self.backend.all_special_ids) | frozenset(self.backend.added_tokens_decoder)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, exactly as the tokens spell it (no clean-up of spaces)."""
        if self._native is not None:  # several times faster than through the wrapper
            return self._native.decode(list(ids), skip_special_tokens)
        return self.backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def chat(self, messages: Sequence[dict[str, Any]], **template: Any) -> list[int]:
        """Ids of a conversation rendered by the chat template, ready for the assistant's turn.

        template: passed to the template (tools, enable_thinking …); add_generation_prompt defaults to True.
        """
        return self.encode(self.render(messages, **template), add_special=False)

    def render(self, messages: Sequence[dict[str, Any]], **template: Any) -> str:
        """The text that `chat` encodes."""
        require(self.has_chat_template, "chat: this tokenizer has no chat template; use a raw prompt")
        require(len(messages) > 0, "messages: empty; at least one message is needed")
        template.setdefault("add_generation_prompt", True)
        try:
            return self.backend.apply_chat_template(list(messages), tokenize=False, **template)
        except Exception as error:  # templates raise their own errors about roles and order
            raise InputError(f"messages: the chat template refuses them ({' '.join(str(error).split())})") from None

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, special tokens included; partial characters become U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its companions, readable by from_folder and by transformers."""
        self.backend.save_pretrained(str(folder))


def _read_fast(folder: Path) -> Any:
    """The generic class directly where the folder asks for it (four times faster), else what transformers picks."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = folder / "tokenizer_config.json"
    kind = read_json(settings).get("tokenizer_class") if settings.is_file() else None
    if kind in GENERIC_CLASSES and (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _decodes_natively(backend: Any) -> bool:
    """True where decoding is that of the `tokenizers` library, with nothing of a class's own around it."""
    from transformers import PreTrainedTokenizerFast as Plain

    kind = type(backend)
    return issubclass(kind, Plain) and kind.decode is Plain.decode and kind._decode is Plain._decode


class IncrementalDecoder:
    """Turns tokens into text as they arrive. What push and finish return, joined, is `decode` of all tokens.

    Text is held back while it ends inside a character that is spelt by several tokens. How many tokens a push brings
    makes no difference, also where bytes are no character at all. Only the tokens since the last text are decoded
    again, so a push costs the same late in a long answer as at its start. A copy (copy.copy) goes on on its own.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []  # tokens that are out and decoded again, so that joining spaces come out right
        self._held: list[int] = []  # tokens that are not out
        self._wide = False  # whether the context would be shorter, had its tokens come one by one

    def push(self, ids: Sequence[int]) -> str:
        """New text after these tokens; may be empty."""
        window = [*self._context, *self._held, *ids]
        text = self._tokenizer.decode(window, self._skip)
        if REPLACEMENT in text and len(ids) > 1:
            half = len(ids) // 2
            return self.push(ids[:half]) + self.push(ids[half:])
        if REPLACEMENT in text and self._wide:
            self._narrow()
            return self.push(ids)
        out, known = len(self._context), self._known
        if len(text) <= known or text.endswith(REPLACEMENT):
            self._held = window[out:]
            return ""
        self._context, self._held, self._wide = window[out:], [], len(ids) > 1
        return text[known:]

    def finish(self) -> str:
        """Text still held back, with U+FFFD for characters that were never completed."""
        held, self._held = self._held, []
        return self._tokenizer.decode(self._context + held, self._skip)[self._known :] if held else ""

    @property
    def _known(self) -> int:
        """Characters of the context, which are out."""
        return len(self._tokenizer.decode(self._context, self._skip)) if self._context else 0

    def _narrow(self) -> None:
        """Make the context what it would be, had its tokens come one by one: a broken character spoils its neighbours
        where a tokenizer falls back to bytes, so it matters which of them are out together."""
        alone = IncrementalDecoder(self._tokenizer, self._skip)
        for token in self._context:
            alone.push([token])
        self._context, self._wide = alone._context, False
        self._held = alone._held + self._held
