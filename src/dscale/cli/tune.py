"""`dscale tune TARGET OUT`: from a target to a drafter, a predictor and an honest card, in one go.

    features    check features      OUT/features.json   the engine's taps are those of transformers
    corpus      corpus              OUT/corpus          prompts answered by the target
    training    train drafter       OUT/training        left out when a drafter is given
    traces      trace               OUT/traces          whole blocks on held-out prompts
    predictor   fit                 OUT/predictor
    drafter     evaluate drafter    OUT/drafter         uniform, re-anchored, served
    policies    evaluate policies   OUT/policies
    card        –                   OUT/tuned           the bundle: drafter, predictor, README.md

Each stage is the command of that name with the arguments that the card lists, so each can be run again by hand.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from dscale.cli import options as o
from dscale.config import require

SCHEMA = "dscale.tune/1"
PRESETS = ("tiny", "full")
# Traces come from the holdout: a tiny corpus needs a larger share of it, and without training half of it serves best.
TINY_CORPUS = {"conversations": 40, "holdout": 0.4}
GIVEN_DRAFTER_CORPUS = {"conversations": 20_000, "holdout": 0.5}


@dataclass(frozen=True)
class Command:
    """One stage: a command line, whether it prints its record (kept in `record`), and on how many GPUs it runs."""

    name: str
    argv: list[str]
    record: Path | None = None
    processes: int = 1

    @property
    def text(self) -> str:
        """As one would type it."""
        prefix = f"torchrun --nproc-per-node {self.processes} -m " if self.processes > 1 else ""
        return prefix + shlex.join(["dscale", *self.argv])


@dataclass(frozen=True)
class Tuning:
    """What was asked for. Fields that are None leave a stage's own default."""

    target: str
    out: Path
    drafter: str | None
    preset: str
    prompts: tuple[str, ...] = ()
    limit: int | None = None
    check: bool = True
    compare: bool = False
    gpus: int = 1
    device: str = "auto"
    dtype: str = "auto"
    corpus: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> str:
        """The drafter that the later stages take."""
        return self.drafter or str(self.out / "training" / "drafter")

    def commands(self) -> list[Command]:
        """Every stage in order."""
        out, where = self.out, ["--device", self.device, "--dtype", self.dtype]
        preset = ["--preset", self.preset]
        made = [Command("corpus", self._corpus(), processes=self.gpus)]
        if self.check:
            tapped = ["--drafter", self.drafter] if self.drafter else []
            argv = ["check", "features", self.target, *tapped, "--json", *where]
            made.insert(0, Command("features", argv, out / "features.json"))
        if self.drafter is None:
            gpus = ["--gpus", str(self.gpus)] if self.gpus > 1 else []
            argv = ["train", "drafter", self.target, f"{out}/corpus", f"{out}/training", *preset, *where]
            made.append(Command("training", [*argv, *flags(self.training), *gpus]))
        argv = ["trace", self.target, self.trained, f"{out}/traces", "--corpus", f"{out}/corpus", *preset, *where]
        made.append(Command("traces", argv))
        compare = ["--compare"] if self.compare else []
        argv = ["fit", f"{out}/traces", f"{out}/predictor", "--drafter", self.trained, *preset, *compare]
        made.append(Command("predictor", [*argv, "--device", self.device]))
        made.append(Command("drafter", self._evaluation(where)))
        argv = ["evaluate", "policies", f"{out}/traces", f"{out}/policies", "--predictor", f"{out}/predictor"]
        argv += ["--target", self.target, "--drafter", self.trained, *preset, *where]
        argv += (
            ["--part", "all"] if self.preset == "tiny" else []
        )  # a tiny holdout has too few requests to sit together
        made.append(Command("policies", argv))
        return made

    def _corpus(self) -> list[str]:
        given = dict(TINY_CORPUS if self.preset == "tiny" else {} if self.drafter is None else GIVEN_DRAFTER_CORPUS)
        given |= self.corpus
        argv = ["corpus", self.target, f"{self.out}/corpus", "--preset", self.preset, *flags(given)]
        for one in self.prompts:
            argv += ["--exclude", one.rpartition("=")[0] if "=" in one else one]
        return [*argv, "--device", self.device, "--dtype", self.dtype]

    def _evaluation(self, where: list[str]) -> list[str]:
        argv = ["evaluate", "drafter", self.target, self.trained, f"{self.out}/drafter", "--preset", self.preset]
        argv += ["--corpus", f"{self.out}/corpus"]
        for one in self.prompts:
            argv += ["--prompts", one]
        return [*argv, *flags({"limit": self.limit}), *where]


