"""What all tables of records are made of: Markdown, files read, and which ratios were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "–"


class BadRecord(ValueError):
    """A record that cannot be shown. The message is one line."""


@dataclass(frozen=True)
class Record:
    """A file's name and its JSON."""

    name: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Ratios:
    """Which ratios of tokens/s to add: of the arms `of` (all where empty) over each arm of `over`."""

    over: Sequence[str] = ()
    of: Sequence[str] = ()


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def grid(head: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join([row(*head), row(*["---"] * len(head)), *(row(*line) for line in lines)])


def bold_best(values: Sequence[float | None], texts: Sequence[str]) -> list[str]:
    """The texts, that of the largest value in bold where there are two values at least."""
    known = [value for value in values if value is not None]
    best = max(known) if len(known) > 1 else None
    return [
        f"**{text}**" if best is not None and value == best else text for value, text in zip(values, texts, strict=True)
    ]


def times(value: float | None, base: float | None) -> str:
    """A ratio, or nothing where one of the two is missing."""
    return NONE if value is None or not base else f"{value / base:.2f}×"


def title(records: Sequence[Record], *more: str) -> str:
    """The files and what they have in common."""
    content = records[0].content
    known = [content[key] for key in ("model", "device", "note") if content.get(key)]
    return ", ".join(record.name for record in records) + ": " + ", ".join([*known, *more])
