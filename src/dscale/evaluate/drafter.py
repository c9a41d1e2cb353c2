"""`dscale evaluate drafter`: E[L] of a drafter three ways on the same greedy answers (measurement.md §5).

    prompts ─► engine, policy `full`, greedy ─► answers and accepted drafts of every step     served
    answers ─► one teacher-forced pass over all positions ─► matches                          uniform, re-anchored

Conversations of a corpus are already answered and give the last two only. Output folder: an artifacts.Stage with a
shard of answers and a shard of matches per `batch` conversations; record.json, table.md, curves.svg and curves.png are
made from the shards.
"""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dscale.config import PAGE_SIZE, SamplingParams, require, workshop_dtype
from dscale.engine.llm import LLM
from dscale.engine.placement import resolve_device
from dscale.evaluate.answer_shards import read_answers, write_answers, write_matches
from dscale.evaluate.conversations import Answered, check_offline, match_rows, one_per_row
from dscale.evaluate.drafter_record import build_record, finite, table
from dscale.evaluate.plots import plot_curves
from dscale.evaluate.record_file import rounded, write_record
from dscale.evaluate.workloads import Workload, built_in, read_workloads, tokenise
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import drafter_hash, load_drafter, target_hashes
from dscale.models.loader import LoadedTarget, load_target
from dscale.train.anchors import TILE
from dscale.train.artifacts import TIMING, Report, Stage, read_json, silent, write_bytes, write_json
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.rows import PARTS, PackedRows, load_part, take_rows
from dscale.versions import versions

SCHEMA = "dscale.evaluate_drafter/1"
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"limit": 4, "max_tokens": 24, "batch": 2},
    "full": {"limit": 200, "max_tokens": 256, "batch": 64},
}


@dataclass(frozen=True)
class EvaluateConfig:
    """What is evaluated on what. prompts: FILE or FILE=WORKLOAD; none and no corpus: a few prompts of our own.

    limit: prompts of each file, spread over it, 0 all; max_tokens of an answer; width of the blocks, None the
    drafter's own; batch: conversations of a shard, decoded together; anchors: blocks of a row in one pass, 0 chooses;
    longest: prompts of more tokens are left out.
    """

    prompts: tuple[str, ...] = ()
    corpus: str | None = None
    part: str = "holdout"
    limit: int = 200
    max_tokens: int = 256
    longest: int = 1024
    width: int | None = None
    layout: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    batch: int = 16
    anchors: int = 0
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "longest", "batch", "resamples"):
            require(getattr(self, name) > 0, f"evaluate.{name}: {getattr(self, name)} must be positive")
        for name in ("limit", "anchors", "seed"):
            require(getattr(self, name) >= 0, f"evaluate.{name}: {getattr(self, name)} must be 0 or more")
        require(self.part in PARTS, f"evaluate.part: {self.part!r}; allowed are {', '.join(PARTS)}")
        require(self.width is None or self.width >= 2, f"evaluate.width: {self.width} must be at least 2")


@dataclass(frozen=True)
class Pair:
    """A loaded target and drafter; bound: the drafter's hash."""

    target: LoadedTarget
    drafter: Drafter
    bound: str

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.target.model.embedding.device


def evaluate_drafter(
    target: str, drafter: str, out: Path, config: EvaluateConfig, report: Report = silent
) -> dict[str, Any]:
    """Measure, write the folder and return its record. Resumes; InputError when the folder holds another measurement.

    target as in load_target; drafter: a folder, or "auto" for the shipped one.
    """
    pair = load_pair(target, drafter, config)
    talks = read_workloads(config.prompts, config.limit)
    if not config.prompts and config.corpus is None:
        talks = [built_in()]
    corpus = None if config.corpus is None else greedy_rows(config, pair)
    stage = Stage.open(out, SCHEMA, inputs_of(pair, config, talks, corpus))
    if stage.complete and all((out / name).is_file() for name in ("record.json", "table.md")):
        return read_json(out / "record.json", f"a {SCHEMA} record") | {"already_complete": True}
    began = time.perf_counter()
    for talk in talks:
        evaluate_prompts(stage, pair, config, talk, report)
    if corpus is not None:
        evaluate_corpus(stage, pair, config, corpus, report)
    record = write_results(stage, pair)
    write_json(out / TIMING, {"seconds": time.perf_counter() - began})
    return record


