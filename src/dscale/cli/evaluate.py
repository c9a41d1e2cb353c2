"""`dscale evaluate …`: one subcommand per question, each in its own module."""

from __future__ import annotations

import typer

from dscale.cli.evaluate_drafter import drafter
from dscale.cli.evaluate_policies import policies

app = typer.Typer(
    name="evaluate",
    help="Measure a drafter or the policies offline.\n\nExample: dscale evaluate drafter smollm2-135m auto out/eval",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command()(drafter)
app.command()(policies)


@app.callback()
def evaluate() -> None:
    """Measure a drafter or the policies offline.

    Example: dscale evaluate drafter smollm2-135m auto out/eval --preset tiny
    """
