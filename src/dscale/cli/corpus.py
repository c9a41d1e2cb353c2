"""`dscale corpus`: prompts answered by the target itself, cleaned, split by prompt and packed for training.

dscale corpus smollm2-135m runs/corpus --preset tiny
torchrun --nproc-per-node 2 -m dscale corpus smollm2-135m runs/corpus --preset full
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dscale.cli import options as o
from dscale.config import require

if TYPE_CHECKING:
    from dscale.train.corpus_config import CorpusConfig


def corpus(
    target: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file or alias of the target that answers.")],
    out: Annotated[Path, typer.Argument(help="Folder of the corpus; run again with the same options to go on.")],
    preset: Annotated[str, typer.Option(help="tiny or full: where options start from.")] = "full",
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL of `prompt`, `messages` or `turns`; may be repeated.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="NAME[:split[:column]], hub name or local path; may be repeated.")
    ] = None,
    synthesise: Annotated[int | None, typer.Option(min=0, help="User turns that the target makes up itself.")] = None,
    templates: Annotated[int | None, typer.Option(min=0, help="Turns made up from word lists.")] = None,
    gym: Annotated[int | None, typer.Option(min=0, help="Tasks of the reasoning-gym package.")] = None,
    conversations: Annotated[int | None, typer.Option(min=0, help="Turns of the default mix of the three.")] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Prompt file that must not be trained on; may be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of conversations that have none.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="What the chat template is told; default off.")
    ] = None,
    answers: Annotated[int | None, typer.Option(help="Answers to every prompt, at most one of them greedy.")] = None,
    greedy: Annotated[float | None, typer.Option(help="Share of answers at temperature 0.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature of the other answers.")] = None,
    turn_cap: Annotated[int | None, typer.Option(help="Most tokens sampled for a user turn.")] = None,
    answer_cap: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    shortest_turn: Annotated[int | None, typer.Option(help="Shorter user turns are dropped, tokens.")] = None,
    longest_prompt: Annotated[int | None, typer.Option(help="Longer prompts are dropped, tokens.")] = None,
    shortest_answer: Annotated[int | None, typer.Option(help="Shorter answers are dropped, tokens.")] = None,
    keep_unfinished: Annotated[
        bool | None, typer.Option("--keep-unfinished/--drop-unfinished", help="Answers cut at the cap; default kept.")
    ] = None,
    near: Annotated[float | None, typer.Option(help="Likeness at which a prompt repeats another.")] = None,
    validation: Annotated[float | None, typer.Option(help="Share of prompts for validation.")] = None,
    holdout: Annotated[float | None, typer.Option(help="Share of prompts held out.")] = None,
    row: Annotated[int | None, typer.Option(help="Tokens of a packed row.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides scripts, temperatures and text.")] = None,
    generator: Annotated[str | None, typer.Option(help="auto, engine or lanes (CUDA, thousands at a time).")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter folder that speeds the engine up.")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy of that drafter.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Conversations at a time, lanes generator.")] = None,
    requests: Annotated[int | None, typer.Option(help="Conversations at a time, engine generator.")] = None,
    part: Annotated[int | None, typer.Option(help="Scripts answered between two savings.")] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    as_json: o.AsJson = False,
) -> None:
    """Make an on-policy corpus: prompts answered by the target, cleaned, split by prompt, packed; resumable.

    Example: dscale corpus smollm2-135m runs/corpus --preset tiny
    """
    from dscale.train.corpus import build_corpus

    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("target", "out", "preset", "as_json", "build_corpus"):
        given.pop(name, None)
    config = configure(preset, given)
    with o.reporting() as report:
        summary = build_corpus(target, out, config, report)
    if not summary:
        return  # another process of torchrun speaks
    if as_json:
        print(json.dumps({"corpus": str(out), **summary}))
    else:
        show(out, summary)


def configure(preset: str, given: dict[str, Any]) -> CorpusConfig:
    """The preset with what was given over it; any source given replaces the preset's."""
    from dscale.train.corpus_config import PRESETS, CorpusConfig
    from dscale.train.sources import SourceConfig

    require(preset in PRESETS, f"--preset: {preset!r}; allowed are {', '.join(PRESETS)}")
    values = dict(PRESETS[preset])
    for name in ("prompts", "dataset", "exclude"):
        if name in given:
            given[name] = tuple(str(one) for one in given[name])
    asked = ("prompts", "dataset", "synthesise", "templates", "gym", "conversations")
    if any(given.get(name) for name in asked):
        values.pop("conversations", None)
    values |= given
    sources = {name: values.pop(name) for name in (*asked, "system") if name in values}
    return CorpusConfig(sources=SourceConfig(**sources), **values)


def show(out: Path, summary: dict[str, Any]) -> None:
    """A table of sources, and one line for each part."""
    print(f"corpus {out}: complete")
    print(f"{'source':<22}{'asked':>9}{'kept':>9}  dropped")
    for name, one in summary["sources"].items():
        dropped = {k: v for k, v in one.items() if k not in ("asked", "made", "kept") and v}
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none"
        print(f"{name[:21]:<22}{one['asked']:>9}{one['kept']:>9}  {reasons}")
    for name, one in summary["parts"].items():
        print(
            f"{name}: {one['prompts']} prompts, {one['conversations']} conversations, {one['rows']} rows, "
            f"{one['answer_tokens']} answer tokens"
        )
    print(f"greedy {summary['greedy']:.0%}, {summary['cut_at_cap']} answers cut at the cap")