def write_results(stage: Stage, pair: Pair) -> dict[str, Any]:
    """record.json, table.md and the plot from the shards; the stage is then complete."""
    record = finite(build_record(stage, environment(pair.device)))
    record["workloads"] = rounded(record["workloads"])
    write_record(stage.folder / "record.json", record, exact=True, sort=True)
    write_bytes(stage.folder / "table.md", table(record).encode())
    if not plot_curves(record, stage.folder):
        print("evaluate drafter: no plot, matplotlib is not installed", file=sys.stderr)
    ways = {name: one["ways"] for name, one in record["workloads"].items()}
    stage.finish({name: {way: c["full_depth"]["expected"] for way, c in one.items()} for name, one in ways.items()})
    return record


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device of a record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"versions": versions(), "device": name}


def load_pair(target: str, drafter: str, config: EvaluateConfig) -> Pair:
    """Target and drafter on the device in the dtype asked for (auto: bfloat16 on a GPU, else float32)."""
    device = resolve_device(config.device)
    dtype = workshop_dtype(config.dtype, device)
    loaded = load_target(target, dtype, device)
    folder = loaded.own_drafter if drafter == "auto" else drafter
    require(folder is not None, f"drafter: none ships for {target}; give a drafter folder")
    assert folder is not None
    model = load_drafter(folder, loaded.model, dtype, device, config.layout)
    return narrowed(Pair(loaded, model, drafter_hash(folder)), config.width)


def narrowed(pair: Pair, width: int | None) -> Pair:
    """The pair with blocks of another width, at most what the drafter was trained for."""
    own = pair.drafter.config
    if width is None or width == own.width:
        return pair
    require(width <= own.width, f"width: {width} is wider than the drafter's trained block; at most {own.width}")
    pair.drafter.config = replace(own, block_size=own.block_size - (own.width - width))
    return pair


def greedy_rows(config: EvaluateConfig, pair: Pair) -> PackedRows:
    """The greedy conversations of a corpus part, `limit` of its rows."""
    assert config.corpus is not None
    rows = load_part(Path(config.corpus), config.part, target_hashes(pair.target))
    require(bool(rows.greedy.any()), f"{config.corpus}: its {config.part} part has no greedy answers")
    return take_rows(rows, np.arange(min(len(rows), config.limit or len(rows))))


def inputs_of(pair: Pair, config: EvaluateConfig, talks: list[Workload], corpus: PackedRows | None) -> dict[str, Any]:
    """What decides the outcome, for the manifest. Files by name and hash, never by the folder they are in."""
    kept = {name: value for name, value in asdict(config).items() if name not in ("prompts", "corpus", "device")}
    if corpus is not None:
        digest = hashlib.sha256(np.ascontiguousarray(corpus.ids).tobytes() + corpus.greedy.tobytes()).hexdigest()
        kept["corpus"] = {"name": Path(config.corpus or "").name, "sha256": digest}
    return kept | {
        "target": Path(pair.target.name).name,
        "target_hashes": target_hashes(pair.target),
        "drafter_hash": pair.bound,
        "width": pair.drafter.config.width,
        "layout": pair.drafter.config.layout.value,
        "dtype": str(pair.target.model.embedding.dtype).removeprefix("torch."),
        "device": pair.device.type,
        "workloads": {
            one.name: {"source": one.source, "sha256": one.sha256, "prompts": list(one.numbers)} for one in talks
        },
    }


def evaluate_prompts(stage: Stage, pair: Pair, config: EvaluateConfig, talk: Workload, report: Report) -> None:
    """Answer one workload with the engine and match its answers, shard by shard; shards that are there stay."""
    ids = tokenise(talk, pair.target.tokenizer)
    limit = pair.target.config.decoder.max_position
    longest = min(config.longest, limit - config.max_tokens - pair.drafter.config.width)
    kept = [(number, one) for number, one in zip(talk.numbers, ids, strict=True) if len(one) <= longest]
    require(bool(kept), f"workload {talk.name}: no prompt has at most {longest} tokens")
    length = max(len(one) for _, one in kept) + config.max_tokens
    check_offline(pair.target.model, pair.drafter, length)
    depth, llm = pair.drafter.config.width - 1, None
    for start in range(0, len(kept), config.batch):
        part, stem = kept[start : start + config.batch], f"{talk.name}-{start // config.batch:04d}.safetensors"
        if not stage.has(f"answers-{stem}"):
            llm = llm or engine_for(pair, config, length)
            answered = answer(llm, part, config.max_tokens)
            stage.add(write_answers(stage.folder, f"answers-{stem}", answered, talk.name))
        if not stage.has(f"matches-{stem}"):
            answered = read_answers(stage.folder, next(s for s in stage.shards if s.file == f"answers-{stem}"))
            match = match_answered(pair, config, answered, length)
            stage.add(write_matches(stage.folder, f"matches-{stem}", match, depth, talk.name))
        report(f"evaluating {talk.name}", min(start + config.batch, len(kept)), len(kept))


