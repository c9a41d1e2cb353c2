"""Configuration as frozen dataclasses; every one checks itself and says what was wrong, where, and what is allowed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

PAGE_SIZE = 16  # tokens of one cache page
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAMILIES = ("llama", "qwen2", "qwen3")
DRAFT_WEIGHTS = ("auto", "fp8")
CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}  # beside auto
GRAPH_KINDS = {"greedy": (True,), "sampled": (False,), "both": (True, False)}  # by all_greedy of a step
ATTENTION_LAYOUTS = ("packed", "narrow", "wide")  # kernels/attention.py says what they are


class InputError(ValueError):
    """Something the user gave cannot be used. The message is one line: what was wrong, where, what is allowed."""


class RankFailed(RuntimeError):
    """A process that shares a model with this one ended, or they disagreed; the model has to be loaded again."""


def require(condition: bool, message: str) -> None:
    """Raise InputError(message) unless condition holds."""
    if not condition:
        raise InputError(message)


def require_one_of(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise InputError, which names what is allowed, unless value is among it."""
    require(value in allowed, f"{name}: {value!r}; allowed are {', '.join(allowed)}")


def workshop_dtype(name: str, device: str) -> torch.dtype:
    """The dtype of training and offline evaluation: auto is float32, the reference, on a CPU and bfloat16 on a GPU."""
    return resolve_dtype(("float32" if device == "cpu" else "bfloat16") if name == "auto" else name)


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype for one of the names in DTYPES."""
    require(name in DTYPES, f"dtype: {name!r} is not known; allowed are {', '.join(DTYPES)}")
    return DTYPES[name]


def cache_folder() -> Path:
    """DSCALE_CACHE, else XDG_CACHE_HOME/dscale, else ~/.cache/dscale."""
    if os.environ.get("DSCALE_CACHE"):
        return Path(os.environ["DSCALE_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dscale"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. style: neox rotates halves, interleaved rotates neighbours."""

    theta: float = 10000.0
    scaling: str = "default"  # default, linear, llama3 or yarn
    parameters: dict[str, Any] = field(default_factory=dict)  # the checkpoint's own keys of the scaling
    style: str = "neox"

    def __post_init__(self) -> None:
        allowed = ("default", "linear", "llama3", "yarn")
        require(self.scaling in allowed, f"rope scaling: {self.scaling!r} is not supported; allowed are {allowed}")
        require_one_of("rope style", self.style, ("neox", "interleaved"))
        require(self.theta > 0, f"rope theta: {self.theta} must be positive")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes shared by a target and a drafter: a stack of pre-norm decoder layers with grouped-query attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    max_position: int = 2048  # longest context the rotary table covers, tokens
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = RopeConfig()
    windows: tuple[int | None, ...] = ()  # per layer, tokens seen back; () means full attention everywhere
    causal_layers: tuple[bool, ...] = ()  # per layer, for drafters that mix; () means what the batch says

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            require(getattr(self, name) > 0, f"{name}: {getattr(self, name)} must be positive")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads: {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        require(self.head_dim % 2 == 0, f"head_dim: {self.head_dim} must be even")
        given = len(self.windows)
        require(given in (0, self.num_layers), f"windows: {given} entries for {self.num_layers} layers")

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return self.windows[layer] if self.windows else None

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class TargetConfig:
    """A target: decoder sizes, family, head and end tokens."""

    family: str
    decoder: DecoderConfig
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        require(self.family in FAMILIES, f"model family: {self.family!r} is not supported; allowed are {FAMILIES}")


class AnchorLayout(StrEnum):
    """What slot k of a draft block predicts, for an anchor at position p (dflash.md)."""

    MASKED = "1+N"  # slot k predicts p+k; slot 0 is dropped; W queries give W-1 drafts
    ANCHOR_FIRST = "anchor-first"  # slot k predicts p+k+1; K queries give K drafts, K+1 rows are verified


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter: its decoder sizes, taps, mask token, anchor layout and trained block.

    block_size: query rows of one block as trained. taps: target layers whose output is read, ascending.
    """

    decoder: DecoderConfig
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    layout: AnchorLayout
    dialect: str = "z-lab"
    causal: bool = False
    target_layers: int | None = None  # layers of the target, where the checkpoint says so
    target_hashes: dict[str, str] = field(default_factory=dict)  # sha256 of target tensors it was trained on

    def __post_init__(self) -> None:
        require(self.block_size >= 2, f"block_size: {self.block_size} must be at least 2")
        require(len(self.taps) > 0, "target_layer_ids: empty; at least one tap is needed")
        require(
            list(self.taps) == sorted(set(self.taps)) and self.taps[0] >= 0,
            f"target_layer_ids: {list(self.taps)} must be ascending layer numbers from 0",
        )

    @property
    def width(self) -> int:
        """W, rows verified for one full block: the anchor and its drafts."""
        return self.block_size + (1 if self.layout is AnchorLayout.ANCHOR_FIRST else 0)

    def queries(self, width: int) -> int:
        """Query rows of the draft pass that serve a block of this width."""
        return width - 1 if self.layout is AnchorLayout.ANCHOR_FIRST else width


@dataclass(frozen=True)
class CacheConfig:
    """Paged cache: how many pages of PAGE_SIZE tokens, and whether full pages are shared by prefix."""

    num_pages: int
    prefix_caching: bool = True
    watermark: float = 0.01  # share of pages that admission leaves free

    def __post_init__(self) -> None:
        require(self.num_pages >= 2, f"num_pages: {self.num_pages} must be at least 2")
        require(0.0 <= self.watermark < 1.0, f"watermark: {self.watermark} must lie in [0, 1)")


@dataclass(frozen=True)
class EngineConfig:
    """The engine: dtype, device, capacity. num_pages None sizes the cache from free memory.

    graphs: on a GPU, decode steps are captured as CUDA graphs and replayed. graph_kinds: which are captured at the
    start, those of requests that are all greedy, those of others, or both; the rest when first needed, while all wait.
    lag: steps that may run before the tokens of the one before are read: 1 keeps a GPU busy, 0 reads each step at once;
    None is 1 on a GPU and 0 on a CPU.
    On a GPU: attention_layout of verification and draft blocks as of kernels.attention.AttentionOptions; deterministic:
    the bits of a target's row depend on its own tokens alone, so that text in bfloat16 too is the same with any policy,
    batch, preemption and prefix hit.

    draft_weights: "fp8" keeps the drafter's projections, and a copy of the LM head for its drafts, in eight bits:
    faster from compute capability 8.9 on, slower elsewhere. It may cost accepted drafts; text is what it was.

    kv_cache_dtype, draft_kv_cache_dtype: of keys and values of target and drafter; auto is the dtype of the model, fp8
    (or fp8_e4m3) takes half the memory of bfloat16 and rounds them once, when they are written. The target's rounding
    changes the text, of every policy to the same; the drafter's only what is accepted.

    tensor_parallel: processes, each with a device of its own, that share the model. check_ranks: for debugging, they
    compare what each made of every step and stop at the first difference.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_requests: int = 16
    max_model_len: int | None = None
    max_prefill_tokens: int = 512
    num_pages: int | None = None
    memory_fraction: float = 0.3
    prefix_caching: bool = True
    seed: int = 0
    graphs: bool = True
    graph_kinds: str = "both"
    lag: int | None = None
    attention_layout: str = "packed"
    deterministic: bool = False
    draft_weights: str = "auto"
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    check_ranks: bool = False

    def __post_init__(self) -> None:
        require_one_of("dtype", self.dtype, ("auto", *DTYPES))
        require_one_of("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        for name in ("kv_cache_dtype", "draft_kv_cache_dtype"):
            require_one_of(name, getattr(self, name), ("auto", *CACHE_DTYPES))
        require_one_of("graph_kinds", self.graph_kinds, GRAPH_KINDS)
        require_one_of("attention_layout", self.attention_layout, ATTENTION_LAYOUTS)
        require(self.lag in (None, 0, 1), f"lag: {self.lag}; allowed are 0 and 1")
        alone, many = self.tensor_parallel == 1, f"not with tensor_parallel {self.tensor_parallel}"
        require(self.tensor_parallel >= 1, f"tensor_parallel: {self.tensor_parallel} must be at least 1")
        require(alone or not self.deterministic, f"deterministic: {many}, which adds up in no fixed order")
        require(alone or self.draft_weights == "auto", f"draft_weights: fp8 {many}; drop one")
        require(self.max_requests > 0, f"max_requests: {self.max_requests} must be positive")
        require(self.max_prefill_tokens > 0, f"max_prefill_tokens: {self.max_prefill_tokens} must be positive")
        require(0 < self.memory_fraction <= 0.95, f"memory_fraction: {self.memory_fraction} must lie in (0, 0.95]")
        longest = self.max_model_len
        require(longest is None or longest > 1, f"max_model_len: {longest} must be at least 2")


POLICIES = "off, full, fixed:W (W from 1), dvl, dvl:seeded, confidence, dspark, auto"


@dataclass(frozen=True)
class SpeculationConfig:
    """How drafts are verified. width None takes the drafter's own; slots is the budget per request (dscale.md §2)."""

    policy: str = "auto"
    width: int | None = None
    slots: float = 8.0
    layout: str | None = None  # overrides the drafter's anchor layout

    def __post_init__(self) -> None:
        name, _, argument = self.policy.partition(":")
        known = (
            (name in ("off", "full", "confidence", "dspark", "auto") and not argument)
            or (name == "dvl" and argument in ("", "exact", "seeded"))
            or (name == "fixed" and argument.isdigit() and int(argument) >= 1)
        )
        require(known, f"policy: {self.policy!r} is not known; allowed are {POLICIES}")
        require(self.width is None or self.width >= 2, f"width: {self.width} must be at least 2")
        require(math.isfinite(self.slots) and self.slots >= 1, f"slots: {self.slots} must be at least 1")
        if self.layout is not None:
            require_one_of("layout", self.layout, [layout.value for layout in AnchorLayout])


GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "choice", "ebnf")
MAX_GRAMMAR_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class Grammar:
    """What a text has to be: any JSON object, JSON of a schema, a full match of a regex, one of some texts, or a
    sentence of a context-free grammar whose first rule is `root` (EBNF in GBNF's dialect).

    text: the schema as JSON, the regex, the choices as a JSON list, the grammar; empty for json_object.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        require(self.kind in GRAMMAR_KINDS, f"grammar: {self.kind!r} is not known; allowed are {GRAMMAR_KINDS}")
        require(
            len(self.text) <= MAX_GRAMMAR_CHARACTERS,
            f"{self.kind}: {len(self.text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed",
        )

    @classmethod
    def json_schema(cls, schema: str | bool | dict[str, Any]) -> Grammar:
        """JSON that a schema (draft 2020-12) admits; the schema as an object or as JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        require(
            len(texts) > 0 and not isinstance(texts, str) and all(isinstance(one, str) for one in texts),
            "choice: give a list of at least one text",
        )
        return cls("choice", json.dumps(list(texts)))


MOST_TEMPERATURE = 1e4  # more is uniform anyway
LEAST_TEMPERATURE = 1e-5  # less is greedy: no noise outweighs a logit divided by it
MOST_TOP_K = (1 << 31) - 1  # more than any vocabulary has


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Names and defaults follow vLLM's and OpenAI's.

    temperature 0 is greedy; top_k 0 and -1, top_p 1 and min_p 0 switch that filter off. seed None takes one from the
    engine. logprobs and prompt_logprobs ask for that many alternatives per token (0: only the token's own). grammar:
    what the text has to be; the answer ends with an end token once it is complete, min_tokens or not, and is incomplete
    when max_tokens cuts it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else min(self.top_k, MOST_TOP_K))
        require(self.n >= 1, f"n: {self.n} must be at least 1")
        require(
            0 <= self.temperature <= MOST_TEMPERATURE,
            f"temperature: {self.temperature} must be 0 or positive, and at most {MOST_TEMPERATURE:g}",
        )
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        require(self.top_k >= 0, f"top_k: {self.top_k} must be -1, 0 (off) or positive")
        require(0 < self.top_p <= 1, f"top_p: {self.top_p} must lie in (0, 1]")
        require(0 <= self.min_p <= 1, f"min_p: {self.min_p} must lie in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, f"{name}: {getattr(self, name)} must lie in [-2, 2]")
        require(self.repetition_penalty > 0, f"repetition_penalty: {self.repetition_penalty} must be positive")
        require(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens: {self.max_tokens} must be at least 1")
        require(self.min_tokens >= 0, f"min_tokens: {self.min_tokens} must be 0 or positive")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        require(fits, f"min_tokens: {self.min_tokens} is more than max_tokens {self.max_tokens}")
        require(all(stop), "stop: an empty string can never be found; give non-empty strings")
        require(
            self.grammar is None or not self.ignore_eos,
            "ignore_eos: a grammar ends the text with an end token; give one or the other",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 20, f"{name}: {value} must lie in [0, 20]")

    @property
    def greedy(self) -> bool:
        """True when the highest logit is taken."""
        return self.temperature == 0.0

    @cached_property
    def needs_host(self) -> bool:
        """True when a step needs the host's hand, so that it is neither captured nor read late: logits are edited, or
        log-probabilities wanted."""
        return self.edits_logits or self.logprobs is not None

    @cached_property
    def edits_logits(self) -> bool:
        """True when logits depend on the text before them or are biased."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.logit_bias or self.min_tokens or self.grammar is not None)
