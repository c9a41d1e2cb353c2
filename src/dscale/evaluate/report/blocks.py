"""What a report is made of, whatever it is written as: sections of tables, figures, lists, cards and sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SIMULATED = "simulated acceptance"
NUMERIC = re.compile(r"^(–|[+\-−±]?\d)")


@dataclass(frozen=True)
class Table:
    """caption, names of the columns and rows of text; the first column names the row."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        """ValueError for a cell that is no text: what should be a name in the record is none."""
        cells = [*self.columns, *(cell for row in self.rows for cell in row)]
        wrong = next((cell for cell in cells if not isinstance(cell, str)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no name")

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers alone, to be set flush right."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return tuple(number > 0 and all(map(NUMERIC.match, cells)) for number, cells in enumerate(columns))

    def markdown(self) -> str:
        """A Markdown table under its caption."""
        rules = [" ---: " if right else " --- " for right in self.numeric]
        lines = [f"**{self.caption}**", "", _row(self.columns), f"|{'|'.join(rules)}|", *map(_row, self.rows)]
        return "\n".join([*lines, *(["", self.note] if self.note else [])])


@dataclass(frozen=True)
class Figure:
    """Panels (SVG text) with one legend. alt: what a reader who cannot see it must know; table: the numbers drawn.

    legend: (label, number of its style in figures.STYLES).
    """

    title: str
    alt: str
    panels: tuple[str, ...]
    legend: tuple[tuple[str, int], ...] = ()
    table: Table | None = None
    note: str = ""
    simulated: bool = False

    def markdown(self) -> str:
        """The numbers, for Markdown has no figure."""
        label = f" ({SIMULATED})" if self.simulated else ""
        parts = [f"**{self.title}{label}.** {self.alt}", self.note, self.table.markdown() if self.table else ""]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Text:
    """A paragraph. strong: it must not be overlooked."""

    text: str
    strong: bool = False

    def markdown(self) -> str:
        """The paragraph."""
        return f"**{self.text}**" if self.strong else self.text


@dataclass(frozen=True)
class Listing:
    """A list of lines."""

    items: tuple[str, ...]

    def markdown(self) -> str:
        """A bullet each."""
        return "\n".join(f"- {item}" for item in self.items)


@dataclass(frozen=True)
class Card:
    """One headline figure: where it holds, what it is and its interval, what it was measured against."""

    label: str
    value: str
    interval: str
    detail: str
    shown: bool = True


@dataclass(frozen=True)
class Cards:
    """Headline figures side by side."""

    cards: tuple[Card, ...]

    def markdown(self) -> str:
        """A bullet each."""
        return "\n".join(f"- {one.label}: **{one.value}** {one.interval} — {one.detail}" for one in self.cards)


Block = Table | Figure | Text | Listing | Cards


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it. key: of its link, unique in the report."""

    key: str
    title: str
    blocks: tuple[Block, ...]
    source: str = ""

    def markdown(self) -> str:
        """The section as Markdown."""
        head = f"## {self.title}" + (f"\n\nFrom `{self.source}`." if self.source else "")
        return "\n\n".join([head, *(block.markdown() for block in self.blocks)])


@dataclass(frozen=True)
class Report:
    """The whole: title, sections, what was not measured, and the records it was made from."""

    title: str
    sections: tuple[Section, ...]
    missing: tuple[str, ...]
    records: Table
    simulated: bool = False
    notes: tuple[str, ...] = field(default=())

    def markdown(self) -> str:
        """The report as Markdown; figures are told by their numbers."""
        parts = [f"# {self.title}", *([f"**Figures from runs with {SIMULATED} say so.**"] * self.simulated)]
        parts += [section.markdown() for section in self.sections]
        parts += ["## What was not measured", Listing(self.missing).markdown()]
        parts += ["## Records", self.records.markdown()]
        return "\n\n".join(parts) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, digits: int = 2) -> str:
    """A number, thousands apart; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def spanned(figure: list[float] | tuple[float, ...], digits: int = 2, scale: float = 1.0, unit: str = "") -> str:
    """[value, low, high] as 'value (low … high)'."""
    value, low, high = (scale * one for one in figure)
    return f"{value:.{digits}f}{unit} ({low:.{digits}f} … {high:.{digits}f})"
