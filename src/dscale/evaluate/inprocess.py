"""Our engine in this process as an arm: the closed loop adds the next request when one ends, the open loop when one is
due. Settings are those of `LLM`; c is the engine's `max_requests`, prefix caching is off and the cache is sized for the
manifest unless they say otherwise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from dscale.config import PAGE_SIZE, EngineConfig, InputError, SamplingParams, require, resolve_dtype
from dscale.engine.engine import EngineCounters
from dscale.engine.graphs import kinds_for
from dscale.engine.llm import LLM
from dscale.engine.outputs import RequestMetrics
from dscale.engine.placement import default_dtype, resolve_device
from dscale.engine.request import Request, Status
from dscale.evaluate.bench_record import RequestRow
from dscale.evaluate.load import Measured, Progress, Watcher, arrivals
from dscale.evaluate.manifest import BenchRequest, Manifest, token_ids
from dscale.models.loader import load_target

OWN = ("model", "drafter", "predictor", "policy", "width", "slots", "layout", "simulate")
SETTINGS = (*OWN, *(one.name for one in fields(EngineConfig)))
NAMES = {
    "drafts": "drafted_steps", "drafted": "drafted", "accepted": "accepted", "verified": "slots", "steps": "steps",
    "request_steps": "request_steps", "step_seconds": "decode_seconds", "prefill_seconds": "prefill_seconds",
    "tokens": "emitted",
}  # fmt: skip


def check_settings(settings: dict[str, Any], arm: str) -> None:
    """InputError for a setting that LLM does not know."""
    for name in settings:
        require(name in SETTINGS, f"arm {arm}: setting {name!r} is not known; allowed are {', '.join(SETTINGS)}")
    require("model" in settings, f"arm {arm}: no model; give one (an alias, a folder, a hub id)")


class InProcess:
    """An engine that serves a manifest, c requests at a time."""

    def __init__(self, settings: dict[str, Any], manifest: Manifest, concurrency: int) -> None:
        given = dict(settings)
        device = resolve_device(given.get("device", "auto"))
        name = given.get("dtype", "auto")
        loaded = given.pop("model")
        if isinstance(loaded, str):
            loaded = load_target(loaded, default_dtype(device) if name == "auto" else resolve_dtype(name), device)
        self.manifest = manifest
        every = (*manifest.warmup, *manifest.requests)
        self._ids = dict(zip((one.id for one in every), token_ids(every, loaded.tokenizer), strict=True))
        longest = max(len(self._ids[one.id]) + one.max_tokens for one in every)
        limit = loaded.config.decoder.max_position
        require(
            longest <= limit, f"manifest: a prompt and its answer take {longest} tokens; the model's limit: {limit}"
        )
        given.setdefault("max_model_len", min(-(-longest // PAGE_SIZE) * PAGE_SIZE, limit))
        given.setdefault("prefix_caching", False)
        given.setdefault("max_requests", concurrency)
        given.setdefault("graph_kinds", kinds_for([manifest.temperature]))
        self.llm = LLM(loaded, **given)
        self.concurrency = concurrency

    def about(self) -> dict[str, Any]:
        """What the record says of this arm beyond its settings."""
        llm = self.llm
        drafter = llm.drafter
        return {
            "policy": llm.speculation.policy,
            "width": None if drafter is None else llm.speculation.width or drafter.config.width,
            "dtype": str(llm.dtype).removeprefix("torch."),
            "device": str(llm.engine.worker.device),
            "simulated": llm.simulate is not None,
        }

    def warm_up(self) -> None:
        """Answer the warm-up requests, not measured."""
        if self.manifest.warmup:
            self._serve(self.manifest.warmup, None, Watcher())

    def run(self, rate: float | None, seed: int, watcher: Watcher) -> tuple[Measured, dict[str, Any]]:
        """Rows of the measured requests, and the engine's counters over them."""
        self.llm.engine.counters = EngineCounters()
        due = None if rate is None else arrivals(len(self.manifest.requests), rate, seed)
        done = self._serve(self.manifest.requests, due, watcher)
        began = min(request.arrived for _, request in done)
        rows = tuple(_row(one, request, began) for one, request in done)
        return Measured(rows, max(row.ended_s for row in rows)), self._counters([request for _, request in done])

    def _serve(
        self, asked: Sequence[BenchRequest], due: list[float] | None, watcher: Watcher
    ) -> list[tuple[BenchRequest, Request]]:
        """Answer all, at most c at a time, or each from its due second on; pairs in the order of `asked`."""
        engine, progress = self.llm.engine, Progress(len(asked))
        waiting, live, made = deque(enumerate(asked)), set[str](), {}
        try:
            while waiting or engine.busy:
                while waiting and self._may_start(waiting[0][0], due, len(live), progress):
                    index, one = waiting.popleft()
                    made[index] = self._add(one)
                    live.add(made[index].id)
                if not engine.busy and due is not None:
                    time.sleep(max(0.0, progress.began + due[waiting[0][0]] - time.perf_counter()))
                    continue
                ended = [one for one in engine.step() if one.status is Status.FINISHED and one.id in live]
                live -= {one.id for one in ended}
                progress.running, progress.done = len(live), progress.done + len(ended)
                progress.tokens += sum(len(one.output) for one in ended)
                watcher.changed(progress)
        finally:
            for id in live:
                engine.abort(id)
        return [(one, made[index]) for index, one in enumerate(asked)]

    def _may_start(self, index: int, due: list[float] | None, live: int, progress: Progress) -> bool:
        if due is None:
            return live < self.concurrency
        return time.perf_counter() >= progress.began + due[index]

    def _add(self, one: BenchRequest) -> Request:
        params = SamplingParams(
            temperature=self.manifest.temperature, max_tokens=one.max_tokens, ignore_eos=False, seed=one.seed
        )
        return self.llm.engine.add(one.id, self._ids[one.id], params, one.seed)

    def _counters(self, requests: list[Request]) -> dict[str, Any]:
        counted = self.llm.engine.counters
        accepted = [record.accepted for request in requests for record in request.steps]
        depth = max(accepted, default=0)
        return {name: getattr(counted, own) for name, own in NAMES.items()} | {
            "accepted_by_position": [sum(count > at for count in accepted) for at in range(depth)],
            "shapes": dict(counted.shapes),
        }

    def close(self) -> None:
        """Nothing is left to stop."""


def _row(asked: BenchRequest, request: Request, began: float) -> RequestRow:
    metrics = RequestMetrics.of(request)
    if request.finished_at is None:
        raise InputError(f"request {asked.id}: did not end")
    return RequestRow(
        id=asked.id,
        prompt_id=asked.prompt_id,
        workload=asked.workload,
        sent_s=request.arrived - began,
        first_token_s=None if request.first_token_at is None else request.first_token_at - began,
        ended_s=request.finished_at - began,
        prompt_tokens=len(request.prompt),
        output_tokens=len(request.output),
        steps=metrics.steps,
        accepted=metrics.accepted,
        verified=metrics.slots,
        drafted=metrics.drafted,
    )
