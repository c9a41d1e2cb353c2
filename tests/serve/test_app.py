"""The server as its clients meet it: the official openai client and httpx against a uvicorn on a free port."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from dscale.config import SamplingParams
from dscale.engine.llm import LLM
from dscale.serve.app import build_app
from dscale.serve.messages import Refused
from tests.serve.inprocess import InProcess, Scripted, byte_tokenizer, live, service_of, tiny_llm

CHAT = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def engine():
    client = InProcess(tiny_llm())
    yield client
    client.stop()
    assert client.llm.engine.scheduler.pool.held == 0


@pytest.fixture(scope="module")
def url(engine):
    with live(service_of(engine)) as address:
        yield address


@pytest.fixture(scope="module")
def offline() -> LLM:
    return tiny_llm("off")


@pytest.fixture
def api(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted():
    """Runs a live server on a Scripted client: (client, url, service)."""
    stack = []

    def start(client: Scripted, **settings):
        service = service_of(client, **settings)
        context = live(service)
        stack.append(context)
        return client, context.__enter__(), service

    yield start
    for context in stack:
        context.__exit__(None, None, None)


def post(url: str, path: str, body, **options) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=20, **options)


def wait_for(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


# --- text -----------------------------------------------------------------------------------------------------------


def chat_ids() -> list[int]:
    return byte_tokenizer().chat(CHAT)


def test_chat_is_the_offline_engines_text_for_every_n_and_seed(api, offline):
    params = SamplingParams(n=3, seed=11, max_tokens=24, temperature=0.8)
    (want,) = offline.generate(prompt_token_ids=[chat_ids()], sampling_params=params)
    got = api.chat.completions.create(model="tiny", messages=CHAT, n=3, seed=11, max_tokens=24, temperature=0.8)
    assert [one.message.content for one in got.choices] == [one.text for one in want.outputs]
    assert [one.finish_reason for one in got.choices] == [one.finish_reason for one in want.outputs]
    assert got.usage.prompt_tokens == len(chat_ids())
    assert got.usage.completion_tokens == sum(len(one.token_ids) for one in want.outputs)
    details = got.usage.completion_tokens_details
    assert details.accepted_draft_tokens + details.decode_steps == got.usage.completion_tokens
    assert details.verified_slots == 8 * details.decode_steps


def test_streams_joined_are_the_whole_answer(api, offline):
    wanted = {"model": "tiny", "messages": CHAT, "n": 2, "seed": 5, "max_tokens": 20}
    whole = api.chat.completions.create(**wanted)
    texts, reasons, roles, usage = {}, {}, {}, None
    for chunk in api.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            roles.setdefault(choice.index, choice.delta.role)
    assert [texts[i] for i in (0, 1)] == [one.message.content for one in whole.choices]
    assert [reasons[i] for i in (0, 1)] == [one.finish_reason for one in whole.choices]
    assert roles == {0: "assistant", 1: "assistant"}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_texts_and_ids_and_keep_their_order(api, offline):
    texts = ["ab", "zz top"]
    ids = [byte_tokenizer().encode(text) for text in texts]
    params = SamplingParams(n=2, seed=3, max_tokens=10)
    want = [one.text for out in offline.generate(prompt_token_ids=ids, sampling_params=params) for one in out.outputs]
    for prompt in (texts, ids):
        got = api.completions.create(model="tiny", prompt=prompt, n=2, seed=3, max_tokens=10)
        assert [one.text for one in got.choices] == want
        assert [one.index for one in got.choices] == [0, 1, 2, 3]
        assert got.usage.prompt_tokens == sum(map(len, ids))
    single = api.completions.create(model="tiny", prompt=ids[0], seed=3, max_tokens=10)
    assert single.choices[0].text == want[0]


def test_every_sampling_field_reaches_the_engine(scripted):
    client, url, _ = scripted(Scripted())
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "repetition_penalty": 1.1, "seed": 9, "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "prompt_logprobs": 1, "max_tokens": 5,
    }  # fmt: skip
    lists = {"stop": ["x", "y"], "stop_token_ids": [4], "logit_bias": {"3": 5}}
    body = {"messages": CHAT, **fields, **lists, "logprobs": True, "top_logprobs": 2}
    assert post(url, "/v1/chat/completions", body).status_code == 200
    want = SamplingParams(
        **{**fields, "stop": ("x", "y"), "stop_token_ids": (4,), "logit_bias": {3: 5.0}, "logprobs": 2}
    )
    assert client.submits[0].params == want
    assert client.submits[0].seed == 9


def test_unseeded_requests_differ_and_follow_the_servers_seed(offline):
    client = Scripted()
    service = service_of(client, seed=17)
    submits = [service.submits("a", [[1]], SamplingParams(), 2), service.submits("b", [[1]], SamplingParams(), 2)]
    llm = tiny_llm("off", seed=17)
    want = [[request.seed for request in llm._submit([1], SamplingParams(n=2))] for _ in range(2)]
    assert [[one.seed for one in group] for group in submits] == want
    assert len({one.seed for group in submits for one in group}) == 4


def test_logprobs_are_the_engines(api, offline):
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)
    (want,) = offline.generate(prompt_token_ids=[chat_ids()], sampling_params=params)
    scores = want.outputs[0].logprobs
    wanted = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    whole = api.chat.completions.create(**wanted).choices[0].logprobs.content
    streamed = []
    for chunk in api.chat.completions.create(**wanted, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == whole
    assert [one.logprob for one in whole] == pytest.approx([one.logprob for one in scores], abs=1e-4)
    letters = byte_tokenizer().backend.convert_ids_to_tokens([one.token_id for one in scores])
    for letter, one in zip(letters, whole, strict=True):
        assert len(one.bytes) == 1 or letter == "<eos>"
        assert len(one.top_logprobs) == 3
    text = api.completions.create(model="tiny", prompt="ab", temperature=0, max_tokens=6, logprobs=2).choices[0]
    assert len(text.logprobs.tokens) == len(text.logprobs.token_logprobs) == len(text.logprobs.text_offset) == 6
    assert text.logprobs.text_offset[0] == 0


def test_stop_strings_are_cut_and_named(url, offline):
    (free,) = offline.generate(prompt_token_ids=[chat_ids()], sampling_params=SamplingParams(seed=2, max_tokens=30))
    stop = free.outputs[0].text[5:7]
    (want,) = offline.generate(
        prompt_token_ids=[chat_ids()], sampling_params=SamplingParams(seed=2, max_tokens=30, stop=[stop])
    )
    body = {"messages": CHAT, "seed": 2, "max_tokens": 30, "stop": stop}
    choice = post(url, "/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == want.outputs[0].text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_many_clients_at_once_each_get_their_own_text(api, offline):
    def ask(seed: int) -> str:
        got = api.completions.create(model="tiny", prompt=f"p{seed % 3}", seed=seed, max_tokens=12)
        return got.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(ask, range(24)))
    ids = [byte_tokenizer().encode(f"p{seed % 3}") for seed in range(24)]
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(24)]
    assert got == [out.outputs[0].text for out in offline.generate(prompt_token_ids=ids, sampling_params=params)]


def test_steps_of_a_stream_add_up(url):
    body = {"messages": CHAT, "stream": True, "max_tokens": 12, "dscale_steps": True, "return_token_ids": True}
    steps, texts, ids = [], [], []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    steps += choice.get("dscale", {}).get("steps", [])
                    texts += choice.get("dscale", {}).get("token_texts", [])
                    ids += choice.get("token_ids", [])
    assert sum(step["emitted"] for step in steps) == 12 == len(texts) == len(ids)
    assert all(step["slots"] == 8 for step in steps)


# --- tools ----------------------------------------------------------------------------------------------------------


def test_tool_calls_whole_and_streamed(scripted):
    pieces = ["Let me see. <tool", CALL[5:20], CALL[20:]]
    _, url, _ = scripted(Scripted(pieces))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as api:
        wanted = {"model": "tiny", "messages": CHAT, "tools": TOOLS}
        whole = api.chat.completions.create(**wanted).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "Let me see. "
        (call,) = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "sky"})
        content, calls, reason = "", [], None
        for chunk in api.chat.completions.create(**wanted, stream=True):
            content += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason or reason
        assert (content, reason) == ("Let me see. ", "tool_calls")
        assert [(one.index, one.function.name) for one in calls] == [(0, "look")]
        none = api.chat.completions.create(**wanted, tool_choice="none").choices[0]
        assert none.message.tool_calls is None
        assert none.message.content == "".join(pieces)


# --- errors ---------------------------------------------------------------------------------------------------------

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


# --- the other routes -----------------------------------------------------------------------------------------------


def test_models_health_version_metrics_about(url, api):
    assert [one.id for one in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{url}/v1/models/other").status_code == 404
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/ready").status_code == 200
    assert "torch" in httpx.get(f"{url}/version").json()
    assert httpx.get(f"{url}/dscale/about").json()["context_length"] == 512
    api.completions.create(model="tiny", prompt="count me", max_tokens=4)
    assert b"vllm:request_success_total" in httpx.get(f"{url}/metrics").content


def test_the_page_needs_no_key_and_nothing_from_elsewhere(scripted):
    _, url, _ = scripted(Scripted(), api_key=("some-long-key",))
    page = httpx.get(f"{url}/")
    assert page.headers["content-type"].startswith("text/html")
    parts = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(parts) >= 3
    assert all(part.startswith("page/") for part in parts)
    assert {httpx.get(f"{url}/{part}").status_code for part in parts} == {200}
    assert httpx.get(f"{url}/page/%2e%2e/v1/models").status_code == 404
    assert httpx.get(f"{url}/page/%2e%2e/app.py").status_code == 404
    assert httpx.get(f"{url}/dscale/live").status_code == 401


def test_tokens_there_and_back(url):
    ids = post(url, "/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert ids == {"count": 2, "max_model_len": 512, "tokens": byte_tokenizer().encode("ab"), "token_strs": ["a", "b"]}
    assert post(url, "/tokenize", {"messages": CHAT}).json()["tokens"] == chat_ids()
    assert post(url, "/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "ab"}
    long = post(url, "/tokenize", {"prompt": "é" * 5000}).json()["tokens"]
    assert long == byte_tokenizer().encode("é" * 5000)


def test_the_policy_is_switched_and_seen_live(engine, url):
    assert post(url, "/dscale/policy", {"policy": "fixed:3"}).json() == {"policy": "fixed:3"}
    try:
        with httpx.stream("GET", f"{url}/dscale/live", timeout=10) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and json.loads(line[6:])["policy"] == "fixed:3":
                    break
    finally:
        assert post(url, "/dscale/policy", {"policy": "full"}).json() == {"policy": "full"}


def test_cors_is_off_unless_asked_for(scripted):
    preflight = {"origin": "http://a.example", "access-control-request-method": "POST"}
    _, url, _ = scripted(Scripted())
    assert "access-control-allow-origin" not in httpx.options(f"{url}/v1/models", headers=preflight).headers
    _, url, _ = scripted(Scripted(), cors_origin=("http://a.example",))
    headers = httpx.options(f"{url}/v1/models", headers=preflight).headers
    assert headers["access-control-allow-origin"] == "http://a.example"


def test_logs_hold_counts_and_no_prompt(scripted, caplog):
    caplog.set_level("INFO", logger="dscale.serve")
    for asked, shown in ((False, False), (True, True)):
        caplog.clear()
        _, url, _ = scripted(Scripted(["a", "b"]), log_prompts=asked)
        post(url, "/v1/completions", {"prompt": "secret words"}, headers={"x-request-id": "r-7"})
        wait_for(lambda: any(record.getMessage() == "request" for record in caplog.records))
        (fields,) = [record.fields for record in caplog.records if record.getMessage() == "request"]
        assert (fields["id"], fields["status"], fields["completion_tokens"], fields["prompt_tokens"]) == (
            "r-7",
            200,
            2,
            12,
        )
        assert ("secret" in json.dumps(fields)) is shown


def test_shutdown_refuses_what_is_new_and_ends_the_live_stream():
    async def run() -> None:
        service = service_of(Scripted())
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
            snapshots = service.snapshots()
            await anext(snapshots)
            service.closing.set()
            assert await asyncio.wait_for(anext(snapshots, None), 5) is None
            response = await client.post("/v1/completions", json={"prompt": "a"})
            assert (response.status_code, response.headers["retry-after"]) == (503, "10")
            assert (await client.get("/health")).json() == {"status": "stopping"}

    asyncio.run(run())
