"""`dscale evaluate policies`: every policy on the same recorded traces, with modelled speeds."""

from __future__ import annotations

import json as json_text
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dscale.cli import options as o
from dscale.config import InputError, require


def policies(
    traces: Annotated[Path, typer.Argument(help="Trace folder, recorded with whole blocks.")],
    out: Annotated[Path, typer.Argument(help="Output folder.")],
    predictor: Annotated[str | None, typer.Option("-p", "--predictor", help="Its folder; without it no dvl.")] = None,
    costs: Annotated[Path | None, typer.Option(help="A cost table (costs.json); default: measured here.")] = None,
    target: Annotated[str | None, typer.Option(help="Target whose steps are timed; default the traces' own.")] = None,
    drafter: Annotated[
        str, typer.Option("-d", "--drafter", help="Its drafter; auto takes the one that comes with the target.")
    ] = "auto",
    concurrency: Annotated[str | None, typer.Option(help="Requests side by side, such as 8,32.")] = None,
    budgets: Annotated[str | None, typer.Option(help="Slots a request, such as 4,6,8.")] = None,
    part: Annotated[str, typer.Option(help="auto, holdout (prompts the predictor did not see) or all.")] = "auto",
    context: Annotated[int | None, typer.Option(help="Tokens of a request whose steps are timed.")] = None,
    resamples: Annotated[int | None, typer.Option(help="Bootstrap resamples of the intervals.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of requests and of the bootstrap.")] = 0,
    preset: Annotated[str, typer.Option(help="tiny or full.")] = "full",
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    json: o.AsJson = False,
) -> None:
    """Compare all policies on the same traces: drafts kept and tokens a step per budget, modelled tokens/s.

    Example: dscale evaluate policies out/traces out/policies --predictor models/smollm2-135m-predictor
    """
    from dscale.evaluate.policy_run import PRESETS, PoliciesConfig, run

    require(preset in PRESETS, f"preset: {preset!r}; allowed are {', '.join(PRESETS)}")
    given: dict[str, Any] = {
        "concurrency": read_numbers("concurrency", concurrency),
        "budgets": read_numbers("budgets", budgets),
        "resamples": resamples,
    }
    chosen = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    config = PoliciesConfig(
        str(traces), predictor, str(costs) if costs else None, target, drafter, part=part, seed=seed, dtype=dtype,
        device=device, **chosen,
    )  # fmt: skip
    if context is not None:
        config = replace(config, costs=replace(config.costs, context=context))
    with o.reporting() as report:
        record = run(config, out, report)
    already = record.pop("already")
    if json:
        print(json_text.dumps({"already": already, "out": str(out), **record}))
        return
    console = Console()
    if already:
        console.print(f"{out}: complete already; nothing was changed", highlight=False, soft_wrap=True)
    for lanes, one in record["concurrency"].items():
        console.print(to_table(lanes, one))
    if not record["plot"]:
        console.print("no plot: matplotlib is not installed", style="dim")
    for limit in record["limits"]:
        console.print(limit, style="dim", highlight=False)
    console.print(f"record, table and plots are in {out}", highlight=False, soft_wrap=True)


def read_numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    """Numbers from "8,32"."""
    if text is None:
        return None
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise InputError(f"--{name}: {text!r} must be numbers with commas between, such as 8,16") from None


def to_table(lanes: str, one: dict[str, Any]) -> Table:
    """The best budget of every policy at one concurrency."""
    from dscale.evaluate.policy_record import ALL, change

    table = Table(title=f"{lanes} requests side by side, every policy at its fastest budget", title_justify="left")
    table.add_column("policy")
    for name in ("slots", "retention", "tokens a step", "modelled tokens/s", "against full"):
        table.add_column(name, justify="right")
    for arm in fastest(one["arms"]):
        figures = arm["figures"][ALL]
        table.add_row(
            arm["policy"] if arm["slots"] is not None else f"{arm['policy']}, own budget",
            f"{figures['slots'][0]:.1f}",
            f"{figures['retention'][0]:.1%}",
            f"{figures['progress'][0]:.2f}",
            f"{figures['tokens_per_s'][0]:.1f}",
            change(figures["vs_full"]),
        )
    return table


def fastest(arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every policy the arm of the highest modelled speed; off, full and the best fixed width stay apart."""
    best: dict[tuple[str, bool], dict[str, Any]] = {}
    for arm in arms:
        key = (arm["policy"].partition(":")[0], arm["slots"] is None)
        speed = arm["figures"]["all"]["tokens_per_s"][0]
        if key not in best or speed > best[key]["figures"]["all"]["tokens_per_s"][0]:
            best[key] = arm
    return list(best.values())
