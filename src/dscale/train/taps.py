"""What the frozen target says about the training rows, kept on disk so that it runs once instead of in every epoch.

    CACHE/taps-00000.safetensors    taps [R, L, T·H] and, for distillation, hidden [R, L, H], in the target's dtype

The folder is a stage (artifacts.py): checksummed, resumable, bound to target, corpus and taps. Shards are read through
the page cache (memory-mapped), a batch at a time. For a small target the online pass is faster than most disks.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dscale.config import require
from dscale.train.artifacts import (
    MANIFEST,
    Report,
    Stage,
    check_shard,
    silent,
    write_file,
)
from dscale.train.forward import BlockForward
from dscale.train.rows import PackedRows
from dscale.train.world import World

TAPS = "dscale.taps/1"
SHARD_BYTES = 256_000_000


class TapCache:
    """A finished cache. Call it as DrafterTrainer.states: (rows [R], ids, first) → (taps [R·L, T·H], hidden)."""

    def __init__(self, folder: Path, report: Report = silent) -> None:
        stage = Stage.load(folder, TAPS, complete=True)
        self.size, self.parts = int(stage.inputs["shard_rows"]), []
        for number, shard in enumerate(stage.of("train")):
            report("checking the tap cache", number, len(stage.shards))
            with safe_open(check_shard(folder, shard), framework="pt") as file:
                self.parts.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def __call__(self, rows: Tensor, ids: Tensor, first: Tensor) -> tuple[Tensor, Tensor | None]:
        taps = self._read("taps", rows.tolist())
        hidden = self._read("hidden", rows.tolist()) if "hidden" in self.parts[0] else None
        return taps.to(ids.device), None if hidden is None else hidden.to(ids.device)

    def _read(self, name: str, rows: list[int]) -> Tensor:
        return torch.cat([self.parts[row // self.size][name][row % self.size] for row in rows])


def row_bytes(forward: BlockForward, hidden: bool) -> int:
    """Bytes of one packed row in the cache."""
    width = len(forward.drafter.config.taps) + int(hidden)
    return forward.config.length * width * forward.target.config.decoder.hidden_size * forward.target.embedding.itemsize


def cache_needs(folder: Path, total: int) -> tuple[int, int]:
    """(bytes still to be written of `total`, bytes free on that disk)."""
    there = sum(path.stat().st_size for path in folder.glob("taps-*.safetensors")) if folder.exists() else 0
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return max(0, total - there), shutil.disk_usage(parent).free


def fill_cache(
    folder: Path, forward: BlockForward, rows: PackedRows, bound: dict[str, Any], hidden: bool, report: Report = silent
) -> None:
    """Run the target over all rows, or the rest of them. bound: target hashes and corpus that the cache belongs to.

    InputError before anything is written when the disk cannot hold it.
    """
    each, step = row_bytes(forward, hidden), forward.config.rows
    size = step * max(1, SHARD_BYTES // (each * step))
    needed, free = cache_needs(folder, each * len(rows))
    sizes = f"needs {needed / 1e9:.2f} GB more, the disk has {free / 1e9:.2f} GB free"
    require(needed <= free, f"{folder}: the tap cache {sizes}")
    dtype = str(forward.target.embedding.dtype).removeprefix("torch.")
    taps = list(forward.drafter.config.taps)
    inputs = {**bound, "taps": taps, "hidden": hidden, "dtype": dtype, "length": forward.config.length}
    stage = Stage.open(folder, TAPS, inputs | {"shard_rows": size})
    if stage.complete:
        return
    print(f"tap cache {folder}: {sizes}", file=sys.stderr)
    for start in range(0, len(rows), size):
        name = f"taps-{start // size:05d}.safetensors"
        report("tap cache, rows", start, len(rows))
        if not stage.has(name):
            end = min(start + size, len(rows))
            data = save(_states(forward, rows, start, end, hidden))
            stage.add(write_file(folder, name, data, "train", {"rows": end - start}))
    stage.finish({"rows": len(rows), "bytes": each * len(rows)})


def _states(forward: BlockForward, rows: PackedRows, start: int, end: int, hidden: bool) -> dict[str, Tensor]:
    """Taps, and hidden if asked, of rows start … end - 1, on the CPU. Short batches are filled up."""
    step, found = forward.config.rows, []
    for at in range(start, end, step):
        picked = np.minimum(np.arange(at, at + step), end - 1)
        ids, first = (torch.from_numpy(part[picked]).to(forward.device) for part in (rows.ids, rows.first))
        states = forward.target_states(ids, first) if hidden else (forward.taps(ids, first),)
        found.append([part.view(step, forward.config.length, -1)[: end - at].cpu() for part in states])
    names = ("taps", "hidden") if hidden else ("taps",)
    return {name: torch.cat(parts) for name, parts in zip(names, zip(*found, strict=True), strict=True)}


def open_cache(
    folder: Path,
    forward: BlockForward,
    rows: PackedRows,
    bound: dict[str, Any],
    hidden: bool,
    world: World,
    report: Report = silent,
) -> TapCache:
    """The cache for these rows; the first process fills it, the others wait for its files."""
    if world.first:
        fill_cache(folder, forward, rows, bound, hidden, report)
    while not ((folder / MANIFEST).exists() and Stage.load(folder, TAPS).complete):
        time.sleep(1.0)  # not a collective: filling may take longer than those wait
    return TapCache(folder, report)
