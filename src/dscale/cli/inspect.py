"""`dscale inspect CHECKPOINT`: what a target or drafter is, and what would be wrong with it.

Example: dscale inspect smollm2-135m
"""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dscale.cli.options import AsJson, Layout


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Folder, GGUF file, hub id or alias of a target or a drafter.")],
    target: Annotated[str | None, typer.Option("--target", "-t", help="For a drafter: the target to fit.")] = None,
    layout: Layout = None,
    json: AsJson = False,
) -> None:
    """Say what a checkpoint is (family, sizes, anchor layout, taps) and what would be wrong with it.

    Example: dscale inspect models/smollm2-135m-dflash --target smollm2-135m
    """
    from dscale.models.inspection import inspect_checkpoint

    record = inspect_checkpoint(checkpoint, target, layout)
    if json:
        print(json_text.dumps(record))
        return
    console = Console()
    table = Table(title=f"{record['kind']} {checkpoint}", show_header=False, title_justify="left")
    for key, value in record.items():
        if key not in ("kind", "checkpoint", "problems") and value not in (None, [], {}):
            table.add_row(key.replace("_", " "), _shown(value))
    console.print(table)
    for problem in record["problems"]:
        console.print(f"[red]problem:[/red] {escape(problem)}", highlight=False, soft_wrap=True)
    if not record["problems"]:
        console.print("no problems found")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items() if item not in ({}, None))
    if isinstance(value, list):
        return " ".join("full" if item is None else str(item) for item in value)
    return str(value)
