"""The training command: a folder with the trained drafter, resumable at any point.

OUT/manifest.json      stage dscale.drafter/1: what it was made from, checksums, the summary
OUT/drafter, OUT/best  the drafter to use (the best one where it beats the last), and the best by validation
OUT/history.jsonl      one record per log and per evaluation
OUT/state.pt           checkpoint, while training is under way
OUT/timing.json, OUT/tensorboard
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from dscale.config import DrafterConfig, InputError, require
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import drafter_hash, save_drafter, target_hashes
from dscale.models.loader import LoadedTarget
from dscale.train.artifacts import (
    MANIFEST,
    TIMING,
    Report,
    Shard,
    Stage,
    file_hash,
    silent,
    write_bytes,
    write_json,
)
from dscale.train.drafter import DrafterTrainer, Record
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.initial import initial_drafter
from dscale.train.recipe import TrainConfig, starts_new
from dscale.train.rows import (
    CORPUS,
    PackedRows,
    conversation_counts,
    load_part,
    take_rows,
)
from dscale.train.taps import open_cache
from dscale.train.walk import accepted_everywhere, walk_rows
from dscale.train.world import World

DRAFTER = "dscale.drafter/1"
STATE, HISTORY = "state.pt", "history.jsonl"
WALK_ANCHORS = 64  # blocks a row of an evaluation on the CPU; on CUDA the compiled pass of training is used


def train_drafter(
    config: TrainConfig,
    target: LoadedTarget,
    corpus: Path,
    out: Path,
    report: Report = silent,
    told: Callable[[Record], None] | None = None,
    world: World | None = None,
    tensorboard: bool = False,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Train a drafter on a finished corpus; returns the summary that OUT/manifest.json ends with.

    A run that was stopped goes on from its last checkpoint; with a budget in steps or epochs it ends on a CPU in the
    very bytes of an uninterrupted run. told: gets every record of the history. InputError for a corpus of another
    target, other arguments for the same folder, or a full disk.
    """
    world = world or World(str(target.model.embedding.device))
    hashes = target_hashes(target)
    rows = load_part(corpus, "train", hashes)
    inputs = _inputs(config, corpus, hashes, world)
    done = Stage.open(out, DRAFTER, inputs).summary if (out / MANIFEST).exists() else None
    if done is not None:
        return done
    drafter = initial_drafter(target.model, config, world.device)
    trainer = DrafterTrainer(target.model, drafter, rows, config, world)
    stage = _stage(out, inputs, world)  # only now: what was refused before leaves no folder
    if cache is not None:
        bound = {"target_hashes": hashes, "corpus": inputs["corpus"]}
        trainer.states = open_cache(cache, trainer.forward, rows, bound, config.distil > 0, world, report)
    validation = greedy_rows(corpus, config.evaluate_rows) if config.evaluate_every else None
    if (out / STATE).exists():
        trainer.load_state(read_state(out / STATE, world.device))

    def evaluate() -> float:
        assert validation is not None
        return walked_progress(trainer, validation)

    def save() -> None:
        if world.first:
            write_state(out / STATE, trainer.state())
            _write_history(out, trainer.history)

    board = _board(out, tensorboard and world.first, told, trainer.step_index)
    trainer.run(evaluate if validation is not None else None, save, board, report)
    if world.first:
        _finish(stage, trainer, hashes, target.name)
    world.wait()
    return Stage.load(out, DRAFTER).summary or {}


def _inputs(config: TrainConfig, corpus: Path, hashes: dict[str, str], world: World) -> dict[str, Any]:
    """Everything that decides the outcome."""
    inputs: dict[str, Any] = {f"train.{name}": value for name, value in config.outcome().items()}
    if not starts_new(config.init):
        inputs["train.init"] = f"drafter {drafter_hash(config.init)}"
    inputs["corpus"] = file_hash(corpus / MANIFEST)
    return inputs | {"target_hashes": hashes, "processes": world.size}


def _stage(out: Path, inputs: dict[str, Any], world: World) -> Stage:
    """The stage of OUT; only the first process may have to write it."""
    if world.first:
        Stage.open(out, DRAFTER, inputs)
    world.wait()
    return Stage.open(out, DRAFTER, inputs)


# -- validation -----------------------------------------------------------------------------------------------------


