"""Make a folder of full-width traces (traces.py), by two ways that agree record by record.

    corpus    greedy conversations of a corpus are walked through the block pass (trace_walk.py): batched and fast
    prompts   files of prompts are answered by the engine under policy `full`, with its recorder on: any temperature

The work is cut into chunks of conversations; each chunk is one shard that depends on nothing but the inputs, so a run
that was killed goes on with the chunks that are missing and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dscale.config import DTYPES, SamplingParams, require, workshop_dtype
from dscale.engine.graphs import kinds_for
from dscale.engine.llm import LLM
from dscale.engine.placement import resolve_device
from dscale.engine.recorder import Recorder, RequestTrace
from dscale.engine.request import derive_seed
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import drafter_hash, load_drafter, target_hashes
from dscale.models.loader import LoadedTarget, load_target
from dscale.models.tokenizer import Tokenizer
from dscale.speculation.features import FeatureReader
from dscale.train.artifacts import TIMING, Report, Stage, silent, write_json
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.rows import (
    CORPUS,
    PARTS,
    PackedRows,
    conversation_bounds,
    load_part,
    take_rows,
)
from dscale.train.sources import read_lines, script_of
from dscale.train.trace_walk import collect
from dscale.train.traces import (
    TRACES,
    Traces,
    check_groups,
    join_traces,
    of_request,
    read_traces,
    trace_stats,
    write_traces,
)

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"conversations": 16, "shard": 8, "max_tokens": 32, "max_requests": 8, "rows": 2, "anchors": 8},
    "full": {"conversations": 0, "shard": 512, "max_tokens": 1024, "max_requests": 64, "rows": 16, "anchors": 16},
}


@dataclass(frozen=True)
class TraceConfig:
    """What is traced. drafter: a folder, or auto for the target's own. prompts: FILE or FILE=WORKLOAD, JSONL.

    conversations: most of each source, 0 for all; shard: conversations of a shard. lanes: live requests written into
    the batch-context features of walked conversations (acceptance does not depend on it; the engine writes its own).
    max_tokens, temperature, seed, max_requests: of answers to prompts. rows, anchors: size of one pass of the walk.
    """

    target: str
    drafter: str = "auto"
    corpus: str | None = None
    part: str = "holdout"
    prompts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("confidence", "context")
    projection_seed: int = 0
    lanes: int = 8
    conversations: int = 0
    shard: int = 512
    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    max_requests: int = 64
    rows: int = 16
    anchors: int = 16
    layout: str | None = None
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        require(self.corpus is not None or bool(self.prompts), "trace: nothing to trace; give --corpus or --prompts")
        require(self.part in PARTS, f"trace.part: {self.part!r}; allowed are {', '.join(PARTS)}")
        object.__setattr__(self, "groups", check_groups(self.groups))
        for name in ("lanes", "shard", "max_tokens", "max_requests", "rows", "anchors"):
            require(getattr(self, name) > 0, f"trace.{name}: {getattr(self, name)} must be positive")
        require(self.conversations >= 0, f"trace.conversations: {self.conversations} must be 0 (all) or more")
        require(self.temperature >= 0, f"trace.temperature: {self.temperature} must be 0 (greedy) or more")
        require(self.dtype in ("auto", *DTYPES), f"trace.dtype: {self.dtype!r}; allowed are auto, {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Chunk:
    """Conversations that make one shard; their requests are numbered from `first`."""

    file: str
    source: str
    first: int
    count: int
    rows: PackedRows | None = None  # to be walked
    wanted: np.ndarray | None = None  # which of them
    prompts: tuple[tuple[int, ...], ...] = ()  # to be answered
    workload: int = 0


@dataclass
class Tracer:
    """Models and settings of a run. The block pass and the engine are built when the first chunk needs them."""

    config: TraceConfig
    loaded: LoadedTarget
    drafter: Drafter
    workloads: tuple[str, ...] = ()
    longest: int = 0  # tokens of a prompt
    _forward: BlockForward | None = None
    _llm: LLM | None = None
    _made: list[RequestTrace] = field(default_factory=list)

    def trace(self, chunk: Chunk) -> Traces:
        """The records of one chunk."""
        made = self.walk(chunk) if chunk.rows is not None else self.answer(chunk)
        return replace(made, workloads=self.workloads)

    def walk(self, chunk: Chunk) -> Traces:
        """By the block pass."""
        config, rows = self.config, chunk.rows
        assert rows is not None
        if self._forward is None:
            check_walkable(self.loaded, self.drafter)
            size = ForwardConfig(rows.ids.shape[1], config.rows, config.anchors)
            self._forward = BlockForward(self.loaded.model, self.drafter, size)
        traces = collect(self._forward, rows, self.reader, config.lanes, chunk.wanted)
        number = (traces.request + chunk.first).astype(np.int32)
        return replace(traces, request=number, workload=np.full_like(traces.workload, chunk.workload))

    @cached_property
    def reader(self) -> FeatureReader:
        """Reads the features of walked drafts."""
        return FeatureReader.build(self.config.groups, self.loaded.model.head.weight, self.config.projection_seed)

    def answer(self, chunk: Chunk) -> Traces:
        """By the engine."""
        llm, config = self._engine(), self.config
        self._made.clear()
        numbers = range(chunk.first, chunk.first + chunk.count)
        params = [
            SamplingParams(
                temperature=config.temperature, seed=derive_seed(config.seed, n), max_tokens=config.max_tokens
            )
            for n in numbers
        ]
        llm.generate(sampling_params=params, prompt_token_ids=chunk.prompts)
        asked = sorted(self._made, key=lambda trace: int(trace.id.split("-")[0]))  # in the order of the prompts
        assert len(asked) == chunk.count, "every step under `full` is recorded"
        return join_traces(
            [
                of_request(trace, number, chunk.workload, config.groups, self.workloads)
                for trace, number in zip(asked, numbers, strict=True)
            ]
        )

    def _engine(self) -> LLM:
        if self._llm is None:
            config = self.config
            recorder = Recorder(config.groups, config.projection_seed, self._made.append)
            dtype = str(self.loaded.model.embedding.dtype).removeprefix("torch.")
            self._llm = LLM(
                self.loaded,
                self.drafter,
                policy="full",
                recorder=recorder,
                dtype=dtype,
                device=str(self.loaded.model.embedding.device),
                max_requests=config.max_requests,
                graph_kinds=kinds_for([config.temperature]),
                max_model_len=min(self.loaded.config.decoder.max_position, self.longest + config.max_tokens),
                prefix_caching=False,  # what an earlier chunk left in the cache must not touch this one's numbers
            )
        return self._llm


def check_walkable(loaded: LoadedTarget, drafter: Drafter) -> None:
    """The block pass attends in full and in both directions inside a block; refuse models that do not."""
    own = drafter.config
    windows = any((*loaded.config.decoder.windows, *own.decoder.windows))
    plain = not windows and not own.causal and not any(own.decoder.causal_layers)
    require(plain, "trace: sliding windows and causal drafters cannot be walked; trace with --prompts, by the engine")


def run(config: TraceConfig, out: Path, report: Report = silent) -> dict[str, Any]:
    """Trace into the folder `out`, or go on where an earlier run stopped. Returns trace_stats and "resumed" shards."""
    began = time.perf_counter()
    tracer = open_tracer(config)
    chunks, sources, workloads = plan(config, tracer.loaded)
    tracer.workloads = workloads
    tracer.longest = max((len(prompt) for chunk in chunks for prompt in chunk.prompts), default=0)
    stage = Stage.open(out, TRACES, trace_inputs(tracer, sources))
    already, complete, total = (
        sum(stage.has(chunk.file) for chunk in chunks),
        stage.complete,
        sum(c.count for c in chunks),
    )
    done = 0
    for chunk in chunks:
        if not stage.has(chunk.file):
            stage.add(write_traces(out, chunk.file, tracer.trace(chunk), chunk.source))
        done += chunk.count
        report("tracing", done, total)
    stats = trace_stats(read_all(stage))
    if not complete:
        stage.finish(stats)
        write_json(out / TIMING, {"seconds": round(time.perf_counter() - began, 2), "shards": len(chunks) - already})
    return stats | {"shards": len(chunks), "resumed": already, "complete": complete}


def open_tracer(config: TraceConfig) -> Tracer:
    """Load target and drafter; bfloat16 on CUDA and float32 on a CPU unless told otherwise."""
    device = resolve_device(config.device)
    dtype = workshop_dtype(config.dtype, device)
    loaded = load_target(config.target, dtype, device)
    path = loaded.own_drafter if config.drafter == "auto" else config.drafter
    require(path is not None, f"trace.drafter: no drafter comes with {config.target}; give a drafter folder")
    assert path is not None
    return Tracer(config, loaded, load_drafter(path, loaded, dtype, device, config.layout))


def trace_inputs(tracer: Tracer, sources: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that decides what the folder will hold."""
    config, embedding = tracer.config, tracer.loaded.model.embedding
    left = ("target", "drafter", "corpus", "part", "prompts", "layout", "dtype", "device")
    settings = {name: value for name, value in asdict(config).items() if name not in left}
    return settings | {
        "target": config.target,
        "target_hashes": target_hashes(tracer.loaded),
        "drafter_hash": drafter_hash(tracer.drafter),
        "layout": str(tracer.drafter.config.layout),
        "width": tracer.drafter.config.width,
        "dtype": str(embedding.dtype).removeprefix("torch."),
        "device": embedding.device.type,
        "workloads": list(tracer.workloads),
        "sources": sources,
    }


