"""`dscale check features TARGET`: are the engine's taps those of transformers?

Example: dscale check features smollm2-135m
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dscale.cli import options as o
from dscale.config import InputError, require
from dscale.versions import versions

app = typer.Typer(
    name="check",
    help="Check that what this engine computes is what the reference computes.\n\n"
    "Example: dscale check features smollm2-135m",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def check() -> None:
    """Check that what this engine computes is what the reference computes.

    Example: dscale check features smollm2-135m
    """


@app.command()
def features(
    target: Annotated[str, typer.Argument(help="Folder, GGUF file, hub id or alias of a target.")],
    taps: Annotated[str | None, typer.Option(help="Layers to check, such as 1,8,14; default the usual ones.")] = None,
    drafter: Annotated[str | None, typer.Option("-d", "--drafter", help="Take the taps from this drafter.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL rows with `prompt` or `messages`; default built-in.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens read of each text.")] = 160,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    json: o.AsJson = False,
) -> None:
    """Compare the engine's taps with transformers' hidden states: cosine per tap, top-1 agreement, alignment.

    Exit code 1 unless all are ALIGNED.

    Example: dscale check features smollm2-135m --drafter models/smollm2-135m-dflash
    """
    from dscale.evaluate.features import TEXTS, FeatureCheck, run

    config = FeatureCheck(target, read_taps(taps), drafter, dtype, device, length)
    with o.reporting() as report:
        record = run(config, TEXTS if prompts is None else texts_of(prompts), report)
    record["versions"] = versions()
    if json:
        print(json_text.dumps(record))
    else:
        show(record, Console())
    raise typer.Exit(0 if record["verdict"] == "ALIGNED" else 1)


def read_taps(text: str | None) -> tuple[int, ...]:
    """Layer numbers from "1,8,14"."""
    if text is None:
        return ()
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise InputError(f"--taps: {text!r} must be layer numbers with commas between, such as 1,8,14") from None


def texts_of(path: Path) -> list[Any]:
    """Texts or conversations of a prompts file."""
    from dscale.cli.generate import read_prompts

    rows = read_prompts(path)
    require(all(row.prompt or row.messages for row in rows), f"--prompts {path}: has an empty prompt")
    return [row.messages or row.prompt for row in rows]


def show(record: dict[str, Any], console: Console) -> None:
    """The record as a table."""
    table = Table(
        title=f"{record['target']} · {record['dtype']} on {record['device']} against {record['reference']}, float32"
    )
    table.title_justify = "left"
    for name in ("", "cosine / top-1", "prefill", "decode", "lies at", "verdict"):
        table.add_column(name, justify="left" if name in ("", "verdict", "lies at") else "right")
    for one in [*record["taps"], {"tap": "top-1", **record["top1"]}]:
        paths = [f"{one['paths'][name]['score']:.6f}" for name in ("prefill", "decode")]
        colour = "green" if one["verdict"] == "ALIGNED" else "red"
        name = one["tap"] if one["tap"] == "top-1" else f"tap {one['tap']}"
        place = "its place" if one["place"] == "none" else one["place"]
        table.add_row(name, f"{one['score']:.6f}", *paths, place, f"[{colour}]{one['verdict']}[/{colour}]")
    console.print(table)
    if "our conversion" in record["reference"]:
        console.print(
            "the reference read our own conversion of the GGUF file, so its dequantisation is not checked here"
        )
        console.print("(with the package accelerate installed transformers reads llama and qwen2 files itself)")
    console.print(f"{record['verdict']} ({record['tokens']} tokens of {record['texts']} texts)", style="bold")