def greedy_rows(corpus: Path, most: int) -> PackedRows | None:
    """The first validation rows that hold a greedy answer, at most `most`; None when the corpus has none."""
    if not Stage.load(corpus, CORPUS).of("validation"):
        return None
    rows = load_part(corpus, "validation")
    owner = np.repeat(np.arange(len(rows)), conversation_counts(rows.answer))
    chosen = np.unique(owner[rows.greedy])[:most]
    return take_rows(rows, chosen) if len(chosen) else None


def walked_progress(trainer: DrafterTrainer, rows: PackedRows) -> float:
    """Mean progress of the re-anchored walk over the greedy answers of these rows, all processes together."""
    world, config = trainer.world, trainer.config
    forward = trainer.forward
    if not world.cuda:
        shape = ForwardConfig(trainer.length, config.rows, min(WALK_ANCHORS, trainer.length), "dense")
        forward = BlockForward(trainer.target, trainer.drafter, shape)
    own = take_rows(rows, np.arange(world.rank, len(rows), world.size))
    walked = walk_rows(accepted_everywhere(forward, own), own.answer) if len(own) else []
    greedy = [one for one, plain in zip(walked, own.greedy, strict=True) if plain]
    counts = torch.tensor([sum(one.tokens for one in greedy), sum(one.steps for one in greedy)], device=world.device)
    tokens, steps = world.sum(counts.double()).tolist()
    return tokens / max(steps, 1.0)


# -- what is written ------------------------------------------------------------------------------------------------


def _finish(stage: Stage, trainer: DrafterTrainer, hashes: dict[str, str], name: str) -> None:
    """Exports, history and summary."""
    out, config = stage.folder, trainer.drafter.config
    walks = [one["validation_progress"] for one in trainer.history if "validation_progress" in one]
    final, best = (walks[-1] if walks else None), (max(walks) if walks else None)
    last = trainer.drafter.state_dict()
    use_best = bool(trainer.best) and best is not None and final is not None and best > final
    dialect = trainer.config.dialect
    export(config, trainer.best if use_best else last, out / "drafter", dialect, hashes)
    if trainer.best:
        export(config, trainer.best, out / "best", dialect, hashes)
    _write_history(out, trainer.history)
    files = [f"{folder}/{file}" for folder in ("drafter", "best") for file in ("config.json", "model.safetensors")]
    for file in [HISTORY, *files]:
        if (out / file).exists():
            data = (out / file).read_bytes()
            part = file.partition("/")[0] if "/" in file else "history"
            stage.add(Shard.of(file, data, part))
    write_json(out / TIMING, {"seconds": trainer.elapsed})
    stage.finish(
        {
            "target": name,
            "steps": trainer.step_index,
            "width": trainer.forward.width,
            "layout": config.layout.value,
            "final_progress": final,
            "best_progress": best,
            "drafter": "best" if use_best else "final",
            "drafter_hash": drafter_hash(out / "drafter"),
        }
    )
    (out / STATE).unlink(missing_ok=True)


def export(config: DrafterConfig, state: dict[str, Tensor], folder: Path, dialect: str, hashes: dict[str, str]) -> None:
    """A drafter folder (bfloat16, no embedding or head) from the parameters of a state, whole or not at all."""
    drafter = Drafter(config)
    drafter.load_state_dict({name: value.to("cpu", torch.float32) for name, value in state.items()})
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_drafter(drafter, partial, dialect, hashes)
    except SafetensorError as error:
        raise InputError(f"{folder}: cannot write the drafter ({error})") from None
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _write_history(out: Path, history: list[Record]) -> None:
    write_bytes(out / HISTORY, "".join(json.dumps(record) + "\n" for record in history).encode())


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a training state with a checksum in front, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    write_bytes(path, hashlib.sha256(data).digest() + data)


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """What write_state wrote; InputError when the file is damaged."""
    data = path.read_bytes()
    require(hashlib.sha256(data[32:]).digest() == data[:32], f"{path}: corrupt; delete it to train from the beginning")
    return torch.load(io.BytesIO(data[32:]), map_location=device, weights_only=True)


def _board(
    out: Path, wanted: bool, told: Callable[[Record], None] | None, step: int
) -> Callable[[Record], None] | None:
    """told, and TensorBoard beside it where that is installed."""
    if not wanted:
        return told
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed: history.jsonl alone holds the metrics", file=sys.stderr)
        return told
    writer = SummaryWriter(str(out / "tensorboard"), purge_step=step)

    def both(record: Record) -> None:
        for name, value in record.items():
            if name != "step":
                writer.add_scalar(name, value, record["step"])
        writer.flush()
        if told is not None:
            told(record)

    return both
