"""Certificates of servers: all ways of teacher forcing agree with the engine's own, and a wrong server is caught."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from dscale.config import InputError
from dscale.engine.llm import LLM
from dscale.evaluate.continuations import Continuation, capture, sampling_of
from dscale.evaluate.remote import Endpoint, RemoteScorer, capture_remote
from dscale.evaluate.remote_certification import certify_server
from dscale.evaluate.repeats import repeat_server
from dscale.evaluate.scoring import teacher_force
from tests.engine.pairs import make_llm, tiny_target

GREEDY = sampling_of(0.0, 24, 0)
PROMPTS = [[(3 * i + j) % 5 for j in range(6 + i)] for i in range(6)]
Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


class Model:
    """Completions by a tiny engine, in the dialect of a kind of server. wrong: chance that it writes another token."""

    def __init__(self, ways: tuple[str, ...], wrong: float = 0.0) -> None:
        self.llm: LLM = make_llm(tiny_target("llama"), "off")
        self.ways, self.wrong, self.lock = ways, wrong, threading.Lock()
        self.rng = np.random.default_rng(0)

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """A choice; None refuses the request."""
        refused = body.get("stream") or ("prompt_logprobs" in body and "prompt_logprobs" not in self.ways)
        if refused or ("echo" in body and "echo" not in self.ways):
            return None
        with self.lock:
            made = self._made(body)
            if "prompt_logprobs" in body or "echo" in body:
                made |= self._scores(body)
        return made

    def _made(self, body: dict[str, Any]) -> dict[str, Any]:
        text = list(body["prompt"])
        params = sampling_of(0.0, 1, 0)
        for _ in range(body["max_tokens"]):
            (token,) = self.llm.generate(prompt_token_ids=[text], sampling_params=params)[0].outputs[0].token_ids
            off = body["max_tokens"] > 1 and self.rng.random() < self.wrong
            text.append((token + 1) % 5 if off else token)
        made = text[len(body["prompt"]) :]
        spoken = {"text": "".join(map(str, made)), "finish_reason": "length"}
        return spoken | ({"token_ids": made} if "return_token_ids" in body or self.ways == () else {})

    def _scores(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body["prompt"]
        scored = teacher_force(self.llm, [Continuation((text[0],), tuple(text[1:]), GREEDY)])[0]
        rows = list(zip(text[1:], scored.choice.tolist(), (-scored.margin).tolist(), strict=True))
        if "echo" in body:
            top = [None, *({str(best): 0.0, str(token): own} for token, best, own in rows)]
            own = [None, *(own for _, _, own in rows)]
            return {"logprobs": {"tokens": [str(one) for one in text], "token_logprobs": own, "top_logprobs": top}}
        known = [{str(best): {"logprob": 0.0}, str(token): {"logprob": own}} for token, best, own in rows]
        return {"prompt_logprobs": [None, *known]}


@contextmanager
def served(model: Model) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            choice = model.answer(body)
            self.reply(400, {"error": "unknown field"}) if choice is None else self.reply(200, {"choices": [choice]})

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def encode(text: str) -> list[int]:
    return [int(one) for one in text]


@pytest.mark.parametrize(
    ("ways", "found"),
    [(("prompt_logprobs", "echo"), "prompt_logprobs"), (("echo",), "echo"), (("ids",), "one token")],
)
def test_every_way_scores_as_the_engine_does(ways: tuple[str, ...], found: str) -> None:
    own = capture(make_llm(tiny_target("llama"), "off"), PROMPTS[:3], GREEDY)
    spoiled = Continuation(own[1].prompt, (*own[1].tokens[:5], (own[1].tokens[5] + 1) % 5, *own[1].tokens[6:]), GREEDY)
    given = [own[0], spoiled, own[2]]
    expected = teacher_force(make_llm(tiny_target("llama"), "off"), given)
    with served(Model(ways)) as url:
        scorer = RemoteScorer(Endpoint.open(url, concurrency=2))
        scores = scorer.score(given)
    assert scorer.way == found
    for score, want in zip(scores, expected, strict=True):
        assert score.wrong.tolist() == want.wrong.tolist()
        assert [int(one) for one in score.choice] == want.choice.tolist()
        if found != "one token":
            assert score.margin == pytest.approx(want.margin, abs=1e-5)
    assert scores[1].wrong[5]


def test_text_of_a_server_is_captured_with_and_without_ids() -> None:
    expected = [one.tokens for one in capture(make_llm(tiny_target("llama"), "off"), PROMPTS, GREEDY)]
    for ways in (("ids",), ()):
        with served(Model(ways)) as url:
            found = capture_remote(Endpoint.open(url), PROMPTS, GREEDY, encode)
        assert [one.given.tokens for one in found] == expected
        assert all(one.given.steps is None for one in found)


def test_a_server_that_changes_nothing_is_certified_and_one_that_errs_is_not() -> None:
    with served(Model(("prompt_logprobs",))) as reference:
        other = Endpoint.open(reference)
        clean, note = certify_server(other, other, PROMPTS, 24, encode)
        with served(Model(("prompt_logprobs",), wrong=0.2)) as url:
            bad, _ = certify_server(Endpoint.open(url), other, PROMPTS, 24, encode, "k4")
    assert clean.verdict.certified
    assert clean.evidence["control"] == [0, 6 * 24]
    assert "does not tell its steps" in clean.verdict.warnings[0]
    assert clean.scope.accepted is None
    assert "scored by prompt_logprobs" in note
    assert not bad.verdict.certified
    assert bad.scope.policy == "k4"
    assert bad.evidence["all"]["violations"] > 10


def test_a_server_repeats_itself_or_not() -> None:
    with served(Model((), wrong=0.1)) as url:
        found = repeat_server(Endpoint.open(url), "server", PROMPTS, GREEDY, encode)
    assert found.diverged > 0
    assert found.sequences == 6


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(InputError, match="no answer"):
        Endpoint.open("http://127.0.0.1:9")
