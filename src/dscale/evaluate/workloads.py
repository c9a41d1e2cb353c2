"""Prompt files that a drafter is evaluated on: one file, one workload."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dscale.config import require
from dscale.models.tokenizer import Tokenizer
from dscale.train.prompts import Script
from dscale.train.rows import PARTS
from dscale.train.sources import read_lines, script_of

RESERVED = ("all", *PARTS)  # the pooled table and the parts of a corpus
BUILT_IN = (
    "List the days of the week, one per line.",
    "A box holds 12 pencils. How many pencils are in 7 boxes? Show the multiplication.",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in two sentences why ice floats on water.",
)


@dataclass(frozen=True)
class Workload:
    """A name, where the prompts come from (with a hash of them), and each chosen prompt's number and messages."""

    name: str
    source: str
    sha256: str
    numbers: tuple[int, ...]  # line of the file, from 0, blank lines not counted
    prompts: tuple[tuple[dict[str, Any], ...], ...]


def built_in() -> Workload:
    """A few short prompts of our own, for trying the command out."""
    digest = hashlib.sha256("\n".join(BUILT_IN).encode()).hexdigest()
    return Workload("built-in", "built-in", digest, tuple(range(len(BUILT_IN))), tuple(map(_asked, BUILT_IN)))


def read_workloads(files: Sequence[str], limit: int) -> list[Workload]:
    """FILE or FILE=NAME, each JSONL with `turns` (the first is asked), `prompt` or `messages`; limit 0 takes all."""
    found = [read_workload(file, limit) for file in files]
    names = [one.name for one in found]
    for name in names:
        plain = bool(re.fullmatch(r"[\w.-]+", name)) and name not in RESERVED
        require(plain, f"--prompts: workload {name!r}; allowed are letters, digits, . _ - and not {RESERVED}")
        require(names.count(name) == 1, f"--prompts: workload {name!r} is given twice; name one with FILE=NAME")
    return found


def read_workload(file: str, limit: int) -> Workload:
    """`limit` prompts spread evenly over one file; InputError names the line that is wrong."""
    name_of, _, given = file.rpartition("=") if "=" in file else (file, "", "")
    path = Path(name_of)
    rows, digest = read_lines(path)
    chosen = spread(len(rows), limit)
    prompts = tuple(_messages(script_of(*rows[number], path.name)) for number in chosen)
    return Workload(given or path.stem, path.name, digest, chosen, prompts)


def spread(count: int, limit: int) -> tuple[int, ...]:
    """`limit` of the numbers below count, evenly spread and starting at 0; all where limit is 0 or not below count."""
    if limit <= 0 or limit >= count:
        return tuple(range(count))
    return tuple(int(one) for one in np.arange(limit) * count // limit)


def _asked(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _messages(script: Script) -> tuple[dict[str, Any], ...]:
    return (*({"role": role, "content": text} for role, text in script.context), *_asked(script.text))


def tokenise(workload: Workload, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompt token ids, through the chat template where the model has one."""
    if tokenizer.has_chat_template:
        return [tokenizer.chat(list(prompt)) for prompt in workload.prompts]
    return [tokenizer.encode("\n\n".join(str(one.get("content", "")) for one in prompt)) for prompt in workload.prompts]
