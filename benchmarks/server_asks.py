"""What the load test asks of a server: requests that can be answered, and ones that cannot; and the offline answers.

An Ask is decoded the same by the server and by `dscale.LLM`, so that the two can be compared token by token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dscale import LLM, SamplingParams
from dscale.config import Grammar

THINGS = ("a river", "a clock", "the moon", "a bicycle", "bread", "a violin", "snow", "a lighthouse", "tea", "a map")
FORMS = (
    "Describe {} in two sentences.",
    "What is {} good for?",
    "Write a short poem about {}.",
    "Explain {} to a child of {} years.",
    "List {} facts about {}.",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "good": {"type": "boolean"}},
    "required": ["name", "good"],
}
STOPS: tuple[tuple[str, ...], ...] = ((".",), (" the", "\n\n"), ("and", "?"))


@dataclass(frozen=True)
class Choice:
    """One sequence as it was answered. scores: log-probabilities of its tokens, where asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    scores: list[float] | None = None


@dataclass(frozen=True)
class Ask:
    """A request with an answer. prompts: one conversation's question (chat), or texts to continue."""

    chat: bool
    prompts: tuple[str, ...]
    params: SamplingParams
    stream: bool = False

    @property
    def path(self) -> str:
        """Its route."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The JSON to send."""
        one = self.params
        body: dict[str, Any] = {
            "max_tokens": one.max_tokens, "temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k,
            "n": one.n, "presence_penalty": one.presence_penalty, "ignore_eos": one.ignore_eos,
            "stream": self.stream, "return_token_ids": True,
        }  # fmt: skip
        body |= {"seed": one.seed} if one.seed is not None else {}
        body |= {"stop": list(one.stop)} if one.stop else {}
        body |= {"logit_bias": {str(token): bias for token, bias in one.logit_bias.items()}} if one.logit_bias else {}
        if one.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": one.logprobs} if self.chat else {"logprobs": one.logprobs}
        if one.grammar is not None:
            body["guided_json"] = json.loads(one.grammar.text)
        if self.chat:
            return body | {"messages": [{"role": "user", "content": self.prompts[0]}]}
        return body | {"prompt": list(self.prompts) if len(self.prompts) > 1 else self.prompts[0]}


def question(rng: random.Random) -> str:
    """A prompt; a few hundred differ, so that prefixes are met again."""
    return rng.choice(FORMS).format(*(rng.choice(THINGS) for _ in range(2)))


def made_ask(rng: random.Random, longest: int) -> Ask:
    """A request of at most `longest` new tokens: greedy or seeded, some with n, stops, scores, edits or a grammar."""
    chat = rng.random() < 0.6
    prompts = tuple(question(rng) for _ in range(1 if chat or rng.random() < 0.8 else rng.randint(2, 3)))
    style: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.5:
        seed = rng.randrange(1 << 40)
        style = {"temperature": rng.choice((0.6, 1.0)), "top_p": rng.choice((0.9, 1.0)), "top_k": 40, "seed": seed}
    if rng.random() < 0.2:
        style["n"] = rng.randint(2, 4)
    if rng.random() < 0.12:
        style["logprobs"] = rng.randint(1, 4)
    if rng.random() < 0.1:
        style["stop"] = rng.choice(STOPS)
    if rng.random() < 0.08:
        style |= rng.choice(({"presence_penalty": 0.8}, {"logit_bias": {rng.randrange(1000): 4.0}}))
    if rng.random() < 0.06:
        style["grammar"] = Grammar.json_schema(SCHEMA)
    else:
        style["ignore_eos"] = rng.random() < 0.3
    return Ask(chat, prompts, SamplingParams(max_tokens=rng.randint(1, longest), **style), rng.random() < 0.5)


def wide_ask(rng: random.Random) -> Ask:
    """A stream of much text a token, for readers that take their time over it."""
    style: dict[str, Any] = {"temperature": 1.0, "seed": rng.randrange(1 << 40), "n": 4, "logprobs": 5}
    return Ask(True, (question(rng),), SamplingParams(max_tokens=48, ignore_eos=True, **style), stream=True)


@dataclass(frozen=True)
class Wrong:
    """A request that must be refused with this status. content: the body as it is sent."""

    name: str
    content: bytes
    status: int
    path: str = "/v1/chat/completions"


def made_wrong(rng: random.Random, most_body: int) -> Wrong:
    """One of what a server has to bear."""
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    types = rng.choice(
        ({"max_tokens": "many"}, {"messages": "Hi"}, {"temperature": [1]}, {"stream": 7}, {"stop": {"a": 1}},
         {"messages": [{"role": "user", "content": 3}]}, {"logit_bias": "x"}, {"seed": 0.5}, {"top_p": None, "n": {}})
    )  # fmt: skip
    values = rng.choice(
        ({"max_tokens": -1}, {"temperature": -3}, {"temperature": 1e308}, {"top_p": 2}, {"presence_penalty": 9},
         {"top_logprobs": 99, "logprobs": True}, {"seed": 1 << 80}, {"max_tokens": 0}, {"n": 0}, {"n": -5})
    )  # fmt: skip
    broken = rng.choice((b'{"messages": [', b"", b"\xff\xfe\x00", b"[" * 5000, b"null", b'{"a": NaN', b'"text"'))
    long = {"messages": [{"role": "user", "content": "word " * 3000}]}
    cases = (
        Wrong("bad JSON", broken, 400),
        Wrong("wrong types", json.dumps(good | types).encode(), 400),
        Wrong("wrong values", json.dumps(good | values).encode(), 400),
        Wrong("huge n", json.dumps(good | {"n": rng.choice((10**6, 1 << 70, 4000))}).encode(), 400),
        Wrong("unknown model", json.dumps(good | {"model": "other"}).encode(), 404),
        Wrong("over the context", json.dumps(good | long).encode(), 400),
        Wrong("oversize body", b'{"x": "' + b"y" * (most_body + rng.randrange(1 << 20)) + b'"}', 413),
        Wrong("bad grammar", json.dumps(good | {"guided_regex": "(("}).encode(), 400),
        Wrong("unknown route", b"{}", 404, "/v1/chatter"),
    )
    return rng.choice(cases)


def offline(llm: LLM, asks: Sequence[Ask]) -> list[list[Choice]]:
    """The choices that `dscale.LLM` gives to each."""
    prompts, params, parts = [], [], []
    for ask in asks:
        tokenizer = llm.loaded.tokenizer
        for prompt in ask.prompts:
            chat = [{"role": "user", "content": prompt}]
            prompts.append(tokenizer.chat(chat) if ask.chat else tokenizer.encode(prompt))
            params.append(ask.params)
        parts.append(len(ask.prompts))
    outputs = iter(llm.generate(sampling_params=params, prompt_token_ids=prompts))
    answers = []
    for count in parts:
        sequences = [one for _ in range(count) for one in next(outputs).outputs]
        answers.append([choice_of(one) for one in sequences])
    return answers


def choice_of(output: Any) -> Choice:
    """A sequence of an offline output."""
    scores = None if output.logprobs is None else [one.logprob for one in output.logprobs]
    return Choice(output.text, list(output.token_ids), output.finish_reason, scores)


def difference(got: Sequence[Choice], want: Sequence[Choice]) -> str | None:
    """Where two answers differ first, if they do."""
    if len(got) != len(want):
        return f"{len(got)} choices, offline {len(want)}"
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for name in ("token_ids", "text", "finish_reason", "scores"):
            one, other = getattr(mine, name), getattr(theirs, name)
            if one != other:
                return f"choice {index}, {name}: {str(one)[:200]} against {str(other)[:200]}"
    return None
