"""`dscale train drafter TARGET CORPUS OUT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dscale.cli import options
from dscale.config import require, workshop_dtype


def drafter(
    target: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file or alias of the target.")],
    corpus: Annotated[Path, typer.Argument(help="Folder of a finished corpus that this target wrote.")],
    out: Annotated[Path, typer.Argument(help="Output folder; run again to go on after an interruption.")],
    preset: Annotated[str, typer.Option("--preset", help="tiny or full: defaults of the other options.")] = "full",
    init: Annotated[
        str | None,
        typer.Option("--init", help="random, target, target:25-29 (layers to copy) or a drafter folder to go on from."),
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", help="Block width W, anchor included (16, or the folder's).")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Draft layers (5).")] = None,
    layout: Annotated[str | None, typer.Option("--layout", help="Anchor layout: 1+N or anchor-first.")] = None,
    mask_token: Annotated[int | None, typer.Option("--mask-token", help="Id of the mask token (16).")] = None,
    distil: Annotated[
        float | None, typer.Option("--distil", help="A in (1-A)·CE + A·distance to the target's probabilities.")
    ] = None,
    distance: Annotated[str | None, typer.Option("--distance", help="l1 or kl, with --distil.")] = None,
    gamma: Annotated[
        float | None, typer.Option("--gamma", help="Slot weights exp(-(k-1)/gamma); 7, 5, 4 for W = 16, 10, 8.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Packed rows of one pass, per process.")] = None,
    anchors: Annotated[int | None, typer.Option("--anchors", help="Blocks per row.")] = None,
    accumulate: Annotated[int | None, typer.Option("--accumulate", help="Passes per update.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="muon or adamw.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Peak learning rate.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="cosine or wsd.")] = None,
    warmup: Annotated[float | None, typer.Option("--warmup", help="Share of the budget (0.04).")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Budget in updates.")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Budget in passes over the corpus.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Budget in seconds; resumes too, but then no two runs end in the same weights."),
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", help="Steps between validations; 0 for none.")
    ] = None,
    evaluate_rows: Annotated[int | None, typer.Option("--evaluate-rows", help="Validation rows, at most.")] = None,
    log_every: Annotated[int | None, typer.Option("--log-every", help="Steps between two records.")] = None,
    save_seconds: Annotated[float | None, typer.Option("--save-seconds", help="Seconds between checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of weights, order and anchors.")] = None,
    dialect: Annotated[str, typer.Option("--dialect", help="Of the drafter's config: zlab or deepspec.")] = "zlab",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard/--no-tensorboard", help="Also write OUT/tensorboard, where it is installed.")
    ] = True,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Keep the target's taps in this folder instead of running it anew.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", help="Processes to start, one per GPU.")] = 1,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Train a drafter for TARGET on CORPUS and write it to OUT/drafter.

    Example: dscale train drafter smollm2-135m out/corpus out/drafter --preset tiny
    """
    asked = dict(locals())
    from dscale.train.recipe import TrainConfig, recipe

    given = {name: value for name, value in asked.items() if name in TrainConfig.__dataclass_fields__}
    config = recipe(preset, **given | {"dialect": "z-lab" if dialect == "zlab" else dialect})
    require(gpus >= 1, f"--gpus: {gpus} must be positive")
    if gpus > 1 and "RANK" not in os.environ:
        _look_before_spawning(target, corpus)
        raise SystemExit(_spawn(gpus))

    from dscale.models.loader import load_target
    from dscale.train.drafter_run import train_drafter
    from dscale.train.world import World

    world = World(device)
    loaded = load_target(target, workshop_dtype(dtype, str(world.device)), str(world.device))
    with options.reporting() as report:
        summary = train_drafter(config, loaded, corpus, out, report, _tell, world, tensorboard, cache)
    first = world.first
    world.close()
    if first:
        print(json.dumps(summary) if as_json else _table(summary, out))


def _look_before_spawning(target: str, corpus: Path) -> None:
    """What is wrong with target or corpus is said once, not by every process."""
    from dscale.models.loader import open_target
    from dscale.train.artifacts import Stage
    from dscale.train.rows import CORPUS

    open_target(target)
    Stage.load(corpus, CORPUS, complete=True)


def _spawn(gpus: int) -> int:
    """Run this very command line in several processes of torchrun; its exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    return subprocess.run([*launcher, "-m", "dscale", *sys.argv[1:]]).returncode


def _tell(record: dict[str, Any]) -> None:
    """One line of the history on stderr."""
    options.errors.print("  ".join(f"{name} {value:.6g}" for name, value in record.items()), highlight=False)


def _table(summary: dict[str, Any], out: Path) -> str:
    walked = summary["final_progress"]
    lines = [f"{summary['steps']} steps, W = {summary['width']}, layout {summary['layout']}"]
    if walked is not None:
        lines.append(f"validation progress {walked} at the end, {summary['best_progress']} at best")
    return "\n".join([*lines, f"{out / 'drafter'}: the {summary['drafter']} weights"])
