"""Markdown tables of records of steps, clocks and attention on a GPU, which tables.py prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from markdown_tables import NONE, Ratios, Record, grid, title

COLUMNS = {  # of a step's breakdown, with the kernel groups of gpu_step.py in each; the rest is "copies, other"
    "matrix products": ("matrix products",),
    "attention": ("attention",),
    "norm": ("norm",),
    "rotary, cache": ("rotary, cache write",),
    "gate": ("gate",),
    "vocabulary": ("vocabulary",),
    "decide": ("predict", "allocate", "pack"),
    "accept": ("accept",),
}
WAYS = {"packed": "packed", "narrow": "16-row tiles", "wide": "128-row tiles", "deterministic": "packed, deterministic"}
AFTER = ("0", "1", "2", "3–4", "5–8", "9–16", "more")  # gpu_clocks.PLACES: of its like before a step of a row
ASKED = {(8, 1024): "2.5×", (32, 1024): "1.8×", (32, 4096): "1.5×"}  # of packed attention, by requests and context


def step_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """gpu_step.py: steps against their roofline, and milliseconds by kernel group."""
    del ratios
    rows = sorted((one for record in records for one in record.content["rows"]), key=lambda one: one["concurrency"])
    shown, parts = [], []
    for one in rows:
        groups, step = one["groups_ms"], one["interval_ms"]
        told = [one["concurrency"], one["name"]]
        shares = [f"{100 * one[key]:.1f}%" for key in ("decide_share", "idle_share")]
        figures = [
            step,
            one["floor_ms"],
            one["times_floor"],
            groups.get("matrix products", 0),
            groups.get("attention", 0),
        ]
        gaps = NONE if one.get("gap_share") is None else f"{100 * one['gap_share']:.1f}%"  # first records have none
        shown.append([*told, f"{one['rows']:.0f}", *[f"{value:.2f}" for value in figures], *shares, gaps])
        split = [sum(groups.get(name, 0.0) for name in names) for names in COLUMNS.values()]
        split += [sum(groups.values()) - sum(split), step - sum(groups.values())]
        parts.append([*told, f"{step:.2f}", *[f"{value:.3f}" for value in split]])
    head = ["c", "arm", "rows", "step, ms", "floor, ms", "times floor", "products", "attention"]
    made = [title(records), grid([*head, "predictor, allocation, packing", "idle", "gaps"], shown)]
    about = "ms of a step by kernel group (idle below zero: kernels overlap)"
    made.append(f"{about}\n\n" + grid(["c", "arm", "step", *COLUMNS, "copies, other", "idle"], parts))
    left = [line for record in records for line in record.content["skipped"]]
    return [*made, *(["\n".join(left)] if left else [])]


def clock_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """gpu_clocks.py: steps of a size in rows, alone among the other size, and by how many of their like came before."""
    del ratios
    return [part for record in records for part in (title([record]), *clocks(record.content["cells"]))]


def clocks(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Each size beside itself in its row, and the two sizes beside each other."""
    cells = sorted(cells, key=lambda cell: cell["concurrency"])
    sizes = [[cell["concurrency"], size, *_clock(cell[str(size)])] for cell in cells for size in cell["sizes"]]
    head = ["c", "slots", "in a row, ms", "alone, ms", "alone over row", *[f"after {places}" for places in AFTER]]
    about = "times of the larger size over those of the smaller; closer: in rows over alone"
    pairs = grid(["c", "slots", "in rows", "alone", "closer"], map(_beside, cells))
    return [grid(head, sizes), f"{about}\n\n{pairs}"]


def _clock(one: dict[str, Any]) -> list[str]:
    return [*[_three(one[key]) for key in ("row_ms", "alone_ms", "alone_over_row")], *map(_three, one["after"])]


def _beside(cell: dict[str, Any]) -> list[object]:
    small, large = (cell[str(size)] for size in cell["sizes"])
    rows, alone = (_over(large[key], small[key]) for key in ("row_ms", "alone_ms"))
    closer = NONE if rows is None or alone is None else f"{100 * (rows / alone - 1):.1f}%"
    return [cell["concurrency"], "{1} over {0}".format(*cell["sizes"]), _three(rows), _three(alone), closer]


def _three(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def attention_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """gpu_attention.py: the ways side by side, then shapes measured one way, then the best of a sweep of tiles."""
    del ratios
    made = []
    for record in records:
        shapes: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for one in record.content["times"]:
            keys = ("path", "lanes", "context", "rows", "heads", "kv", "size", "spread", "cache")
            shapes.setdefault(tuple(one[key] for key in keys), {})[one["case"]] = one
        chosen = {key: {n: e for n, e in ways.items() if e["tile"] is None} for key, ways in shapes.items()}
        many = [ways for ways in chosen.values() if len(ways) > 1]
        names = list(dict.fromkeys(name for ways in many for name in ways))
        asked = "asked of packed"
        lines = [[_where(ways), *[_took(ways.get(name)) for name in names], _asked(ways)] for ways in many]
        made.append(title([record], "µs a layer (times the bytes floor)"))
        made += [grid(["requests, context", *[WAYS.get(name, name) for name in names], asked], lines)] if lines else []
        single = [(name, one) for ways in chosen.values() if len(ways) == 1 for name, one in ways.items()]
        lines = [[_shape(one), WAYS.get(name, name), _took(one)] for name, one in single]
        made += [grid(["other shapes", "way", "µs"], lines)] if lines else []
        made += _sweep(shapes.values())
        made += ["\n".join(record.content["problems"])] if record.content["problems"] else []
    return made


def _where(ways: dict[str, dict[str, Any]]) -> str:
    one = next(iter(ways.values()))
    kilo = f"{one['context'] // 1024}k" if one["context"] % 1024 == 0 and one["context"] else str(one["context"])
    return f"{one['lanes']}, {kilo}"


def _asked(ways: dict[str, dict[str, Any]]) -> str:
    one = next(iter(ways.values()))
    return ASKED.get((one["lanes"], one["context"]), "") if one["cache"] == "torch.bfloat16" else ""


def _shape(one: dict[str, Any]) -> str:
    spread = f" ±{one['spread']:.0%}" if one["spread"] else ""
    cache = one["cache"].removeprefix("torch.")
    heads = f"heads {one['heads']}/{one['kv']} of {one['size']}"
    return f"{one['path']}, {_where({'': one})}{spread}, {one['rows']} rows, {heads}, {cache}"


def _took(one: dict[str, Any] | None) -> str:
    if one is None:
        return NONE
    return f"{one['us']:.0f} ({one['us'] / one['floor']:.2f}×)" + (
        f", {one['tflops']:.0f} TFLOP/s" if "tflops" in one else ""
    )


def _sweep(shapes: Iterable[dict[str, dict[str, Any]]]) -> list[str]:
    lines = []
    for ways in shapes:
        tiles = [one for one in ways.values() if one["tile"] is not None]
        if tiles:
            best = min(tiles, key=lambda one: one["us"])
            lines.append([_shape(best), _took(ways.get("packed")), f"{best['case']}: {_took(best)}", len(tiles)])
    return [grid(["tiles", "chosen", "best of the sweep", "tried"], lines)] if lines else []
