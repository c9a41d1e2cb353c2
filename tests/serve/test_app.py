"""The server as its clients meet it: the official openai client and httpx against a uvicorn on a free port."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from dscale.config import SamplingParams
from dscale.serve.app import build_app
from tests.serve.inprocess import (
    CALL,
    CHAT,
    TOOLS,
    Scripted,
    byte_tokenizer,
    post,
    service_of,
    tiny_llm,
    wait_for,
)

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
