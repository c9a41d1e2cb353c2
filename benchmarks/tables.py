"""Markdown tables of docs/results.md from the records in benchmarks/records.

python benchmarks/tables.py benchmarks/records/cpu_speed.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def speed_table(record: dict[str, Any]) -> str:
    """Tokens per second by concurrency and arm, with the ratio to the first arm and its range over repetitions."""
    arms = list(record["cells"][0]["arms"])
    lines = [row("concurrency", *arms), row(*["---"] * (len(arms) + 1))]
    for cell in record["cells"]:
        cells = []
        for name in arms:
            arm = cell["arms"][name]
            low, high = arm["ratio_range"]
            ratio = "" if name == arms[0] else f" · {arm['ratio']:.2f}× ({low:.2f}…{high:.2f})"
            cells.append(f"{arm['tokens_per_s']:.0f}{ratio}")
        lines.append(row(cell["concurrency"], *cells))
    return "\n".join(lines)


def progress_table(record: dict[str, Any]) -> str:
    """Tokens a step, verified slots a request and milliseconds a step of each DScale arm, first repetition."""
    lines = [
        row("concurrency", "policy", "tokens a step", "slots a request", "ms a step", "same text"),
        row(*["---"] * 6),
    ]
    for cell in record["cells"]:
        for name, arm in cell["arms"].items():
            first = arm["runs"][0]
            if "mean_progress" not in first:
                continue
            progress, slots, step = (first[key] for key in ("mean_progress", "slots_per_request", "step_ms"))
            same = "yes" if arm["same_text"] else "no"
            lines.append(row(cell["concurrency"], name, f"{progress:.2f}", f"{slots:.1f}", f"{step:.1f}", same))
    return "\n".join(lines)


def curve_table(record: dict[str, Any]) -> str:
    """Milliseconds of verification by rows, and of drafting by rows (blocks of W)."""
    rows = [str(point["rows"]) for point in record["curve"]]
    verify = [f"{point['verify_ms']:.1f}" for point in record["curve"]]
    draft = [f"{point['draft_ms']:.1f}" if "draft_ms" in point else "" for point in record["curve"]]
    return "\n".join(
        [row("rows", *rows), row(*["---"] * (len(rows) + 1)), row("verify, ms", *verify), row("draft, ms", *draft)]
    )


if __name__ == "__main__":
    loaded = json.loads(Path(sys.argv[1]).read_text())
    print("\n\n".join([speed_table(loaded), progress_table(loaded), curve_table(loaded)]))
