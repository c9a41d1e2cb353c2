"""A training corpus: prompts gathered, answered by the very target, cleaned, split by prompt, packed and checked.

    gather    the sources' scripts, numbered in order (sources.py)
    answer    in parts of a fixed number of scripts; a finished part is a file in raw/, so a kill loses one at most
    select    drop what is short, long, unfinished, said before (exactly or nearly) or an evaluation prompt
    split     by a hash of the prompt into train, validation and holdout
    pack      into rows of one length, as shards of the folder; raw/ is removed when all are written

Under torchrun process r of n makes the parts r, r + n, …; the first one selects, splits and packs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dscale.config import InputError, require, workshop_dtype
from dscale.engine.placement import resolve_device
from dscale.models.drafter_checkpoint import target_hashes
from dscale.models.loader import LoadedTarget, load_target
from dscale.train.artifacts import (
    Report,
    Shard,
    Stage,
    check_shard,
    read_json,
    read_shard,
    silent,
    write_json,
    write_shard,
)
from dscale.train.corpus_config import CorpusConfig
from dscale.train.dedup import Evaluation, exact_duplicates, near_duplicates, prompt_ids
from dscale.train.generation import Conversations, EngineGenerator, Generator, join
from dscale.train.lanes import LaneGenerator, refusal
from dscale.train.packing import in_pieces, pack
from dscale.train.prompts import HEADERS_AND_SUFFIXES, Script
from dscale.train.rows import CORPUS, PARTS, write_rows
from dscale.train.scripts import Frames, end_tokens, tokenise
from dscale.train.sources import Source, gather, user_texts
from dscale.train.world import World

RAW = "raw"  # folder of finished parts, gone when the corpus is
OVERLAP = 13  # tokens in a row that an evaluation prompt and a training prompt may not share
SHARD_ROWS = 8192  # packed rows of one file
REASONS = ("long", "short", "unfinished", "evaluation prompt", "exact duplicate", "near duplicate")


def build_corpus(target: str, out: Path, config: CorpusConfig, report: Report = silent) -> dict[str, Any]:
    """Make the corpus, or go on with it; returns its summary. InputError in one line for whatever cannot be used."""
    world = World("cpu" if resolve_device(config.device) == "cpu" else config.device)
    config, device = config.sized(world.cuda), str(world.device)
    dtype = workshop_dtype(config.dtype, device)
    sources = gather(config.sources, config.seed)
    loaded = load_target(target, dtype, device)
    kind = generator_kind(loaded, config)
    excluded = [(path, *user_texts(Path(path))) for path in config.exclude]
    inputs = describe(loaded, config, sources, kind, [(Path(path).name, digest) for path, _, digest in excluded])
    stage = Stage.open(out, CORPUS, inputs) if world.rank == 0 else None
    if stage is not None and stage.complete:
        for shard in stage.shards:
            check_shard(out, shard)
    if world.sum(torch.tensor([float(stage is not None and stage.complete)], device=world.device)).item():
        world.close()
        return finished(out)
    frames = Frames(loaded.tokenizer, config.thinking)
    making = Making(loaded, config, [one for source in sources for one in source.scripts], frames, kind)
    making.run(out / RAW, world, report if world.rank == 0 else silent)
    world.sum(torch.zeros(1, device=world.device)).item()  # read back: a barrier for the host as well
    world.close()  # a process that exits with its group open can be aborted by the group's threads
    if stage is None:
        return {}
    evaluation = refused_prompts([text for _, texts, _ in excluded for text in texts], loaded)
    Selection(making, evaluation, report).write(stage)
    return finished(out)


def finished(out: Path) -> dict[str, Any]:
    """Remove raw parts that are left over; the summary of a complete corpus."""
    shutil.rmtree(out / RAW, ignore_errors=True)
    return Stage.load(out, CORPUS, complete=True).summary or {}


def describe(
    loaded: LoadedTarget, config: CorpusConfig, sources: list[Source], kind: str, excluded: list[tuple[str, str]]
) -> dict[str, Any]:
    """Everything that decides what the corpus holds, by name, for the manifest; files by name and hash, not by path."""
    held = {one.name: getattr(config, one.name) for one in fields(config)}
    for name in ("sources", "exclude", "generator", "device", "dtype", "drafter"):
        del held[name]
    return held | {
        "target": Path(loaded.name).name if Path(loaded.name).exists() else loaded.name,
        "target_hashes": target_hashes(loaded),
        "system": config.sources.system,
        "sources": [source.record for source in sources],
        "exclude": [{"name": name, "sha256": digest} for name, digest in excluded],
        "generator": kind,
        "drafter": Path(config.drafter).name if config.drafter else None,
        "device": loaded.model.embedding.device.type,
        "dtype": str(loaded.model.embedding.dtype).removeprefix("torch."),
    }


def generator_kind(loaded: LoadedTarget, config: CorpusConfig) -> str:
    """engine or lanes: auto takes lanes on CUDA where they can serve the target and no drafter is given."""
    if config.generator != "auto":
        require(
            config.drafter is None or config.generator == "engine",
            "corpus.drafter: goes with the engine generator only",
        )
        return config.generator
    cuda = loaded.model.embedding.device.type == "cuda"
    decoder = loaded.config.decoder
    length = config.generation(decoder.max_position).max_length
    return "lanes" if cuda and config.drafter is None and refusal(decoder, length, cuda) is None else "engine"


def refused_prompts(texts: list[str], loaded: LoadedTarget) -> Evaluation | None:
    """Evaluation prompts, each also without the generic instruction at its end."""
    if not texts:
        return None
    bare = [bare_text(text) for text in texts]
    encode = loaded.tokenizer.encode_batch
    return Evaluation(encode(list(dict.fromkeys([*texts, *bare]))), encode(list(HEADERS_AND_SUFFIXES)), OVERLAP)


def bare_text(text: str) -> str:
    """A prompt without the generic instruction that follows it."""
    for suffix in HEADERS_AND_SUFFIXES:
        text = text.removesuffix(suffix)
    return text


@dataclass
class Making:
    """The answering of all scripts, part by part. Files of a part: NNNNN.safetensors, then NNNNN.json about it."""

    loaded: LoadedTarget
    config: CorpusConfig
    scripts: Sequence[Script]
    frames: Frames
    kind: str

    @property
    def size(self) -> int:
        """Scripts of one part."""
        assert self.config.part is not None  # CorpusConfig.sized
        return self.config.part

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-len(self.scripts) // self.size)

    def run(self, folder: Path, world: World, report: Report) -> None:
        """Make this process's missing parts."""
        missing = [part for part in range(world.rank, self.parts, world.size) if not is_done(folder, part)]
        if not missing:
            return
        generator, began, tokens, finished, here = self.generator(), time.monotonic(), 0, 0, 0
        total = sum(len(self.of(part)) for part in missing) * self.config.answers

        def progress(made: int) -> None:
            nonlocal tokens, finished
            tokens, finished = tokens + made, finished + 1
            rate = tokens / max(time.monotonic() - began, 1e-3)
            report(f"answering, {rate:,.0f} tokens/s", min(here + finished, total), total)

        for part in missing:
            scripts = self.of(part)
            self.make(folder, part, scripts, generator, progress)
            here, finished = here + len(scripts) * self.config.answers, 0
            progress(0)
        seconds = time.monotonic() - began
        timing = {"processes": world.size, "parts": len(missing), "seconds": seconds, "answer_tokens": tokens}
        write_json(folder.parent / f"timing{f'-{world.rank}' if world.rank else ''}.json", timing)

    def of(self, part: int) -> Sequence[Script]:
        """Scripts of a part."""
        return self.scripts[part * self.size : (part + 1) * self.size]

    def generator(self) -> Generator:
        """The generator in force."""
        own = self.loaded.config
        config = self.config.generation(own.decoder.max_position)
        ends = end_tokens(self.loaded.tokenizer, own.eos_token_ids, self.frames)
        require(bool(ends), f"{self.loaded.name}: names no end token; a corpus needs one")
        if self.kind == "lanes":
            return LaneGenerator(self.loaded.model, config, ends)
        return EngineGenerator(self.loaded, config, ends, self.config.drafter)

    def make(
        self, folder: Path, part: int, scripts: Sequence[Script], generator: Generator, progress: Callable[[int], None]
    ) -> None:
        """Answer one part and write it."""
        config = self.config
        longest = config.generation(self.loaded.config.decoder.max_position).max_length - config.answer_cap
        require(longest > 0, f"corpus.answer_cap: {config.answer_cap} leaves no room for prompts in the context")
        made = tokenise(scripts, part * self.size, self.frames, config.draws, longest, config.turn_cap)
        arrays = generator.answer(made, progress).arrays() if len(made) else {}
        shard = write_shard(folder, f"{part:05d}.safetensors", arrays, RAW, {"conversations": len(made)})
        write_json(folder / f"{part:05d}.json", asdict(shard))


