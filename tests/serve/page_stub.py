"""A server that only looks like one, for the page: fake answers, fake snapshots, the real metrics, a strict CSP.

By hand: `PYTHONPATH=src:. uvicorn tests.serve.page_stub:app --port 8001`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry

import dscale.serve
from dscale.serve.messages import Lane, Snapshot, Usage
from dscale.serve.metrics import CONTENT_TYPE, Metrics

PAGE = Path(dscale.serve.__file__).parent / "page"
WORDS = (
    "Rayleigh scattering: sunlight meets molecules far smaller than its wavelengths, and short waves are scattered "
    "much more than long ones. Blue light therefore reaches us from every direction, while red goes straight on. "
    "At sunset the path through the air is long, so most of the blue is gone before it arrives.\n\n"
    "Violet is scattered even more, but the sun sends less of it and our eyes are duller there. "
)
TEXTS = [word + " " for word in WORDS.split(" ")]
SLOTS = {"off": 1.0, "full": 8.0, "fixed:4": 4.0, "confidence": 5.0, "auto": 4.5, "dvl": 5.0}
CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'none'"


class Engine:
    """Lanes that draft seven tokens a step and accept a random number of those that the policy verifies."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.budget, self.lanes = 5.0, 0
        self.held = False  # answers wait in their middle
        self.now = Snapshot(time.time(), "dvl", pages=512, drafted_at=[0] * 7, verified_at=[0] * 7, accepted_at=[0] * 7)
        self.now.counters = dict.fromkeys(("steps", "request_steps", "emitted", "drafted", "accepted", "slots"), 0.0)

    def lane(self, number: int) -> Lane:
        drafted = 0 if self.now.policy == "off" else 7
        spread = self.random.choice((-3, -2, 0, 0, 1, 4)) if self.now.policy in ("dvl", "auto", "confidence") else 0
        slots = min(max(round(self.budget) + spread, 1), drafted + 1)
        return Lane(f"lane-{number}", drafted, slots, self.random.randint(0, slots - 1))

    def step(self) -> Snapshot:
        """One decode step of every lane, as a snapshot."""
        lanes = [self.lane(i) for i in range(self.lanes)]
        counts = self.now.counters
        counts["steps"] += bool(lanes)
        for lane in lanes:
            for name, value in (("request_steps", 1), ("emitted", lane.accepted + 1), ("drafted", lane.drafted)):
                counts[name] += value
            counts["accepted"] += lane.accepted
            counts["slots"] += lane.slots
            for i in range(7):
                self.now.drafted_at[i] += i < lane.drafted
                self.now.verified_at[i] += i < lane.slots - 1
                self.now.accepted_at[i] += i < lane.accepted
        self.now.time, self.now.lanes, self.now.running = time.time(), lanes, len(lanes)
        self.now.budget, self.now.pages_used = self.budget, 9 * len(lanes)
        self.now.step_seconds = [0.011 + 0.004 * self.random.random()] if lanes else []
        return self.now


def create_app(api_key: str | None = None, steps: bool = True, predictor: bool = True, held: bool = False) -> FastAPI:
    """The stub. steps: whether it knows the request field dscale_steps; predictor: whether it says it has one; held:
    answers stop in their middle, while the batch goes on, until POST /stub/release."""
    app, engine, metrics = FastAPI(), Engine(), Metrics(CollectorRegistry(), "stub")
    engine.held = held
    app.state.engine = engine
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.middleware("http")
    async def guard(request: Request, follow: Any) -> Response:
        path = request.url.path
        wanted = f"Bearer {api_key}" if api_key and path != "/" and not path.startswith("/page/") else None
        if wanted and request.headers.get("authorization") != wanted:
            return JSONResponse({"error": {"message": "wrong key", "type": "authentication_error"}}, 401)
        response = await follow(request)
        response.headers["content-security-policy"] = CSP
        return response

    @app.get("/")
    def index() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/dscale/about")
    def about() -> dict[str, Any]:
        known = {"drafter": True, "predictor": predictor, "width": 8, "device": "cpu", "dtype": "bfloat16"}
        return {"model": "smollm2-135m", "served": ["smollm2-135m"], **known}

    @app.get("/metrics")
    def scrape() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/dscale/live")
    def live() -> StreamingResponse:
        async def snapshots() -> AsyncIterator[str]:
            while True:
                snapshot = engine.step()
                metrics.observe(snapshot)
                yield f"data: {json.dumps(asdict(snapshot))}\n\n"
                await asyncio.sleep(0.1)

        return StreamingResponse(snapshots(), media_type="text/event-stream")

    @app.post("/stub/release")
    def release() -> None:
        engine.held = False

    @app.post("/dscale/policy")
    async def switch(request: Request) -> JSONResponse:
        wanted = await request.json()
        if wanted["policy"] == "fixed:4":
            return JSONResponse({"error": {"message": "policy: fixed:4 cannot be taken now"}}, 400)
        engine.now.policy = wanted["policy"]
        engine.budget = wanted.get("slots") or SLOTS[wanted["policy"]]
        return JSONResponse({"policy": wanted["policy"]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(answer(engine, metrics, body, steps), media_type="text/event-stream")

    return app


async def answer(engine: Engine, metrics: Metrics, body: dict[str, Any], steps: bool) -> AsyncIterator[str]:
    """The SSE of one chat completion: the words of TEXTS, in steps like a lane's."""
    engine.lanes += body.get("n", 1)
    usage, began, at = Usage(prompt_tokens=12), time.perf_counter(), 0
    try:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        while at < min(len(TEXTS), body["max_tokens"]):
            await asyncio.sleep(0.05)
            if engine.held and at > len(TEXTS) // 2:
                continue
            lane = engine.lane(0)
            texts = TEXTS[at : min(at + lane.accepted + 1, body["max_tokens"])]
            at += len(texts)
            record = {"emitted": len(texts), "accepted": min(lane.accepted, len(texts)), "slots": lane.slots}
            chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "".join(texts)}}]}
            if steps and body.get("dscale_steps"):
                chunk["dscale"] = {"steps": [record | {"drafted": lane.drafted}], "token_texts": texts}
            usage.steps, usage.completion_tokens = usage.steps + 1, at
            yield event(chunk)
        yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        yield event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": at}})
        yield "data: [DONE]\n\n"
    finally:
        engine.lanes -= body.get("n", 1)
        metrics.finished(usage, 0.05, time.perf_counter() - began, [0.02] * max(at - 1, 0), "stop")


def event(chunk: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(chunk)}\n\n"


app = create_app()
