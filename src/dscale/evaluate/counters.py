"""A server's own counters, read from its /metrics before and after a run, under our names.

drafts               request steps in which drafts were verified
drafted              draft tokens offered
accepted             drafts accepted
accepted_by_position drafts accepted at each draft position, from the first
steps, request_steps decode steps of the engine; the same counted for each request in them
verified             verification rows, anchors included
step_seconds, prefill_seconds
tokens, prompt_tokens, preemptions, prefix_hits

A name is there only when the server has the counter. SGLang counts verification calls; its accepted drafts are known
only as tokens less calls, which holds when every step of the run was speculative.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import httpx

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
TOTAL = "_total"

NAMES = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:generation_tokens": "tokens",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_hits": "prefix_hits",
    "dscale:decode_steps": "steps",
    "dscale:request_steps": "request_steps",
    "dscale:verified_slots": "verified",
    "dscale:decode_seconds": "step_seconds",
    "dscale:prefill_seconds": "prefill_seconds",
    "sglang:spec_verify_calls": "drafts",
    "sglang:generation_tokens": "tokens",
    "sglang:prompt_tokens": "prompt_tokens",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")


@dataclass(frozen=True)
class Scrape:
    """One reading. engine: whose names are in it; running: requests that it says run now, None when it does not say."""

    engine: str = "server"
    sums: dict[str, float] = field(default_factory=dict)
    by_position: dict[int, float] = field(default_factory=dict)
    running: float | None = None
    policy: str | None = None

    def since(self, before: Scrape) -> dict[str, Any]:
        """What was counted between an earlier reading and this one."""
        made: dict[str, Any] = {name: _number(value - before.sums.get(name, 0.0)) for name, value in self.sums.items()}
        if self.by_position:
            last = max(self.by_position) + 1
            made["accepted_by_position"] = [
                _number(self.by_position.get(at, 0.0) - before.by_position.get(at, 0.0)) for at in range(last)
            ]
        if self.engine == "sglang" and made.get("drafts"):
            made["accepted"] = max(made.get("tokens", 0) - made["drafts"], 0)
        return made


def read_metrics(text: str) -> Scrape:
    """A reading of Prometheus' text format; samples of several engines or ranks are added up."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    running: float | None = None
    policy, prefixes = None, set()
    for name, labels, value in _samples(text):
        prefixes.add(name.partition(":")[0])
        bare = name.removesuffix(TOTAL)
        if bare in NAMES:
            sums[NAMES[bare]] = sums.get(NAMES[bare], 0.0) + value
        elif bare == BY_POSITION and labels.get("position", "").isdigit():
            at = int(labels["position"])
            positions[at] = positions.get(at, 0.0) + value
        elif name in RUNNING:
            running = (running or 0.0) + value
        elif name == "dscale:policy_info" and value:
            policy = labels.get("policy")
    engine = next((one for one in ("dscale", "sglang", "vllm") if one in prefixes), "server")
    return Scrape(engine, sums, positions, running, policy)


def _samples(text: str) -> Any:
    """(name, labels, value) of every line that is a sample; creation times are left out."""
    for line in text.splitlines():
        match = SAMPLE.match(line) if not line.startswith("#") else None
        if match is None or match["name"].endswith("_created"):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            yield match["name"], dict(LABEL.findall(match["labels"] or "")), value


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


async def scrape(client: httpx.AsyncClient) -> Scrape:
    """The server's counters now; an empty reading when it has none to show."""
    try:
        response = await client.get("/metrics", timeout=10.0)
    except httpx.HTTPError:
        return Scrape()
    return read_metrics(response.text) if response.status_code == 200 else Scrape()
