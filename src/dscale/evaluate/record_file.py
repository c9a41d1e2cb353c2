"""Files of records: JSON that is small, may be read by eye and may be compressed.

    write_record(Path("bench.json"), content)      # or bench.json.gz
    content = read_json(path)

A measured float has seven significant digits, seconds are to the microsecond (short ones have seven digits too): a
clock says no more. What is short stands on one line, and so does a list of plain values, however long; other lists and
objects take a line an entry.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from dscale.train.artifacts import write_bytes

DIGITS = 7  # significant ones of a measured float: tables print up to five, which rounding twice must not change
LINE = 120
MICRO = 6  # decimals of seconds
COMPRESSED = ".gz"
ROWS = "rows"  # of requests, as lists: their floats are seconds


def write_record(path: Path, content: Any, exact: bool = False, sort: bool = False) -> None:
    """Write a record whole or not at all, compressed where the name ends in .gz.

    exact: floats stay as they are; sort: fields by name, for files that must have the same bytes when made again.
    """
    data = record_text(content, exact, sort).encode()
    write_bytes(path, gzip.compress(data, 9, mtime=0) if path.suffix == COMPRESSED else data)


def read_json(path: Path) -> Any:
    """The content of a record, compressed or not. OSError where it cannot be read, ValueError where it is no JSON, or
    is nested too deeply."""
    try:
        return json.loads(_text(file_of(path)))
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _text(path: Path) -> str:
    if path.suffix != COMPRESSED:
        return path.read_text(encoding="utf-8")
    try:
        return gzip.decompress(path.read_bytes()).decode()
    except (EOFError, zlib.error) as error:
        raise OSError(f"not a whole {COMPRESSED} file: {error}") from None


def file_of(path: Path) -> Path:
    """The file of this name, or the one that it was compressed to since; `path` where there is neither."""
    packed = path.with_name(path.name + COMPRESSED)
    return packed if packed.is_file() and not path.exists() else path


def record_text(content: Any, exact: bool = False, sort: bool = False) -> str:
    """The text of a record, with a newline at its end; exact, sort: as of write_record."""
    plain = json.loads(json.dumps(content, sort_keys=sort))
    return laid_out(plain if exact else rounded(plain)) + "\n"


def rounded(value: Any, name: str = "") -> Any:
    """Plain data with its floats rounded; whole ones, which may be counts, stay. name: of the field that holds it."""
    if isinstance(value, dict):
        return {key: rounded(one, key) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one, name) for one in value]
    if not isinstance(value, float) or value.is_integer():
        return value
    short, of_a_clock = float(f"{value:.{DIGITS}g}"), round(value, MICRO)
    if name == ROWS:
        return of_a_clock
    seconds = name.endswith("seconds") or (name.endswith("_s") and not name.endswith("per_s"))
    return min(short, of_a_clock, key=lambda one: abs(one - value)) if seconds else short


def laid_out(value: Any, indent: int = 0) -> str:
    """JSON of plain data in lines of up to LINE characters, where a list of plain values is never broken."""
    line = json.dumps(value, separators=(",", ":"))
    nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict | list) for one in value))
    if not nested or indent + len(line) <= LINE:
        return line
    inner, deeper = f"\n{' ' * (indent + 1)}", indent + 1
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {laid_out(one, deeper)}" for key, one in value.items()]
        return "{" + inner + f",{inner}".join(entries) + f"\n{' ' * indent}" + "}"
    return "[" + inner + f",{inner}".join(laid_out(one, deeper) for one in value) + f"\n{' ' * indent}]"
