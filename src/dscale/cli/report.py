"""`dscale report`: one page from any mix of records."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dscale.cli import options as o


def report(
    records: Annotated[
        list[Path], typer.Argument(help="Record files (.json, .json.gz), or folders that hold a record.json.")
    ],
    out: Annotated[Path, typer.Option(help="The page: one HTML file that needs nothing else.")] = Path("report.html"),
    markdown: Annotated[Path | None, typer.Option(help="The same as Markdown; figures as tables.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    json: o.AsJson = False,
) -> None:
    """Make a report from records of bench, certify, reproduce, evaluate and the benchmark scripts.

    Every number comes from a record; what they lack is listed under "What was not measured".

    Example: dscale report bench.json certificate.json --out report.html --markdown report.md
    """
    from dscale.evaluate.report.build import TITLE, build_report, write_report

    with o.reporting() as progress:
        made = build_report(records, title or TITLE, report=progress)
        write_report(made, out, markdown)
    if json:
        told: dict[str, Any] = {
            "out": str(out),
            "markdown": str(markdown) if markdown else None,
            "bytes": out.stat().st_size,
        }
        told |= {"sections": [one.title for one in made.sections], "not_measured": list(made.missing)}
        print(json_text.dumps(told | {"simulated": made.simulated}))
        return
    console = Console()
    console.print(f"{out}: {len(made.sections)} sections of {len(records)} records", highlight=False, soft_wrap=True)
    console.print(f"not measured: {len(made.missing)} points, listed at its end", style="dim", highlight=False)