def is_done(folder: Path, part: int) -> bool:
    """True when both files of a part are there: the second is written when the first is whole."""
    return all((folder / f"{part:05d}.{kind}").is_file() for kind in ("safetensors", "json"))


def read_part(folder: Path, part: int) -> Conversations | None:
    """A finished part; None when all its scripts were left out. InputError when its file is damaged."""
    record = read_json(folder / f"{part:05d}.json", "the record of a part; delete it and run again")
    try:
        shard = Shard(**record)
    except TypeError as error:
        raise InputError(f"{folder / f'{part:05d}.json'}: damaged ({error}); delete it and run again") from None
    arrays = read_shard(folder, shard)
    return Conversations.of_arrays(arrays) if arrays else None


class Selection:
    """From raw conversations to the shards of the corpus; the same bytes however the parts came to be."""

    def __init__(self, making: Making, evaluation: Evaluation | None, report: Report) -> None:
        self.making, self.config, self.evaluation, self.report = making, making.config, evaluation, report

    def write(self, stage: Stage) -> None:
        """Read all parts, select, split, pack, write and finish the stage."""
        self.report("reading parts", 0, 1)
        read = [read_part(stage.folder / RAW, part) for part in range(self.making.parts)]
        parts = [one for one in read if one is not None]
        allowed = self.config.longest_prompt
        require(bool(parts), f"corpus: every prompt is longer than longest_prompt {allowed} or than the context")
        talks = join(parts)
        self.report("reading parts", 1, 1)
        prompt = prompt_ids(talks.turns)
        reason = self.reasons(talks, prompt)
        kept = np.flatnonzero(reason < 0)
        require(len(kept) > 0, f"corpus: nothing is left to train on; dropped: {self.tally(reason)}")
        place = places(prompt[kept], self.config.validation, self.config.holdout)
        summary = {name: self.write_part(stage, talks, prompt, kept[place == at], at) for at, name in enumerate(PARTS)}
        stage.finish({"parts": summary, **self.figures(talks, reason)})

    def reasons(self, talks: Conversations, prompt: np.ndarray) -> np.ndarray:
        """Why each conversation is dropped, as an index of REASONS, or -1; the first reason that applies."""
        config, turns = self.config, talks.turns
        length = talks.end - talks.start
        reason = np.full(len(talks), -1)

        def drop(which: np.ndarray, name: str) -> None:
            reason[which & (reason < 0)] = REASONS.index(name)

        drop((turns.lengths < config.shortest_turn) | (length < config.shortest_answer), "short")
        drop(~talks.ended & (not config.keep_unfinished), "unfinished")
        if self.evaluation is not None:
            drop(self.evaluation.refused(turns), "evaluation prompt")
        left = np.flatnonzero(reason < 0)
        heads = left[np.unique(talks.script[left], return_index=True)[1]]  # the first answer of every script
        repeated = exact_duplicates(prompt[heads])
        self.report("looking for repeated prompts", 0, 1)
        near = np.zeros(len(heads), bool)
        if config.near < 1:
            near[~repeated] = near_duplicates(turns.take(heads[~repeated]), config.near)
        self.report("looking for repeated prompts", 1, 1)
        drop(np.isin(talks.script, talks.script[heads[repeated]]), "exact duplicate")
        drop(np.isin(talks.script, talks.script[heads[near]]), "near duplicate")
        return reason

    def write_part(
        self, stage: Stage, talks: Conversations, prompt: np.ndarray, chosen: np.ndarray, at: int
    ) -> dict[str, int]:
        """Pack one part into shards of SHARD_ROWS rows; what it holds."""
        rows = pack(talks, chosen, prompt, self.config.row, self.config.seed)
        for number, some in enumerate(in_pieces(rows, SHARD_ROWS)):
            self.report(f"writing {PARTS[at]}", number * SHARD_ROWS, len(rows))
            stage.add(write_rows(stage.folder, f"{PARTS[at]}-{number:03d}.safetensors", some, PARTS[at]))
        self.report(f"writing {PARTS[at]}", len(rows), len(rows))
        counts = {"prompts": len(np.unique(prompt[chosen])), "conversations": len(chosen), "rows": len(rows)}
        return counts | {"answer_tokens": int(rows.answer.sum())}

    def figures(self, talks: Conversations, reason: np.ndarray) -> dict[str, Any]:
        """What came of every source, and of all of it."""
        kept = reason < 0
        names = np.array([script.source for script in self.making.scripts])
        source = names[talks.script]
        by_source = {}
        for name in sorted(set(names.tolist())):
            asked = int((names == name).sum()) * self.config.answers
            mine = source == name
            counts = self.tally(reason[mine]) | {"long": asked - int(mine.sum())}
            by_source[name] = {"asked": asked, "made": int(mine.sum()), "kept": int((mine & kept).sum()), **counts}
        tokenizer = self.making.loaded.tokenizer
        template = json.dumps(tokenizer.backend.chat_template, sort_keys=True)
        return {
            "sources": by_source,
            "answer_tokens": int((talks.end - talks.start)[kept].sum()),
            "greedy": round(float((talks.temperature[kept] == 0).mean()), 4),
            "cut_at_cap": int((~talks.ended & kept).sum()),
            "tokenizer": {"tokens": len(tokenizer), "chat_template": hashlib.sha256(template.encode()).hexdigest()},
        }

    def tally(self, reason: np.ndarray) -> dict[str, int]:
        """How many were dropped for what."""
        return {name: int((reason == at).sum()) for at, name in enumerate(REASONS)}


def places(prompt: np.ndarray, validation: float, holdout: float) -> np.ndarray:
    """Index into PARTS of every conversation, by its prompt's id [N].

    Ids are uniform hashes: the lowest share is the holdout, the next the validation part. A part that would stay empty
    though it is asked for takes the one prompt with the lowest id that is left, so long as train keeps one.
    """
    ids = np.unique(prompt)
    share = ids / 2.0**63
    place = np.where(share < holdout, 2, np.where(share < holdout + validation, 1, 0))
    for part, wanted in ((2, holdout), (1, validation)):
        free = np.flatnonzero(place == 0)
        if wanted > 0 and not (place == part).any() and len(free) > 1:
            place[free[0]] = part
    return place[np.searchsorted(ids, prompt)]
