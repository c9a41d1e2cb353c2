"""Where a benchmark's prompts come from: JSONL files, the four public sets, any data set, or the built-in ones.

FILE[=NAME]            JSONL rows with `turns`, `prompt` or `messages`
gsm8k, humaneval, mbpp, mt-bench    from the hub, through the `datasets` package
hub:NAME[:split[:column]]           any data set, likewise
built-in               procedural: word problems, requests for functions, documented stubs (train/prompts.py)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.evaluate.workloads import Workload, read_workload, spread
from dscale.train.prompts import TEMPLATES, Script, only, scripts
from dscale.train.sources import dataset_source, script_from, script_hash

BUILT_IN, HUB = "built-in", "hub:"
MADE = 96  # distinct prompts of each built-in workload
MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"


@dataclass(frozen=True)
class PublicSet:
    """A set on the hub: which rows, which column is asked, and what is put around it."""

    name: str
    config: str | None
    split: str
    column: str
    before: str = ""
    after: str = ""


PUBLIC = {
    "gsm8k": PublicSet("openai/gsm8k", "main", "test", "question", after=MATH),
    "humaneval": PublicSet("openai/openai_humaneval", None, "test", "prompt", SOLVE, "\n```"),
    "mbpp": PublicSet("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "mt-bench": PublicSet("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
}


def read_prompts(given: Sequence[str], limit: int = 0, seed: int = 0) -> list[Workload]:
    """The workloads of `given`, `limit` prompts of each (0: all), evenly spread. InputError names what is wrong."""
    found = [one for source in given for one in _read(source, limit, seed)]
    names = [one.name for one in found]
    for name in names:
        require(names.count(name) == 1, f"--prompts: workload {name!r} is given twice; name one with FILE=NAME")
    return found


def _read(source: str, limit: int, seed: int) -> list[Workload]:
    if source == BUILT_IN:
        return built_in_sets(limit, seed)
    if source.startswith(HUB):
        made = dataset_source(source.removeprefix(HUB))
        return [_workload(made.record["name"], source, made.scripts, limit)]
    if source in PUBLIC and not Path(source).is_file():
        return [_workload(source, PUBLIC[source].name, _public_scripts(source), limit)]
    known = f"{', '.join(PUBLIC)}, {BUILT_IN}, {HUB}NAME, or a JSONL file"
    path = Path(source.rpartition("=")[0] or source)
    require(path.is_file(), f"--prompts: {source!r} is neither a file nor a known set; allowed are {known}")
    return [read_workload(source, limit)]


def built_in_sets(limit: int, seed: int) -> list[Workload]:
    """One workload for each kind of made-up prompt: stories (word problems), requests, functions (stubs)."""
    return [
        _workload(kind, BUILT_IN, list(itertools.islice(scripts(only((kind,), seed)), MADE)), limit)
        for kind in TEMPLATES
    ]


def _workload(name: str, source: str, made: list[Script], limit: int) -> Workload:
    chosen = spread(len(made), limit)
    prompts = tuple(
        (
            *({"role": role, "content": text} for role, text in made[number].context),
            {"role": "user", "content": made[number].text + made[number].suffix},
        )
        for number in chosen
    )
    return Workload(name, source, script_hash(made), chosen, prompts)


def _public_scripts(name: str) -> list[Script]:
    known = PUBLIC[name]
    rows: Any
    try:
        import datasets

        rows = datasets.load_dataset(known.name, known.config, split=known.split)[known.column]
    except ImportError:
        raise InputError(f"--prompts {name}: needs the datasets package; pip install 'dscale[data]'") from None
    except Exception as error:  # network, lookup and parsing errors of several libraries
        raise InputError(
            f"--prompts {name}: {known.name} cannot be read ({' '.join(str(error).split())[:160]})"
        ) from None
    made = [script_from(f"{known.name} row {number}", value, known.column, name) for number, value in enumerate(rows)]
    return [Script(known.before + one.text + known.after, True, "", name, one.context) for one in made]
