"""Options that several commands share, and the model they build from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from dscale.engine.llm import LLM
    from dscale.train.artifacts import Report

Model = Annotated[str, typer.Option("-m", "--model", help="Folder, hub id, GGUF file or alias (smollm2-135m).")]
Drafter = Annotated[str, typer.Option("-d", "--drafter", help="Drafter folder; auto takes the shipped one; none.")]
Predictor = Annotated[
    str, typer.Option("-p", "--predictor", help="Predictor folder; auto takes the shipped one; none.")
]
PolicyName = Annotated[
    str, typer.Option("--policy", help="off, full, fixed:W, dvl, dvl:seeded, confidence, dspark, auto.")
]
Width = Annotated[
    int | None, typer.Option("--width", help="Block width W, anchor included; default the drafter's own.")
]
Slots = Annotated[float, typer.Option("--slots", help="Rows verified per request by dvl and confidence.")]
Layout = Annotated[str | None, typer.Option("--layout", help="Anchor layout of the drafter: 1+N or anchor-first.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DraftWeights = Annotated[
    str,
    typer.Option("--draft-weights", help="auto, or fp8: drafts at eight bits; faster on newer GPUs, slower on a CPU."),
]
CacheDtype = Annotated[
    str,
    typer.Option("--kv-cache-dtype", help="auto, or fp8: half the memory, keys and values rounded; slower on a CPU."),
]
DraftCacheDtype = Annotated[
    str, typer.Option("--draft-kv-cache-dtype", help="The same for the drafter's cache; costs drafts, not text.")
]
Graphs = Annotated[bool, typer.Option("--graphs/--no-graphs", help="On a GPU: capture decode steps as CUDA graphs.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="On a GPU: the text of `off` in bfloat16 too, whatever the batch.")
]
TensorParallel = Annotated[int, typer.Option("--tp", help="Processes, each with a GPU, that share the model.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this mass.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of sampling; the same seed gives the same text.")]
Simulate = Annotated[
    str | None,
    typer.Option("--simulate-acceptance", help="Make acceptance up: a mean progress such as 6.09, or a trace file."),
]
CheckedModel = Annotated[str, typer.Argument(help="Folder, hub id, GGUF file or alias; a server's: its tokenizer.")]
PromptSets = Annotated[
    list[str] | None,
    typer.Option(help="FILE or FILE=NAME (JSONL), gsm8k, humaneval, mbpp, mt-bench or built-in; repeatable."),
]
Limit = Annotated[int, typer.Option(help="Prompts of each source, spread over it; 0 takes all.")]
Longest = Annotated[int, typer.Option(help="Prompts of more tokens are left out.")]
SeedOfPrompts = Annotated[int, typer.Option(help="Prompt i is sampled with this seed + i.")]
Requests = Annotated[int, typer.Option(help="Requests decoded side by side.")]
ServedModel = Annotated[str | None, typer.Option(help="The model's name on the server; default its first.")]
RecordFile = Annotated[Path | None, typer.Option(help="File for the record, JSON; NAME.json.gz: compressed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

errors = Console(stderr=True)


def build_llm(model: str, temperatures: Collection[float] = (), **options: Any) -> LLM:
    """An LLM, with a spinner on stderr while it loads. temperatures: all that will be asked for, where they are known:
    on a GPU no other kind of step is captured at the start."""
    from dscale.engine.graphs import kinds_for
    from dscale.engine.llm import LLM

    if temperatures:
        options["graph_kinds"] = kinds_for(temperatures)
    with spinner(f"loading {model}"):
        llm = LLM(model, **options)
    if llm.engine.worker.graphs is not None:
        errors.print(str(llm.engine.worker.graphs.counters))
    return llm


def simulated(given: str | None) -> float | str | None:
    """--simulate-acceptance as LLM takes it: a number, or the path of a trace."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """A spinner on stderr; silent when stderr is not a terminal."""
    if not errors.is_terminal:
        yield
        return
    with errors.status(text):
        yield


def progress_bar() -> Progress:
    """A progress bar on stderr that is off when stderr is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


@contextmanager
def reporting() -> Iterator[Report]:
    """A Report (train/artifacts.py) that keeps a progress bar per thing being done; silent off a terminal.

    What follows a comma may change without another bar, such as "answering, 12,345 tokens/s".
    """
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: float, total: float | None = None) -> None:
            thing = what.partition(",")[0]
            if thing not in tasks:
                tasks[thing] = bar.add_task(what, total=total)
            bar.update(tasks[thing], description=what, completed=done, total=total)

        yield report
