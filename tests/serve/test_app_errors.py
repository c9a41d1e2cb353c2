"""What the server says to requests that are wrong, refused, late or left alone by their client."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from dscale.serve.messages import Refused
from tests.serve.inprocess import CHAT, Scripted, post, wait_for

BAD = [
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", [1], 400, None),
    ("/v1/chat/completions", {"messages": [{"role": "pirate", "content": "x"}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages.0.content",
    ),
    ("/v1/chat/completions", {"messages": CHAT, "n": 10**9}, 400, "n"),
    ("/v1/chat/completions", {"messages": CHAT, "n": 100}, 400, "n"),
    ("/v1/chat/completions", {"messages": CHAT, "temperature": "hot"}, 400, "temperature"),
    ("/v1/chat/completions", {"messages": CHAT, "temperature": -1}, 400, "temperature"),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": "5"}, 400, "max_tokens"),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": True}, 400, "max_tokens"),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 2**80}, 400, "seed"),
    ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"messages": CHAT, "stop": [1]}, 400, "stop"),
    ("/v1/chat/completions", {"messages": CHAT, "stop": [""]}, 400, "stop"),
    ("/v1/chat/completions", {"messages": CHAT, "stop": ["x"] * 65}, 400, "stop"),
    ("/v1/chat/completions", {"messages": CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("/v1/chat/completions", {"messages": CHAT, "logit_bias": {"1": 101}}, 400, "logit_bias"),
    ("/v1/chat/completions", {"messages": CHAT, "stop_token_ids": list(range(99))}, 400, None),
    ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs"),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    ("/v1/chat/completions", {"messages": CHAT, "model": "gpt-9"}, 404, "model"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [10**9]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [2**70]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 3000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "echo": True}, 400, None),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, 400, "min_tokens"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [999]}, 400, "tokens"),
    ("/dscale/policy", {"policy": "never"}, 400, "policy"),
    ("/dscale/policy", {"policy": "fixed:99"}, 400, "policy"),
    ("/nowhere", {}, 404, None),
    ("/v1/models", {}, 405, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_requests_are_told_which_field(url, path, body, status, param):
    response = post(url, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 500


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"{", "application/json", "not JSON"),
        (b"", "application/json", "JSON object"),
        (b'{"prompt": "a"}', "text/plain", "Content-Type: application/json"),
        (b"\xff\xfe", "application/json", "body"),
        (b"[" * 100_000, "application/json", "body"),
        (b'{"prompt": "\\ud800"}', "application/json", "surrogates"),
        (b'{"prompt": "a", "model": "\\ud800"}', "application/json", "not served"),
        (b'{"prompt": "a", "guided_json": ' + b'{"a":' * 200 + b"1" + b"}" * 201, "application/json", "64 levels"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "application/json", "temperature"),
        (b'{"prompt": "a", "tempratur": 1}', "application/json", "did you mean temperature"),
    ],
)
def test_bodies_that_are_no_request(url, content, kind, message):
    response = httpx.post(f"{url}/v1/completions", content=content, headers={"content-type": kind})
    assert response.status_code == (404 if message == "not served" else 400)
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"messages": [{"role": "user", "content": "\\ud800"}]}])
def test_lone_surrogates_of_messages_are_refused(url, body):
    text = json.dumps(body).replace("\\\\ud800", "\\ud800")
    response = httpx.post(f"{url}/v1/chat/completions", content=text, headers={"content-type": "application/json"})
    assert response.status_code == 400


def test_large_bodies_are_refused_with_and_without_a_length(scripted):
    _, url, _ = scripted(Scripted(), max_body=4096)
    text = json.dumps({"prompt": "x" * 20000}).encode()
    headers = {"content-type": "application/json"}
    for content in (text, iter([text[:3000], text[3000:]])):
        response = httpx.post(f"{url}/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


def test_api_keys(scripted):
    _, url, _ = scripted(Scripted(), api_key=("first-key", "second-key"))
    body = {"prompt": "a"}
    for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "first-key"}):
        response = post(url, "/v1/completions", body, headers=headers)
        known = "first-key" in headers.get("authorization", "")
        assert response.status_code == (200 if known else 401)
    assert post(url, "/v1/completions", body, headers={"authorization": "Bearer second-key"}).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/metrics").status_code == 401
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as api, pytest.raises(openai.AuthenticationError):
        api.models.list()


def test_events_are_lines_to_every_reader(scripted):
    """Clients that part lines as Python does would find ends inside of the JSON."""
    text = "a\u2028b\x85c\u2029d é"
    _, url, _ = scripted(Scripted([text]))
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.read().decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(choice["text"] for one in events for choice in one["choices"]) == text


def test_a_silent_engine_makes_the_server_unhealthy(scripted):
    client, url, _ = scripted(Scripted(), stall_seconds=5.0)
    client.silence = 5.1
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()) == (503, {"status": "stalled"})
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stalled")
    assert refused.headers["retry-after"] == "5"
    client.silence = 4.9
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_limits_answer_503_and_429_with_retry_after(scripted):
    _, url, service = scripted(Scripted(ending="hang"), max_requests=1, max_queue=1)
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True, "n": 2}) as held:
        lines = held.iter_lines()
        next(lines)
        response = post(url, "/v1/completions", {"prompt": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert httpx.get(f"{url}/health").status_code == 503
    wait_for(lambda: service.open == 0)
    assert httpx.get(f"{url}/health").status_code == 200
    _, url, _ = scripted(Scripted(ending="hang"), max_per_client=1)
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as held:
        lines = held.iter_lines()
        next(lines)
        response = post(url, "/v1/completions", {"prompt": "a"})
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")


@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        (Refused("", "invalid", "no"), 400, "invalid_value"),
        (Refused("", "overloaded", "full"), 503, "overloaded"),
        (Refused("", "shutdown", "bye"), 503, "shutting_down"),
        ("died", 500, "engine"),
        ("abort", 503, "shutting_down"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(scripted, ending, status, code, stream):
    text = () if ending == "died" else ("one",)
    _, url, service = scripted(Scripted(text, ending))
    response = post(url, "/v1/completions", {"prompt": "a", "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert service.open == 0


def test_a_stream_whose_engine_dies_ends_with_an_error(scripted):
    _, url, service = scripted(Scripted(["a", "b"], "died"))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        stream = api.chat.completions.create(model="tiny", messages=CHAT, stream=True)
        with pytest.raises(openai.APIError, match="engine process ended"):
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    wait_for(lambda: service.open == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_take_too_long(scripted, stream):
    client, url, service = scripted(Scripted([], "hang"), request_timeout=0.2)
    response = post(url, "/v1/completions", {"prompt": "a", "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    wait_for(lambda: client.closed == 1 and service.open == 0)


def test_a_body_that_does_not_come(scripted):
    import socket

    _, url, _ = scripted(Scripted(), body_timeout=0.2)
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        )
        answer = sock.recv(4096)
    assert b"408" in answer.split(b"\r\n")[0]


def test_what_goes_wrong_inside_is_not_shown(scripted):
    client, url, _ = scripted(Scripted())
    client.generate = lambda submit: 1 / 0
    response = post(url, "/v1/completions", {"prompt": "a"}, headers={"x-request-id": "my-1"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "my-1"
    assert response.json()["error"]["code"] == "internal"
    assert "division" not in response.text


# --- disconnects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_aborts_all_its_sequences(engine, url, stream):
    before = len(engine.aborted)
    body = {
        "prompt": "go",
        "n": 3,
        "stream": stream,
        "max_tokens": 400,
        "ignore_eos": True,
        "logit_bias": {"256": -100},
    }
    if stream:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: len(engine.aborted) >= before + 1)
    wait_for(lambda: not engine.llm.engine.busy and engine.llm.engine.scheduler.pool.held == 0)


def test_a_reader_that_stops_reading_is_cut(scripted, monkeypatch):
    import socket

    monkeypatch.setattr("dscale.serve.streams.STALLED", 0.3)
    client, url, service = scripted(Scripted(["x" * 100_000] * 400))
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 10) as sock:
        sock.sendall(head.encode() + body)
        wait_for(lambda: service.open == 1)
        wait_for(lambda: client.closed == 1 and service.open == 0)


def test_a_reader_that_waits_for_the_engine_is_not_cut(scripted, monkeypatch):
    monkeypatch.setattr("dscale.serve.streams.STALLED", 0.1)
    _, url, _ = scripted(Scripted(["a", "b", "c"], pause=0.25))
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}, timeout=20)
    assert [json.loads(line[6:])["choices"][0]["text"] for line in response.text.split("\n\n")[:3]] == ["a", "b", "c"]
    assert response.text.endswith("data: [DONE]\n\n")
