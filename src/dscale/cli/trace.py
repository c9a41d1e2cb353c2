"""`dscale trace`: what was known of each draft block before its verification, and how many of its drafts were accepted.

dscale trace smollm2-135m auto traces --prompts gsm8k.jsonl --prompts chat.jsonl=mt-bench
dscale trace smollm2-135m drafter traces --corpus corpus --preset full
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dscale.cli import options as o
from dscale.config import require


def trace(
    target: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file, alias (smollm2-135m) or bundle.")],
    drafter: Annotated[str, typer.Argument(help="Drafter folder; auto takes the one that comes with the target.")],
    out: Annotated[Path, typer.Argument(help="Folder of the traces; an interrupted run goes on there.")],
    corpus: Annotated[Path | None, typer.Option(help="Corpus folder whose greedy conversations are walked.")] = None,
    part: Annotated[str, typer.Option(help="Part of the corpus: holdout, validation or train.")] = "holdout",
    prompts: Annotated[
        list[str] | None, typer.Option(help="FILE or FILE=WORKLOAD, JSONL with turns, prompt or messages; repeatable.")
    ] = None,
    groups: Annotated[
        str, typer.Option(help="Feature groups, comma-separated: confidence, hidden, logits, context; or all.")
    ] = "confidence,context",
    projection_seed: Annotated[int, typer.Option(help="Seed of the projections of hidden and logits.")] = 0,
    lanes: Annotated[int, typer.Option(help="Live requests written into the features of walked conversations.")] = 8,
    preset: Annotated[str, typer.Option(help="tiny or full; options below override it.")] = "full",
    conversations: Annotated[int | None, typer.Option(help="Most conversations of each source; 0 takes all.")] = None,
    shard: Annotated[int | None, typer.Option(help="Conversations of one shard.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer to a prompt.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Most prompts answered together.")] = None,
    rows: Annotated[int | None, typer.Option(help="Packed rows of one pass of the walk.")] = None,
    anchors: Annotated[int | None, typer.Option(help="Conversations of a row walked side by side.")] = None,
    temperature: o.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0,
    layout: o.Layout = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    as_json: o.AsJson = False,
) -> None:
    """Record full-width verification traces of a drafter: features, drafts, accepted length, request, prompt, position.

    Example: dscale trace smollm2-135m auto traces --prompts questions.jsonl --preset tiny
    """
    from dscale.speculation.features import GROUPS
    from dscale.train.trace_run import PRESETS, TraceConfig, run

    require(preset in PRESETS, f"--preset: {preset!r}; allowed are {', '.join(PRESETS)}")
    given = {
        "conversations": conversations, "shard": shard, "max_tokens": max_tokens, "max_requests": max_requests,
        "rows": rows, "anchors": anchors,
    }  # fmt: skip
    config = TraceConfig(
        target=target, drafter=drafter, corpus=None if corpus is None else str(corpus), part=part,
        prompts=tuple(prompts or ()), groups=GROUPS if groups == "all" else tuple(groups.replace(" ", "").split(",")),
        projection_seed=projection_seed, lanes=lanes, temperature=temperature, seed=seed, layout=layout, dtype=dtype,
        device=device, **(PRESETS[preset] | {name: value for name, value in given.items() if value is not None}),
    )  # fmt: skip
    with o.reporting() as report:
        stats = run(config, out, report)
    if as_json:
        print(json.dumps({"folder": str(out), **stats}))
    else:
        show(out, stats)


def show(out: Path, stats: dict[str, Any]) -> None:
    """Print a table, one row per workload."""
    state = "was complete already" if stats["complete"] else f"{stats['shards']} shards, {stats['resumed']} from before"
    table = Table(title=f"{out}: {state}", title_justify="left")
    for name in ("workload", "requests", "records", "accepted a step", "tokens a step", "exact"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for name, one in [*stats["workloads"].items(), ("all", stats)]:
        counts = (str(one[key]) for key in ("requests", "records"))
        table.add_row(name, *counts, f"{one['mean_accepted']:.2f}", f"{one['progress']:.2f}", f"{one['exact']:.1%}")
    Console().print(table)
