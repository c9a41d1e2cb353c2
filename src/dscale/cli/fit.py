"""`dscale fit TRACES… OUT --drafter D`: the acceptance predictor of a drafter, from traces of its verification.

Example: dscale fit runs/traces runs/predictor --drafter models/smollm2-135m-dflash
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dscale.cli import options as o
from dscale.config import require


def fit(
    folders: Annotated[
        list[Path], typer.Argument(metavar="TRACES… OUT", help="Trace folders, then the output folder.")
    ],
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="The drafter that was traced.")],
    preset: Annotated[str, typer.Option("--preset", help="tiny or full.")] = "full",
    features: Annotated[
        str | None, typer.Option("--features", help="Groups, by comma: confidence, hidden, logits, context.")
    ] = None,
    head: Annotated[str | None, typer.Option("--head", help="survival (minimum) or hazard (product).")] = None,
    members: Annotated[int | None, typer.Option("--members", help="Networks averaged into one.")] = None,
    hidden_units: Annotated[int | None, typer.Option("--hidden-units", help="Units of one network.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Most epochs; fitting stops early.")] = None,
    patience: Annotated[int | None, typer.Option("--patience", help="Epochs without a better validation loss.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Records of one optimiser step.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the split, the weights and the order.")] = None,
    start: Annotated[str | None, typer.Option("--start", help="A predictor folder to go on from.")] = None,
    never_worse: Annotated[
        bool, typer.Option("--never-worse", help="Keep --start unless the new one predicts the holdout better.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Fit the variants too, and print their table.")] = False,
    device: o.Device = "auto",
    json: o.AsJson = False,
) -> None:
    """Fit a drafter's acceptance predictor to traces; measure it on prompts it never saw.

    Re-fit from a server's traffic: dscale fit recorded OUT -d DRAFTER --start OLD --never-worse

    Example: dscale fit runs/traces runs/predictor --drafter models/smollm2-135m-dflash
    """
    from dscale.train.fit import FitJob, run
    from dscale.train.predictor import PRESETS, FitConfig

    require(len(folders) >= 2, "fit: needs at least one trace folder and the output folder, in this order")
    require(preset in PRESETS, f"preset: {preset!r} is not known; allowed are {', '.join(PRESETS)}")
    asked: dict[str, Any] = {
        "features": tuple(features.replace(" ", "").split(",")) if features is not None else None,
        "head": head, "members": members, "hidden_units": hidden_units, "epochs": epochs, "patience": patience,
        "batch": batch, "rate": rate, "seed": seed,
    }  # fmt: skip
    settings = PRESETS[preset] | {name: value for name, value in asked.items() if value is not None}
    traces, out = tuple(str(folder) for folder in folders[:-1]), folders[-1]
    job = FitJob(traces, drafter, FitConfig(**settings), start, never_worse, compare, device)
    with o.reporting() as report:
        record = run(job, out, report)
    if json:
        print(json_text.dumps(record | {"out": str(out)}))
        return
    _print(record, out)


def _print(record: dict[str, Any], out: Path) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # the table of variants is wide
    if record["already"]:
        console.print(f"{out}: complete already; nothing was changed", highlight=False, soft_wrap=True)
    scores = record["holdout"]
    console.print(
        f"R² {scores['r2']:.3f}, mean error {scores['mae']:.2f} drafts, log loss {scores['log_loss']:.4f} on "
        f"{record['records']['holdout']} records of {record['prompts']['holdout']} held-out prompts",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if "old" in record:
        _print_choice(console, record)
    _print_retention(console, record)
    if "comparison" in record:
        _print_comparison(console, record["comparison"])
    if record["already"] or (out / "reliability.png").is_file():
        return
    console.print("no reliability.png: matplotlib is not installed (its numbers are in metrics.json)", soft_wrap=True)


def _print_choice(console: Console, record: dict[str, Any]) -> None:
    was, now = record["old"], record["new"]
    console.print(
        f"kept the {record['kept']} predictor: log loss {was['log_loss']:.4f} before, {now['log_loss']:.4f} after; "
        f"R² {was['r2']:.3f} before, {now['r2']:.3f} after",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _print_retention(console: Console, record: dict[str, Any]) -> None:
    scores, needed = record["holdout"], record["required"]
    if needed is None:
        console.print("no block was verified whole: retention cannot be told from these traces", soft_wrap=True)
        return
    table = Table(title="Accepted drafts retained, %", title_justify="left")
    for name in ("slots", "exact of 8", "seeded of 8", "exact of 32", "seeded of 32", "oracle of 8", "fixed"):
        table.add_column(name, justify="right")
    for slots in sorted(int(key.split("_")[1]) for key in scores if key.startswith("retention_") and "fixed" in key):
        keys = ("of_8", "of_8_seeded", "of_32", "of_32_seeded", "of_8_oracle", "fixed")
        mark = "*" if slots == needed["slots"] else ""
        table.add_row(f"{slots}{mark}", *(f"{100 * scores[f'retention_{slots}_{key}']:.1f}" for key in keys))
    console.print(table)
    console.print(f"* mean progress {record['mean_progress']:.2f} + 2", highlight=False)


def _print_comparison(console: Console, comparison: dict[str, Any]) -> None:
    table = Table(title=f"Variants, 95% intervals over prompts; retention at {comparison['slots']} slots, 8 requests")
    for name in ("variant", "parameters", "R²", "difference", "retention %", "difference, points"):
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for name, row in comparison["variants"].items():
        r2, kept = row["r2"], row["retention"]
        table.add_row(
            name if row["served"] else f"{name} (offline)",
            f"{row['parameters']:,}",
            _interval(r2, 1, 3),
            _interval(r2["difference"], 1, 3),
            _interval(kept, 100, 1),
            _interval(kept["difference"], 100, 2),
        )
    console.print(table)


def _interval(row: dict[str, float], scale: float, digits: int) -> str:
    value, low, high = (f"{scale * row[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
