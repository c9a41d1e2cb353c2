"""What clients may send, checked field by field, and the SamplingParams it means. OpenAI's names and, beyond them,
vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dscale.config import Grammar, InputError, SamplingParams
from dscale.serve.errors import from_input, invalid

MAX_N = 128  # sequences a prompt may ask for
MAX_STOPS = 64  # stop strings
MAX_DEPTH = 64  # lists and objects inside one another
SEEDS = 2**63  # seeds lie below, and not under minus this
# Known to OpenAI's or vLLM's clients and without effect on the text here.
IGNORED = frozenset(
    (
        "user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id", "priority",
        "include_reasoning", "spaces_between_special_tokens",
    )
)  # fmt: skip
# Known, and would change the text: refused unless they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def is_container(value: Any) -> bool:
    """True for lists and objects."""
    return isinstance(value, dict | list)


class Body(BaseModel):
    """A request body: no silent conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _shallow(cls, value: Any) -> Any:
        level, depth = [value], 0
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"the body is nested more than {MAX_DEPTH} levels deep")
            inner = (one.values() if isinstance(one, dict) else one for one in level)
            level = [part for values in inner if isinstance(values, Iterable) for part in values if is_container(part)]
        return value

    @model_validator(mode="after")
    def _known(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name not in IGNORED and name not in UNSUPPORTED:
                known = sorted({*type(self).model_fields, *IGNORED})
                near = get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"unknown field {name[:60]!r}{hint}")
            if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return self


class StreamOptions(BaseModel):
    """include_usage: a last event with the usage and no choices; continuous_usage_stats: usage on every event."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    """The json_schema of a response_format."""

    model_config = ConfigDict(strict=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """text, json_object, or json_schema with its schema."""

    model_config = ConfigDict(strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's newer name for the guided fields; one of them."""

    model_config = ConfigDict(strict=True, extra="forbid")
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Body):
    """What chat and completions share. A field left out or null takes its default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    dscale_steps: bool | None = None  # events of a stream tell what each decode step drafted, verified and accepted
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def sequences(self) -> int:
        """Answers to one prompt."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """True when the stream ends with an event of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None


class Message(BaseModel):
    """One message of a conversation; fields that the template may read beyond these are kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    """A function the model may call."""

    model_config = ConfigDict(strict=True)
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool; only functions exist."""

    model_config = ConfigDict(strict=True)
    type: Literal["function"]
    function: Function


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class PolicyBody(Body):
    """POST /dscale/policy: the policy for the steps to come."""

    policy: str = Field(max_length=64)
    slots: float | None = Field(None, ge=1, le=1024)
    width: int | None = Field(None, ge=2, le=1024)


def sampling_of(body: Generation, **changes: Any) -> SamplingParams:
    """The SamplingParams of one sequence (n is 1); ApiError 400 names the field that cannot be."""
    shared = {field.name for field in fields(SamplingParams)} & set(Generation.model_fields) - {"n", "logit_bias"}
    values = {name: getattr(body, name) for name in shared if getattr(body, name) is not None}
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise invalid(f"stop: {len(body.stop)} stop strings; at most {MAX_STOPS} are allowed", "stop")
    values |= {"logit_bias": _bias(body.logit_bias), "grammar": grammar_of(body), **changes}
    try:
        return replace(SamplingParams(), **values)
    except InputError as error:
        raise from_input(error, type(body).model_fields) from None


def chat_sampling(body: ChatBody, **changes: Any) -> SamplingParams:
    """As sampling_of; an answer may be as long as the context allows unless a cap is given."""
    caps = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(caps) > 1:
        raise invalid("max_tokens: differs from max_completion_tokens; give one of them", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_of(body, max_tokens=caps.pop() if caps else None, logprobs=wanted, **changes)


def completion_sampling(body: CompletionBody) -> SamplingParams:
    """As sampling_of, with the alternatives a completion's logprobs asks for."""
    return sampling_of(body, logprobs=body.logprobs)


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    for name, value in given.items():
        if not (name.isdecimal() and name.isascii() and len(name) < 10):
            raise invalid(f"logit_bias: {name[:40]!r} is not a token id", "logit_bias")
        if not -100 <= value <= 100:
            raise invalid(f"logit_bias: {value} for token {name} must lie in [-100, 100]", "logit_bias")
    return {int(name): float(value) for name, value in given.items()}


def grammar_of(body: Generation) -> Grammar | None:
    """What the text has to be; ApiError 400 when that is asked for in two ways, or makes no sense."""
    asked = {f"guided.{name}": getattr(body, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    if body.structured_outputs is not None:
        asked |= {
            f"structured_outputs.{name}": value
            for name, value in body.structured_outputs.model_dump(by_alias=True).items()
        }
    if body.response_format is not None:
        asked |= _format_asked(body.response_format)
    given = [(name, value) for name, value in asked.items() if value not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        first, second = (name.replace("guided.", "guided_") for name, _ in given[:2])
        raise invalid(f"{first}: is given together with {second}; give one of them", first)
    ((name, value),) = given
    try:
        return _grammar(name.rpartition(".")[2], value)
    except InputError as error:
        field = name.replace("guided.", "guided_").partition(".")[0]
        raise invalid(f"{field}: {error}", field) from None


def _format_asked(format: ResponseFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"response_format.json_object": format.type == "json_object"}
    schema = format.json_schema.schema_ if format.json_schema is not None else None
    if schema is None:
        raise invalid("response_format: json_schema needs json_schema.schema", "response_format")
    return {"response_format.json": schema}


def _grammar(name: str, value: Any) -> Grammar:
    if name == "json_object":
        return Grammar("json_object")
    if name == "json":
        return Grammar.json_schema(value)
    return Grammar.choice(value) if name == "choice" else Grammar({"grammar": "ebnf"}.get(name, name), value)
