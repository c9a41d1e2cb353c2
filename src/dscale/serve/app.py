"""The routes: OpenAI's API, vLLM's companions to it, health, metrics, the page and its two routes.

app = build_app(Service(client, tokenizer, settings))
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import dscale
from dscale.serve.answers import event
from dscale.serve.completions import Job, answer, chat_job, encode_chat, text_job
from dscale.serve.errors import ApiError, from_engine, from_validation, invalid
from dscale.serve.gate import Gate, fields_of
from dscale.serve.messages import EngineDied, Refusal, Switch
from dscale.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, PolicyBody, TokenizeBody
from dscale.serve.service import Service
from dscale.serve.streams import ClientGone, EventStream

PAGE = Path(__file__).parent / "page"
PAGE_POLICY = (  # what the page may load and call: this server, nothing inline
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
GONE = 499  # the client closed the connection; nobody reads it


class ErrorDetail(BaseModel):
    """What was wrong. param: the field; code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}


def build_app(service: Service) -> FastAPI:
    """The application that serves one model."""
    app = FastAPI(title="DScale", version=dscale.__version__, docs_url=None, redoc_url=None, responses=ERRORS)
    app.state.service = service
    add_openai_routes(app, service)
    add_token_routes(app, service)
    add_status_routes(app, service)
    add_page_routes(app, service)
    add_error_handlers(app)
    app.add_middleware(Gate, settings=service.settings)
    if service.settings.cors_origin:
        origins = list(service.settings.cors_origin)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def add_openai_routes(app: FastAPI, service: Service) -> None:
    """/v1/chat/completions, /v1/completions, /v1/models."""

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await respond(service, request, body, await chat_job(service, body, request.state.id))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a text."""
        return await respond(service, request, body, await text_job(service, body, request.state.id))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models served: one, under all its names."""
        return {"object": "list", "data": [model_card(service, name) for name in service.settings.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        known_model(service, name)
        return model_card(service, name)


async def respond(service: Service, request: Request, body: ChatBody | CompletionBody, job: Job) -> Response:
    """The whole answer of a job, or its stream."""
    known_model(service, body.model)
    fields = fields_of(request)
    if service.settings.log_prompts:
        fields["prompts"] = [service.tokenizer.decode(one, skip_special_tokens=False) for one in job.prompts]
    return await answer(service, request, body, job, fields)


def model_card(service: Service, name: str) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "dscale",
        "root": service.settings.model,
        "max_model_len": service.context,
    }


def known_model(service: Service, name: str | None) -> None:
    """ApiError 404 unless the model is served; None stands for it."""
    if name is not None and name not in service.settings.names:
        served = ", ".join(service.settings.names)
        raise ApiError(404, f"model {name[:100]!r} is not served here; served is {served}", "model", "model_not_found")


def add_token_routes(app: FastAPI, service: Service) -> None:
    """/tokenize and /detokenize."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a prompt or of a conversation."""
        known_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt: give either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await encode_chat(service, body.messages, body.tools or [], body.chat_template_kwargs)
        else:
            ids = await service.encode(body.prompt or "", body.add_special_tokens)
        texts = {"token_strs": [service.names.text(one) for one in ids]} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids, **texts}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """Text of token ids."""
        known_model(service, body.model)
        size = len(service.tokenizer)
        if not all(0 <= token < size for token in body.tokens):
            raise invalid(f"tokens: must lie in [0, {size - 1}]", "tokens")
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def add_status_routes(app: FastAPI, service: Service) -> None:
    """/health, /ready, /version, /metrics."""

    @app.get("/health")
    @app.get("/ready")
    async def health() -> Response:
        """200 while a request would be served."""
        state = service.state
        headers = {} if state == "ok" else {"Retry-After": "1"}
        return JSONResponse({"status": state}, 200 if state == "ok" else 503, headers)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """Versions of what runs."""
        return {"version": dscale.__version__, **service.client.about.get("versions", {})}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        if service.metrics is None:
            raise ApiError(404, "this server keeps no metrics", code="no_metrics")
        from dscale.serve.metrics import CONTENT_TYPE

        return Response(service.metrics.render(), media_type=CONTENT_TYPE)


def add_page_routes(app: FastAPI, service: Service) -> None:
    """/, /page, /dscale/about, /dscale/policy, /dscale/live."""

    @app.get("/dscale/about")
    async def about() -> dict[str, Any]:
        """Model, device, policy and limits of this server."""
        return {**service.client.about, "served": list(service.settings.names)}

    @app.post("/dscale/policy")
    async def policy(body: PolicyBody) -> dict[str, Any]:
        """Switch the policy for the steps to come."""
        try:
            return {"policy": await service.client.switch(Switch(body.policy, body.slots, body.width))}
        except Refusal as error:
            refused = from_engine(error)
            refused.param = "policy" if refused.status_code == 400 else None
            raise refused from None
        except EngineDied as error:
            raise from_engine(error) from None

    @app.get("/dscale/live")
    async def live(request: Request) -> Response:
        """Snapshots of the engine as server-sent events."""
        return EventStream(live_events(service), fields_of(request))

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        page = PAGE / "index.html"
        if not page.is_file():
            return JSONResponse({"served": list(service.settings.names), "api": "/v1", "schema": "/openapi.json"})
        return FileResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    if PAGE.is_dir():
        app.mount("/page", StaticFiles(directory=PAGE), name="page")


async def live_events(service: Service) -> AsyncGenerator[bytes, None]:
    """Every snapshot as an event."""
    async with aclosing(service.snapshots()) as snapshots:
        async for snapshot in snapshots:
            yield event(asdict(snapshot))


def add_error_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            message = {404: f"no such route: {request.url.path[:200]}", 405: "this route takes another method"}
            headers = error.headers or {}
            converted = ApiError(error.status_code, message.get(error.status_code, str(error.detail)))
            converted.headers = dict(headers)
            error = converted
        fields_of(request)["error"] = error.code or error.status_code
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> Response:
        said = from_validation(error.errors())
        fields_of(request)["error"] = said.code
        return said.response()

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        fields_of(request)["error"] = "client_gone"
        return Response(status_code=GONE)