def flags(given: dict[str, Any]) -> list[str]:
    """Options as arguments; None is left out."""
    return [
        text
        for name, value in given.items()
        if value is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def tune(
    target: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file or alias (smollm2-135m).")],
    out: Annotated[Path, typer.Argument(help="Folder of everything; run again with the same options to go on.")],
    drafter: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--drafter",
            help="Fit a predictor for this drafter (auto: the shipped one) and train none.",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="tiny (a minute on a CPU) or full (one GPU).")] = "full",
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSONL to measure with, never trained on: FILE or FILE=WORKLOAD; repeatable."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each such file, spread over it; 0 takes all.")] = None,
    conversations: Annotated[int | None, typer.Option(help="Conversations of the corpus.")] = None,
    answer_cap: Annotated[int | None, typer.Option(help="Most tokens of a corpus answer.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Training budget in passes over the corpus.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Training budget in seconds.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training budget in updates.")] = None,
    init: Annotated[str | None, typer.Option(help="random, target, or a drafter folder to go on from.")] = None,
    width: Annotated[int | None, typer.Option(help="Block width W, anchor included.")] = None,
    layers: Annotated[int | None, typer.Option(help="Draft layers.")] = None,
    distil: Annotated[float | None, typer.Option(help="Share of distillation in the loss.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare taps with transformers first.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Fit the predictor's variants too.")] = False,
    gpus: Annotated[int, typer.Option(help="GPUs for corpus and training.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of corpus and training.")] = None,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    as_json: o.AsJson = False,
) -> None:
    """Make a drafter and a predictor for TARGET, and a card that says what they are worth. Resumable.

    Example: dscale tune smollm2-135m runs/tuned --preset tiny
    """
    require(preset in PRESETS, f"--preset: {preset!r}; allowed are {', '.join(PRESETS)}")
    require(gpus >= 1, f"--gpus: {gpus} must be positive")
    trains = {"epochs": epochs, "seconds": seconds, "steps": steps, "init": init, "width": width, "layers": layers}
    training = trains | {"distil": distil, "seed": seed}
    drafter = drafter_with(target) if drafter == "auto" else drafter
    if drafter is not None:
        useless = [name for name, value in trains.items() if value is not None]
        require(not useless, f"--{' --'.join(useless)}: go with training, but --drafter gives a drafter")
    corpus = {"conversations": conversations, "answer_cap": answer_cap, "seed": seed}
    given = {name: value for name, value in corpus.items() if value is not None}
    asked = Tuning(
        target, out, drafter, preset, tuple(prompts or ()), limit, check, compare, gpus, device, dtype, given, training
    )
    bundle = run(asked, lambda text: o.errors.print(text, highlight=False), sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps({"bundle": str(bundle), "card": str(bundle / "README.md")}))
    else:
        print(f"\n{bundle}: drafter, predictor and card; try  dscale generate -m {bundle} 'Why is the sky blue?'")


def run(asked: Tuning, say: Callable[[str], None], shown: Any) -> Path:
    """Every stage that is not complete yet, then the bundle; returns its folder. What stages print goes to `shown`."""
    from dscale.train.artifacts import Stage

    commands = asked.commands()
    texts = {command.name: command.text.replace(str(asked.out), "OUT") for command in commands}
    stage = Stage.open(asked.out, SCHEMA, {"target": asked.target, **texts})
    for number, command in enumerate(commands, 1):
        say(f"[{number}/{len(commands)}] {command.name}: {command.text}")
        with contextlib.redirect_stdout(shown):
            execute(command)
    bundle = assemble(asked, list(texts.values()))
    if not stage.complete:
        stage.finish({"bundle": "tuned"})
    return bundle


def execute(command: Command) -> None:
    """Run a stage in this process, or in several under torchrun; InputError when it fails."""
    if command.record is not None and command.record.is_file():
        return
    if command.processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(command.processes), "-m", "dscale", *command.argv]
        code = subprocess.run(launcher, stdout=sys.stderr).returncode
        require(code == 0, f"tune: {command.name} failed with exit code {code}; what it said stands above")
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed) if command.record is not None else contextlib.nullcontext():
        code = _call(command.argv)
    if command.record is not None and code == 0:
        from dscale.train.artifacts import write_json

        write_json(command.record, json.loads(printed.getvalue()))
    require(code == 0, f"tune: {command.name} ended with exit code {code}: {_reason(printed.getvalue())}")


def _call(argv: list[str]) -> int:
    """One `dscale` command in this process; its exit code. Memory it held is free afterwards."""
    import torch

    from dscale.cli.main import app

    code = typer.main.get_command(app).main(args=argv, prog_name="dscale", standalone_mode=False)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return int(code or 0)


def _reason(printed: str) -> str:
    try:
        verdict = json.loads(printed)["verdict"]
    except (ValueError, KeyError, TypeError):
        return "what it said stands above"
    return f"taps are {verdict}; run dscale check features to see which, or give --no-check"


def assemble(asked: Tuning, commands: list[str]) -> Path:
    """OUT/tuned: copies of drafter and predictor, the card, and bundle.json last."""
    from dscale.evaluate.card import Records, card
    from dscale.models.bundle import BUNDLE
    from dscale.models.bundle import SCHEMA as BUNDLE_SCHEMA
    from dscale.train.artifacts import write_bytes, write_json

    tuned = asked.out / "tuned"
    for source, name, files in (
        (Path(asked.trained), "drafter", ("config.json", "model.safetensors")),
        (asked.out / "predictor", "predictor", ("config.json", "predictor.safetensors", "metrics.json")),
    ):
        (tuned / name).mkdir(parents=True, exist_ok=True)
        for file in files:
            write_bytes(tuned / name / file, (source / file).read_bytes())
    plot = asked.out / "drafter" / "curves.svg"
    if plot.is_file():
        shutil.copyfile(plot, tuned / "curves.svg")
    write_bytes(tuned / "README.md", card(Records.read(asked.out, asked.target, commands)).encode())
    target = str(Path(asked.target).resolve()) if Path(asked.target).exists() else asked.target
    record = {"schema": BUNDLE_SCHEMA, "target": target, "drafter": "drafter", "predictor": "predictor"}
    write_json(tuned / BUNDLE, record)
    return tuned


def drafter_with(target: str) -> str:
    """Folder of the drafter that comes with a target (a bundle's, or the one that ships for an alias)."""
    from dscale.models.loader import open_target, own_drafter

    opened = open_target(target)
    found = own_drafter(opened.bundle, opened.alias)
    require(found is not None, f"--drafter auto: no drafter comes with {target}; give a folder")
    return str(found)
