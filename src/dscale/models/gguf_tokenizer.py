"""The tokenizer of a GGUF file as a fast tokenizer: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

GGUF gives the rule that splits text into words as a short name (`tokenizer.ggml.pre`) and leaves the rule to the
reader. The rules here are those of the models' own tokenizers, as public in their tokenizer.json.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from dscale.config import InputError, require
from dscale.models.gguf_reader import GGUFCheckpoint
from dscale.models.tokenizer import Tokenizer

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # values of tokenizer.ggml.token_type
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = MODERN.replace("{DIGITS}", "{1,3}"), MODERN.replace("{DIGITS}", "")
WORD_RULES = {
    "default": (GPT2,),
    "gpt-2": (GPT2,),
    "gpt2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "starcoder": (r"\p{N}", GPT2),
    "refact": (r"\p{N}", GPT2),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "llama-bpe": (LLAMA3,),
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
}
NFC = ("qwen2", "deepseek-r1-qwen")


def gguf_tokenizer(checkpoint: GGUFCheckpoint, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
    """The tokenizer and chat template a GGUF file carries; InputError when its kind or word rule is not known."""
    from transformers import PreTrainedTokenizerFast

    tokens = checkpoint.value("tokenizer.ggml.tokens")
    require(bool(tokens), f"{checkpoint.name}: carries no tokenizer (tokenizer.ggml.tokens is missing)")
    kind = checkpoint.value("tokenizer.ggml.model")
    if kind == "gpt2":
        fast = _byte_level(checkpoint, tokens)
    elif kind == "llama":
        fast = _sentencepiece(checkpoint, tokens)
    else:
        raise InputError(f"{checkpoint.name}: tokenizer model {kind!r} is not supported; allowed are gpt2, llama")
    _add_marked_tokens(fast, checkpoint, tokens)
    special = {f"{name}_token": _token(checkpoint, tokens, key) for name, key in SPECIAL.items()}
    if checkpoint.value("tokenizer.ggml.add_bos_token", kind == "llama") and special["bos_token"]:
        fast.post_processor = _start_with(special["bos_token"], checkpoint)
    backend = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        chat_template=checkpoint.value("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token},
    )
    return Tokenizer(backend, eos_token_ids)


SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _token(checkpoint: GGUFCheckpoint, tokens: list[str], key: str) -> str | None:
    index = checkpoint.value(f"tokenizer.ggml.{key}_token_id")
    return tokens[index] if index is not None and index < len(tokens) else None


def _byte_level(checkpoint: GGUFCheckpoint, tokens: list[str]) -> FastTokenizer:
    rule = checkpoint.value("tokenizer.ggml.pre", "default")
    if rule not in WORD_RULES:
        known = ", ".join(WORD_RULES)
        raise InputError(f"{checkpoint.name}: tokenizer.ggml.pre {rule!r} is not known; allowed are {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in checkpoint.value("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    fast = FastTokenizer(
        BPE(vocab=vocabulary, merges=merges, ignore_merges=rule in ("llama3", "llama-v3", "llama-bpe"))
    )
    if rule in NFC:
        fast.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in WORD_RULES[rule]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece(checkpoint: GGUFCheckpoint, tokens: list[str]) -> FastTokenizer:
    scores = checkpoint.value("tokenizer.ggml.scores")
    require(bool(scores), f"{checkpoint.name}: tokenizer.ggml.scores is missing; a llama tokenizer needs it")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _token(checkpoint, tokens, "unknown")
    model = BPE(vocabulary, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    fast = FastTokenizer(model)
    prefix = bool(checkpoint.value("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return fast


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose joined token scores highest: the same merges, as a ranked list of pairs."""
    rank = dict(zip(tokens, scores, strict=True))
    order = {token: index for index, token in enumerate(tokens)}
    pairs = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    return sorted(pairs, key=lambda pair: (-rank[pair[0] + pair[1]], order[pair[0]], order[pair[1]]))


def _add_marked_tokens(fast: FastTokenizer, checkpoint: GGUFCheckpoint, tokens: list[str]) -> None:
    kinds: list[int] = checkpoint.value("tokenizer.ggml.token_type") or []
    marked: dict[int, list[AddedToken]] = {CONTROL: [], USER_DEFINED: []}
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in marked:
            marked[kind].append(AddedToken(token, normalized=False, special=kind == CONTROL))
    fast.add_special_tokens(marked[CONTROL])
    fast.add_tokens(marked[USER_DEFINED])


def _start_with(token: str, checkpoint: GGUFCheckpoint) -> Any:
    index = int(checkpoint.value("tokenizer.ggml.bos_token_id"))
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, index)]
    )
