"""From a checked body to an answer: chat and text completions, whole or as a stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from dscale.config import SamplingParams
from dscale.serve.answers import Answer, ChoiceStream, Envelope, chat_choice, event, text_choice, usage_of
from dscale.serve.chat import call_grammar, offered_tools, render_chat
from dscale.serve.errors import invalid
from dscale.serve.messages import Submit
from dscale.serve.protocol import ChatBody, CompletionBody, Message, Tool, chat_sampling, completion_sampling
from dscale.serve.service import Service
from dscale.serve.streams import EventStream, first_of, watched

MAX_PROMPTS = 2048  # of one completion request


@dataclass(frozen=True)
class Job:
    """What a request asks of the engine, and how its answer looks."""

    envelope: Envelope
    prompts: list[list[int]]
    submits: list[Submit]
    tools: bool = False


async def chat_job(service: Service, body: ChatBody, request_id: str) -> Job:
    """The job of a chat body."""
    tools = offered_tools(body)
    forced = call_grammar(body, tools)
    params = chat_sampling(body, **({"grammar": forced} if forced is not None else {}))
    ids = await encode_chat(service, body.messages, tools, body.chat_template_kwargs)
    return _job(service, "chat", body, params, [ids], request_id, bool(tools))


async def text_job(service: Service, body: CompletionBody, request_id: str) -> Job:
    """The job of a completion body."""
    params = completion_sampling(body)
    prompts = await prompt_ids(service, body)
    return _job(service, "text", body, params, prompts, request_id, False)


def _job(
    service: Service,
    kind: str,
    body: ChatBody | CompletionBody,
    params: SamplingParams,
    prompts: list[list[int]],
    request_id: str,
    tools: bool,
) -> Job:
    sequences = len(prompts) * body.sequences
    if sequences > service.settings.capacity:
        raise invalid(
            f"n: {sequences} sequences are more than this server holds; at most {service.settings.capacity}", "n"
        )
    unique = f"{request_id}-{uuid.uuid4().hex[:8]}"  # a client may use its request id twice
    name = ("chatcmpl-" if kind == "chat" else "cmpl-") + unique
    model = body.model or service.settings.names[0]
    scored = params.logprobs is not None
    envelope = Envelope(name, kind, model, service.names, scored, bool(body.return_token_ids))
    return Job(envelope, prompts, service.submits(unique, prompts, params, body.sequences, bool(body.stream)), tools)


async def encode_chat(
    service: Service, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any] | None
) -> list[int]:
    """Token ids of a conversation."""
    return await service.encode(render_chat(service.tokenizer, messages, tools, options), add_special=False)


async def prompt_ids(service: Service, body: CompletionBody) -> list[list[int]]:
    """Token ids of every prompt of a completion; ApiError 400 for an empty one."""
    prompts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not prompts:
        raise invalid("prompt: is empty; give text or token ids", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt: {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    special = body.add_special_tokens is not False
    return [await service.encode(one, special) if isinstance(one, str) else list(one) for one in prompts]


async def answer(
    service: Service, request: Request, body: ChatBody | CompletionBody, job: Job, log: dict[str, Any]
) -> Response:
    """Run a job. The place it takes is given back when the answer has been sent or the client is gone."""
    if body.stream:
        events = stream(service, body, job, log, request.state.client)
        return EventStream(await first_of(events, request), log)
    with service.admitted(len(job.submits), request.state.client):
        return JSONResponse(await watched(request, collect(service, body, job, log)))


async def collect(service: Service, body: ChatBody | CompletionBody, job: Job, log: dict[str, Any]) -> dict[str, Any]:
    """The whole answer."""
    answers = [Answer() for _ in job.submits]
    async with aclosing(service.deltas(job.submits, log)) as deltas:
        async for index, delta in deltas:
            answers[index].add(delta)
    chat = job.envelope.kind == "chat"
    choices = [
        chat_choice(job.envelope, index, one, job.tools) if chat else text_choice(job.envelope, index, one)
        for index, one in enumerate(answers)
    ]
    return job.envelope.whole(choices, usage_of([one.usage for one in answers], len(job.prompts)))


async def stream(
    service: Service, body: ChatBody | CompletionBody, job: Job, log: dict[str, Any], client: str
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, as the tokens come."""
    envelope = job.envelope
    streams = [ChoiceStream(envelope, i, job.tools, bool(body.dscale_steps)) for i in range(len(job.submits))]
    stats = bool(body.stream_options and body.stream_options.continuous_usage_stats)
    with service.admitted(len(job.submits), client):
        async with aclosing(service.deltas(job.submits, log)) as deltas:
            opened = False
            async for index, delta in deltas:
                if not opened and envelope.kind == "chat":
                    yield b"".join(event(envelope.chunk([one.opening()])) for one in streams)
                opened = True
                for choice in streams[index].push(delta):
                    usage = usage_of([streams[index].usage]) if stats else None
                    yield event(envelope.chunk([choice], usage))
        if body.with_usage:
            yield event(envelope.chunk([], usage_of([one.usage for one in streams], len(job.prompts))))
        yield event("[DONE]")
