"""An OpenAI-compatible server as something to be scored: continuations from it, and teacher forcing over HTTP.

Teacher forcing takes the best that the server offers, found out with the first text:

    prompt_logprobs   vLLM's and ours: every position of the prompt with its best alternative, in one request
    echo              OpenAI's older completions: the prompt's own logprobs echoed, with the best alternative
    one token         otherwise: a request for one greedy token after every prefix

All three score by prefill, while text is made by decoding. The two may round differently on any server, so text of the
reference, scored by the reference, is the control of the comparison (certificate.Evidence).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dscale.config import InputError, SamplingParams, require
from dscale.engine.request import StepRecord
from dscale.evaluate.continuations import Continuation
from dscale.evaluate.scoring import Scores

SECONDS = 600.0  # a request may take
WAYS = ("prompt_logprobs", "echo", "one token")


class Refused(Exception):
    """The server answered, and not with what was asked for."""


@dataclass(frozen=True)
class Endpoint:
    """A server's address, the model's name there, and how many requests it is sent at once."""

    base_url: str
    model: str
    concurrency: int = 8

    @classmethod
    def open(cls, base_url: str, model: str | None = None, concurrency: int = 8) -> Endpoint:
        """Asks the server for its first model where none is named."""
        url = base_url.rstrip("/").removesuffix("/v1")
        if model is None:
            data = _json(url, urllib.request.Request(f"{url}/v1/models")).get("data")
            require(isinstance(data, list) and bool(data), f"{base_url}: names no models; give --served-model")
            assert isinstance(data, list)
            model = str(data[0]["id"])
        return cls(url, model, concurrency)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The first choice of a completion. Refused where the server answers with an error."""
        answer = _json(self.base_url, self._request(body))
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise Refused(f"{self.base_url}: an answer without choices")
        return choices[0] | {key: answer[key] for key in ("prompt_logprobs",) if key in answer}

    def events(self, **body: Any) -> Iterable[dict[str, Any]]:
        """The first choice of every event of a streamed completion."""
        with _opened(self.base_url, self._request(body | {"stream": True})) as reply:
            for line in reply:
                text = line.decode("utf-8", "replace").strip()
                if text.startswith("data:") and text != "data: [DONE]":
                    choices = json.loads(text.removeprefix("data:")).get("choices") or []
                    yield from choices[:1]

    def _request(self, body: dict[str, Any]) -> urllib.request.Request:
        data = json.dumps({"model": self.model, **body}).encode()
        head = {"Content-Type": "application/json"}
        return urllib.request.Request(f"{self.base_url}/v1/completions", data=data, headers=head)

    def each(self, task: Callable[[Any], Any], over: Sequence[Any]) -> list[Any]:
        """task(one) for all, `concurrency` at a time, in order."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(task, over))


def _opened(url: str, request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        told = error.read(400).decode("utf-8", "replace").replace("\n", " ")
        raise Refused(f"{url}: HTTP {error.code} {told[:200]}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{url}: no answer ({getattr(error, 'reason', None) or error})") from None


def _json(url: str, request: urllib.request.Request) -> dict[str, Any]:
    with _opened(url, request) as reply:
        try:
            value = json.loads(reply.read())
        except ValueError:
            raise InputError(f"{url}: the answer is not JSON; is this an OpenAI-compatible server?") from None
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class RemoteText:
    """A continuation, and whether it ended by itself."""

    given: Continuation
    ended: bool


def capture_remote(
    server: Endpoint, prompts: Sequence[Sequence[int]], params: SamplingParams, encode: Callable[[str], list[int]]
) -> list[RemoteText]:
    """What the server answers to prompts of token ids. Our server tells its steps, other servers do not.

    encode: text to token ids, for servers that do not return ids.
    """
    base = params.seed or 0
    seeded = [(row, base + index) for index, row in enumerate(prompts)]
    return server.each(lambda one: _captured(server, one[0], params, one[1], encode), seeded)


def _captured(
    server: Endpoint, prompt: Sequence[int], params: SamplingParams, seed: int, encode: Callable[[str], list[int]]
) -> RemoteText:
    body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": params.max_tokens, "temperature": params.temperature}
    body |= {"seed": seed, "top_p": params.top_p}
    try:
        events = list(server.events(**body, return_token_ids=True, dscale_steps=True))
    except Refused:
        events = _whole(server, body)
    tokens = [token for event in events for token in event.get("token_ids") or ()]
    if not tokens:
        tokens = encode("".join(event.get("text") or "" for event in events))
    told = [event["dscale"]["steps"] for event in events if "dscale" in event]
    steps = tuple(StepRecord(**step) for of in told for step in of) if told else None
    if steps is not None and sum(step.emitted for step in steps) != len(tokens):
        steps = None
    ended = any(event.get("finish_reason") == "stop" for event in events)
    return RemoteText(Continuation(tuple(prompt), tuple(tokens), params, steps), ended)


def _whole(server: Endpoint, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer in one piece, for servers that refuse fields they do not know."""
    try:
        return [server.complete(**body)]
    except Refused as error:
        raise InputError(f"{error}; a server has to complete prompts of token ids") from None