def engine_for(pair: Pair, config: EvaluateConfig, length: int) -> LLM:
    """An engine whose every batch decodes as if it were the first: no prefixes kept, no size taken from free memory."""
    width = pair.drafter.config.width
    pages = -(-(length + width + 1) // PAGE_SIZE) + 1
    return LLM(
        pair.target, drafter=pair.drafter, predictor=None, policy="full", width=width,
        dtype=str(pair.target.model.embedding.dtype).removeprefix("torch."), device=str(pair.device),
        max_requests=config.batch, max_model_len=min(length + 1, pair.target.config.decoder.max_position),
        num_pages=config.batch * pages + 2, prefix_caching=False, graph_kinds="greedy",
    )  # fmt: skip


def answer(llm: LLM, part: list[tuple[int, list[int]]], max_tokens: int) -> list[Answered]:
    """Greedy answers of numbered prompts, with the drafts accepted in every step."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate(sampling_params=params, prompt_token_ids=[ids for _, ids in part])
    out = []
    for (number, ids), output in zip(part, outputs, strict=True):
        one = output.outputs[0]
        steps = [record.accepted for record in output.metrics.records]
        out.append(Answered(ids, list(one.token_ids), steps, number, one.finish_reason or ""))
    return out


def block_forward(pair: Pair, config: EvaluateConfig, length: int, rows: int) -> BlockForward:
    """The teacher-forced pass for rows of at least `length` tokens: fixed shapes on CUDA, snug ones elsewhere."""
    queries = pair.drafter.config.queries(pair.drafter.config.width)
    cuda = pair.device.type == "cuda"
    anchors = config.anchors or (TILE if cuda else 16)
    flex = cuda and TILE % queries == 0 and anchors * queries % TILE == 0
    step = TILE if flex else 16
    snug = -(-length // step) * step
    shape = ForwardConfig(snug, rows, anchors, "flex" if flex else "dense", compile=flex)
    return BlockForward(pair.target.model, pair.drafter, shape)


def _rows(pair: Pair, config: EvaluateConfig) -> int:
    """Rows of one teacher-forced pass."""
    return min(8, config.batch) if pair.device.type == "cuda" else 1


def match_answered(pair: Pair, config: EvaluateConfig, talks: list[Answered], length: int) -> list[np.ndarray]:
    """Matches [n, D] of every answer."""
    if pair.device.type == "cuda":
        forward = block_forward(pair, config, length, _rows(pair, config))
        return match_rows(forward, one_per_row(talks, forward.config.length))
    found = []
    for talk in talks:
        forward = block_forward(pair, config, len(talk.prompt) + len(talk.answer), 1)
        found += match_rows(forward, one_per_row([talk], forward.config.length))
    return found


def evaluate_corpus(stage: Stage, pair: Pair, config: EvaluateConfig, rows: PackedRows, report: Report) -> None:
    """Matches of the greedy answers of packed rows, `batch` rows a shard."""
    check_offline(pair.target.model, pair.drafter, rows.ids.shape[1])
    depth, forward = pair.drafter.config.width - 1, None
    for start in range(0, len(rows), config.batch):
        name = f"matches-{config.part}-{start // config.batch:04d}.safetensors"
        if not stage.has(name):
            forward = forward or block_forward(pair, config, rows.ids.shape[1], _rows(pair, config))
            part = padded(take_rows(rows, np.arange(start, min(start + config.batch, len(rows)))), forward)
            match = [one for one, keep in zip(match_rows(forward, part), part.greedy, strict=True) if keep]
            stage.add(write_matches(stage.folder, name, match, depth, config.part))
        report(f"evaluating {config.part}", min(start + config.batch, len(rows)), len(rows))


def padded(rows: PackedRows, forward: BlockForward) -> PackedRows:
    """Rows widened to the pass's length by positions that stand alone."""
    count, length = rows.ids.shape
    more = forward.config.length - length
    at = np.tile(np.arange(length, forward.config.length, dtype=np.int32), (count, 1))
    ids = np.pad(rows.ids, ((0, 0), (0, more)))
    answer = np.pad(rows.answer, ((0, 0), (0, more)))
    return PackedRows(ids, np.concatenate([rows.first, at], axis=1), answer, rows.prompt, rows.greedy)
