"""`dscale`: one command per job. Bad input ends with one line and exit code 2."""

from __future__ import annotations

import os
import sys

import typer

from dscale.cli.bench import bench
from dscale.cli.certify import certify
from dscale.cli.chat import chat
from dscale.cli.check import app as check
from dscale.cli.corpus import corpus
from dscale.cli.demo import demo
from dscale.cli.evaluate import app as evaluate
from dscale.cli.fit import fit
from dscale.cli.generate import generate
from dscale.cli.inspect import inspect
from dscale.cli.report import report
from dscale.cli.reproduce import reproduce
from dscale.cli.serve import serve
from dscale.cli.trace import trace
from dscale.cli.train import app as train
from dscale.cli.tune import tune
from dscale.config import InputError, RankFailed

app = typer.Typer(
    name="dscale",
    help="Block-diffusion speculative decoding with adaptive verification.\n\nExample: dscale demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(generate)
app.command()(chat)
app.command()(inspect)
app.command()(corpus)
app.command()(fit)
app.command()(certify)
app.command()(reproduce)
app.command()(report)
app.command()(serve)
app.command()(trace)
app.command()(tune)
app.command()(bench)
app.add_typer(evaluate)
app.add_typer(train)
app.add_typer(check)


def run() -> None:
    """Entry point of the `dscale` command."""
    try:
        app()
    except SystemExit as end:
        if not end.code and os.environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
            _leave()
        raise
    except InputError as error:
        sys.stderr.write(f"dscale: {error}\n")
        raise SystemExit(2) from None
    except RankFailed as error:
        sys.stderr.write(f"dscale: {' '.join(str(error).split())}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write("dscale: interrupted\n")
        raise SystemExit(130) from None


def _leave() -> None:
    """End a process of torchrun that is through, without taking the interpreter down: now and then a thread of its
    group outlives the group and aborts it then, and a run that wrote everything would have failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run()
