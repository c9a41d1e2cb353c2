"""`dscale train …`: what is trained, one subcommand each, in modules of their own."""

from __future__ import annotations

import typer

from dscale.cli.train_drafter import drafter

app = typer.Typer(
    name="train",
    help="Train a drafter.\n\nExample: dscale train drafter smollm2-135m out/corpus out/drafter",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command()(drafter)


@app.callback()
def train() -> None:
    """Train a drafter on a corpus that its target has written.

    Example: dscale train drafter smollm2-135m out/corpus out/drafter --preset tiny
    """
