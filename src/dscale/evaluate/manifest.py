"""A manifest: the frozen, ordered list of requests that every arm of a benchmark answers.

Workloads take turns; where there are fewer prompts than requests, each workload starts over from its first prompt. The
warm-up uses prompts that are not measured as long as there are any. The SHA-256 is over all that decides the work:
messages, output caps, seeds, temperature and the order.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.engine.request import derive_seed
from dscale.evaluate.workloads import Workload, spread
from dscale.models.tokenizer import Tokenizer
from dscale.train.artifacts import read_json, write_json

KIND, SCHEMA = "manifest", 1
REQUESTS, WARMUP, MAX_TOKENS = 512, 32, 256  # of measurement.md


@dataclass(frozen=True)
class BenchRequest:
    """One request. prompt_id: the same for repetitions of a prompt; max_tokens caps the answer; seed: of sampling."""

    id: str
    prompt_id: str
    workload: str
    messages: tuple[dict[str, Any], ...]
    max_tokens: int
    seed: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> BenchRequest:
        """A request from a manifest's row."""
        return cls(**row | {"messages": tuple(row["messages"])})


@dataclass(frozen=True)
class Manifest:
    """Requests in the order they are sent, the warm-up before them, and the temperature (0: greedy)."""

    name: str
    requests: tuple[BenchRequest, ...]
    warmup: tuple[BenchRequest, ...] = ()
    temperature: float = 0.0

    def __post_init__(self) -> None:
        require(len(self.requests) > 0, f"manifest {self.name}: has no requests")
        ids = Counter(one.id for one in (*self.requests, *self.warmup))
        twice = [id for id, count in ids.items() if count > 1]
        require(not twice, f"manifest {self.name}: request id {twice[:1]} stands there twice")
        for one in (*self.requests, *self.warmup):
            require(one.max_tokens >= 1, f"manifest {self.name}: {one.id} has max_tokens {one.max_tokens}; at least 1")
            require(len(one.messages) > 0, f"manifest {self.name}: {one.id} has no messages")
        require(self.temperature >= 0, f"manifest {self.name}: temperature {self.temperature} must be 0 or positive")

    @property
    def sha256(self) -> str:
        """Of the requests, the warm-up and the temperature."""
        work = [[asdict(one) for one in part] for part in (self.requests, self.warmup)]
        return hashlib.sha256(json.dumps([self.temperature, *work], sort_keys=True).encode()).hexdigest()

    def first(self, count: int) -> Manifest:
        """The same manifest with its first `count` requests only."""
        return replace(self, requests=self.requests[:count]) if 0 < count < len(self.requests) else self

    def summary(self) -> dict[str, Any]:
        """What a benchmark's record says of it."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "requests": len(self.requests),
            "distinct": len({one.prompt_id for one in self.requests}),
            "workloads": dict(Counter(one.workload for one in self.requests)),
            "warmup": len(self.warmup),
            "max_tokens": max(one.max_tokens for one in self.requests),
            "temperature": self.temperature,
        }

    def as_json(self) -> dict[str, Any]:
        """The content of a manifest file."""
        return {"kind": KIND, "schema": SCHEMA, "sha256": self.sha256} | asdict(self)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_json(path, self.as_json())


def manifest_of(content: dict[str, Any]) -> Manifest:
    """The manifest that `as_json` wrote."""
    parts = {key: tuple(BenchRequest.of(row) for row in content[key]) for key in ("requests", "warmup")}
    return Manifest(content["name"], temperature=float(content["temperature"]), **parts)


def read_manifest(path: Path) -> Manifest:
    """A manifest from its file; InputError when it is none, or when its content does not have the hash it names."""
    content = read_json(path, "a benchmark's manifest")
    known = content.get("kind") == KIND and content.get("schema") == SCHEMA
    require(known, f"{path}: no manifest of `dscale bench --save-manifest`, schema {SCHEMA}")
    try:
        made, named = manifest_of(content), str(content["sha256"])
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged manifest: {error}") from None
    require(made.sha256 == named, f"{path}: was changed: its SHA-256 is {made.sha256[:12]}…, it says {named[:12]}…")
    return made


@dataclass(frozen=True)
class Wanted:
    """How a manifest is made of workloads: measured requests, warm-ups, output cap, temperature, seed."""

    requests: int = REQUESTS
    warmup: int = WARMUP
    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("warmup", 0), ("max_tokens", 1), ("temperature", 0), ("seed", 0)):
            value = getattr(self, name)
            flag = "num-prompts" if name == "requests" else name.replace("_", "-")
            require(value >= least, f"--{flag}: {value} must be at least {least}")


def build_manifest(workloads: Sequence[Workload], wanted: Wanted) -> Manifest:
    """Requests that take the workloads in turn. Each workload's prompts are spread evenly over its file."""
    require(len(workloads) > 0, "--prompts: none given")
    share = -(-wanted.requests // len(workloads))
    chosen = [(talk, spread(len(talk.prompts), share)) for talk in workloads]
    requests = []
    for index in range(wanted.requests):
        talk, numbers = chosen[index % len(chosen)]
        turn = index // len(chosen)
        requests.append(_request(talk, numbers[turn % len(numbers)], turn // len(numbers), index, wanted))
    return Manifest("+".join(talk.name for talk in workloads), tuple(requests), _warmup(chosen, wanted),
                    wanted.temperature)  # fmt: skip


def _warmup(chosen: Sequence[tuple[Workload, tuple[int, ...]]], wanted: Wanted) -> tuple[BenchRequest, ...]:
    """Prompts that are not measured first, then measured ones; workloads in turn."""
    ordered = []
    for talk, numbers in chosen:
        spare = sorted(set(range(len(talk.prompts))) - set(numbers))
        ordered.append((talk, [*spare, *numbers]))
    made = []
    for index in range(wanted.warmup):
        talk, order = ordered[index % len(ordered)]
        turn = index // len(ordered)
        one = _request(talk, order[turn % len(order)], turn // len(order), wanted.requests + index, wanted)
        made.append(replace(one, id=f"warm-up {index}"))
    return tuple(made)


def _request(talk: Workload, place: int, repeat: int, index: int, wanted: Wanted) -> BenchRequest:
    prompt_id = f"{talk.name}:{talk.numbers[place]}"
    id = f"{prompt_id}#{repeat}"
    return BenchRequest(
        id, prompt_id, talk.name, talk.prompts[place], wanted.max_tokens, derive_seed(wanted.seed, index)
    )


def token_ids(requests: Sequence[BenchRequest], tokenizer: Tokenizer) -> list[list[int]]:
    """Prompt token ids, through the chat template where the model has one."""
    if tokenizer.has_chat_template:
        return [tokenizer.chat(list(one.messages)) for one in requests]
    return [tokenizer.encode("\n\n".join(str(part.get("content", "")) for part in one.messages)) for one in requests]