def read_all(stage: Stage) -> Traces:
    """The traces of a stage that has all its shards, finished or not."""
    return join_traces([read_traces(stage.folder, shard, stage.inputs) for shard in stage.shards])


def plan(config: TraceConfig, loaded: LoadedTarget) -> tuple[list[Chunk], list[dict[str, Any]], tuple[str, ...]]:
    """Chunks in order, what the manifest says of each source, and the names of the workloads."""
    chunks: list[Chunk] = []
    sources: list[dict[str, Any]] = []
    workloads: list[str] = []
    if config.corpus is not None:
        folder = Path(config.corpus)
        rows = load_part(folder, config.part, target_hashes(loaded))
        shards = [shard.sha256 for shard in Stage.load(folder, CORPUS).of(config.part)]
        digest = hashlib.sha256(json.dumps(shards).encode()).hexdigest()
        sources.append({"kind": "corpus", "name": folder.resolve().name, "part": config.part, "sha256": digest})
        workloads.append("corpus")
        chunks += corpus_chunks(rows, config)
        require(bool(chunks), f"{folder}: part {config.part} has no greedy conversation; sampled ones cannot be walked")
    for given in config.prompts:
        name, prompts, source = prompt_source(given, config, loaded)
        require(name not in workloads, f"--prompts {given}: workload {name!r} is given twice; name one FILE=WORKLOAD")
        first = chunks[-1].first + chunks[-1].count if chunks else 0
        chunks += prompt_chunks(prompts, config.shard, first, len(chunks), len(workloads), name)
        sources.append(source)
        workloads.append(name)
    return chunks, sources, tuple(workloads)


