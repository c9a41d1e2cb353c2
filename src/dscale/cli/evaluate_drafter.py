"""`dscale evaluate drafter`: E[L] on uniform anchors, on the re-anchored walk and as served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dscale.cli import options as o
from dscale.config import require


def drafter(
    target: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file or alias (smollm2-135m).")],
    drafter: Annotated[str, typer.Argument(help="Drafter folder; auto takes the shipped one.")],
    out: Annotated[Path, typer.Argument(help="Output folder; an interrupted run goes on in it.")],
    prompts: Annotated[
        list[str] | None, typer.Option(help="JSONL with turns, prompt or messages: FILE or FILE=WORKLOAD; repeatable.")
    ] = None,
    corpus: Annotated[str | None, typer.Option(help="Corpus folder: its greedy answers, not served again.")] = None,
    part: Annotated[str | None, typer.Option(help="Part of the corpus; default holdout.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each file, spread over it; 0 takes all.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of an answer.")] = None,
    batch: Annotated[int | None, typer.Option(help="Conversations decoded together and kept in one shard.")] = None,
    width: o.Width = None,
    layout: o.Layout = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    seed: Annotated[int | None, typer.Option(help="Seed of the bootstrap.")] = None,
    preset: Annotated[str | None, typer.Option(help="Defaults: tiny (seconds on a CPU) or full.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Accepted length by depth on uniform anchors, on the re-anchored walk and as served.

    Example: dscale evaluate drafter smollm2-135m auto out/eval --prompts gsm8k.jsonl --limit 12 --max-tokens 160
    """
    from dscale.evaluate.drafter import PRESETS, EvaluateConfig, evaluate_drafter

    require(preset is None or preset in PRESETS, f"--preset: {preset!r}; allowed are {', '.join(PRESETS)}")
    given: dict[str, Any] = {
        "prompts": tuple(prompts) if prompts else None, "corpus": corpus, "part": part, "limit": limit,
        "max_tokens": max_tokens, "batch": batch, "width": width, "layout": layout, "dtype": dtype, "device": device,
        "seed": seed,
    }  # fmt: skip
    chosen = PRESETS.get(preset or "", {}) | {name: value for name, value in given.items() if value is not None}
    with o.reporting() as report:
        record = evaluate_drafter(target, drafter, out, EvaluateConfig(**chosen), report)
    if as_json:
        record.pop("conversations")
        print(json.dumps(record))
        return
    if record.get("already_complete"):
        print(f"{out}: already complete, nothing to do")
    print_table(record)


def print_table(record: dict[str, Any]) -> None:
    """One line per workload: E[L] of the three ways and how far engine and teacher-forced pass agree."""
    print(f"{'workload':14} {'answers':>7} {'uniform':>8} {'re-anch.':>8} {'served':>8}   differing steps")
    for name, one in record["workloads"].items():
        cells = []
        for way in ("uniform", "re-anchored", "served"):
            value = one["ways"].get(way, {}).get("full_depth", {}).get("expected")
            cells.append("–" if value is None else f"{value:.2f}")
        same = one.get("agreement")
        agreed = f"{same['differing_steps']} of {same['steps']}" if same else "–"
        print(f"{name:14} {one['conversations']:7} {cells[0]:>8} {cells[1]:>8} {cells[2]:>8}   {agreed}")