class RemoteScorer:
    """Teacher forcing over HTTP. way: one of WAYS, once it is known."""

    def __init__(self, server: Endpoint) -> None:
        self.server = server
        self.way: str | None = None

    def score(self, given: Sequence[Continuation]) -> list[Scores]:
        """Scores of each continuation; greedy. InputError when the server offers none of the ways."""
        if self.way is None:
            self.way = self._find(given[0])
        return self.server.each(self._by_way(self.way), given)

    def _find(self, given: Continuation) -> str:
        told = ""
        for way in WAYS:
            try:
                self._by_way(way)(given)
                return way
            except (Refused, KeyError, TypeError, IndexError, ValueError) as error:
                told = str(error)
        raise InputError(f"{self.server.base_url}: offers no way of teacher forcing ({told})")

    def _by_way(self, way: str) -> Callable[[Continuation], Scores]:
        return {"prompt_logprobs": self._prompt_logprobs, "echo": self._echo, "one token": self._one_token}[way]

    def _prompt_logprobs(self, given: Continuation) -> Scores:
        text = [*given.prompt, *given.tokens]
        answer = self.server.complete(prompt=text, max_tokens=1, temperature=0.0, prompt_logprobs=1)
        rows = answer["prompt_logprobs"][len(given.prompt) :]
        choice, margin = [], []
        for token, row in zip(given.tokens, rows, strict=True):
            known = {int(id): float(one["logprob"]) for id, one in row.items()}
            best = max(known, key=lambda id: (known[id], id == token))
            choice.append(best)
            margin.append(known[best] - known[token])
        found = np.array(choice, np.int64)
        return Scores(found, found != np.array(given.tokens), np.array(margin))

    def _echo(self, given: Continuation) -> Scores:
        text = [*given.prompt, *given.tokens]
        answer = self.server.complete(prompt=text, max_tokens=1, temperature=0.0, echo=True, logprobs=1)
        scores = answer["logprobs"]
        inside = slice(len(given.prompt), len(text))
        rows = list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))[inside]
        if len(rows) != len(given.tokens):
            raise Refused("echo gives another number of tokens than the prompt has")
        best = [max(top, key=top.__getitem__) for _, _, top in rows]
        margin = np.array([max(top.values()) - own for _, own, top in rows])
        wrong = np.array([choice != token for choice, (token, _, _) in zip(best, rows, strict=True)]) & (margin > 0)
        return Scores(np.array(best, object), wrong, np.maximum(margin, 0.0))

    def _one_token(self, given: Continuation) -> Scores:
        found = [self._next(given, place) for place in range(len(given.tokens))]
        choice = np.array(found, np.int64)
        return Scores(choice, choice != np.array(given.tokens), np.full(len(found), np.nan))

    def _next(self, given: Continuation, place: int) -> int:
        text = [*given.prompt, *given.tokens[:place]]
        answer = self.server.complete(prompt=text, max_tokens=1, temperature=0.0, return_token_ids=True)
        if not answer.get("token_ids"):
            raise Refused("one token: the server returns no token ids")
        return int(answer["token_ids"][0])