def corpus_chunks(rows: PackedRows, config: TraceConfig) -> Iterator[Chunk]:
    """Whole packed rows until a shard has its conversations; sampled conversations do not count."""
    bounds = conversation_bounds(rows.answer)
    limit = config.conversations or int(rows.greedy.sum())
    wanted = rows.greedy & (np.cumsum(rows.greedy) <= limit)
    members = [int(wanted[bounds[row] : bounds[row + 1]].sum()) for row in range(len(rows))]
    chosen: list[int] = []
    first = number = held = 0
    for row, count in enumerate(members):
        if count:
            chosen.append(row)
            held += count
        if held and (held >= config.shard or row + 1 == len(members)):
            taken = np.concatenate([wanted[bounds[one] : bounds[one + 1]] for one in chosen])
            part = take_rows(rows, np.array(chosen))
            yield Chunk(shard_name(number), "corpus", first, held, rows=part, wanted=taken)
            first, number, held, chosen = first + held, number + 1, 0, []


def shard_name(number: int) -> str:
    """File of chunk `number`."""
    return f"traces-{number:05d}.safetensors"


def prompt_source(
    given: str, config: TraceConfig, loaded: LoadedTarget
) -> tuple[str, list[tuple[int, ...]], dict[str, Any]]:
    """(workload, prompts as tokens, manifest entry) of FILE or FILE=WORKLOAD. Of several turns the first counts."""
    file, _, named = given.rpartition("=") if "=" in given and not Path(given).exists() else (given, "", "")
    path = Path(file)
    rows, digest = read_lines(path)
    limit = config.conversations or len(rows)
    chosen = np.unique(np.arange(min(limit, len(rows))) * len(rows) // min(limit, len(rows)))
    prompts = [prompt_tokens(rows[at][0], rows[at][1], path.name, loaded.tokenizer) for at in chosen]
    room = loaded.config.decoder.max_position
    for at, prompt in zip(chosen, prompts, strict=True):
        require(len(prompt) < room, f"{rows[at][0]}: has {len(prompt)} tokens; the context length is {room}")
    record = {"kind": "prompts", "name": path.name, "workload": named or path.stem, "sha256": digest}
    return named or path.stem, prompts, record


def prompt_tokens(where: str, row: Any, source: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of one row, through the chat template where the model has one; thinking off."""
    script = script_of(where, row, source)
    if not tokenizer.has_chat_template:
        return tuple(tokenizer.encode("\n\n".join([*(text for _, text in script.context), script.text])))
    messages = [{"role": role, "content": text} for role, text in (*script.context, ("user", script.text))]
    return tuple(tokenizer.chat(messages, enable_thinking=False))


def prompt_chunks(
    prompts: list[tuple[int, ...]], size: int, first: int, number: int, workload: int, name: str
) -> Iterator[Chunk]:
    """Chunks of `size` prompts of one workload; requests numbered from `first`, files from `number`."""
    for index, start in enumerate(range(0, len(prompts), size)):
        part = tuple(prompts[start : start + size])
        yield Chunk(shard_name(number + index), name, first + start, len(part), prompts=part, workload=workload)
