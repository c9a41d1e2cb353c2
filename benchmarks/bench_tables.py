"""Markdown tables of records of `dscale bench`, which tables.py prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from markdown_tables import NONE, BadRecord, Ratios, Record, bold_best, grid, times

from dscale.evaluate.bench_record import Run, record_of

BENCH = "dscale.bench/1"  # of kind "bench" and schema 1, as the records say it
Load = tuple[float, int, float]  # temperature, concurrency, requests a second of an open loop (0: a closed one)
Cells = dict[Load, dict[str, list[Run]]]  # by load and arm


def bench_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """Tokens/s by load and arm with the ratios asked for, and what server and client did meanwhile."""
    _check_alike(records)
    cells, told = _joined(records)
    names = list(dict.fromkeys(arm["name"] for record in records for arm in record.content["arms"]))
    told += [note for record in records for note in record.content["notes"]]
    return [_title(records), _speeds(cells, names, ratios), _about_runs(cells), *(["\n".join(told)] if told else [])]


def _check_alike(records: Sequence[Record]) -> None:
    for what, kinds in {
        "prompts": [record.content["manifest"]["name"] for record in records],
        "max_tokens": [record.content["manifest"]["max_tokens"] for record in records],
        "machine": [_machine(record) for record in records],
    }.items():
        if len(set(kinds)) > 1:
            told = [f"{record.name} has {kind}" for record, kind in zip(records, kinds, strict=True)]
            raise BadRecord(f"--join: {what} must be the same: {', '.join(told)}")


def _machine(record: Record) -> str:
    machine = record.content["machine"]
    return machine.get("gpu") or machine["processor"]


def _title(records: Sequence[Record]) -> str:
    manifest = records[0].content["manifest"]
    about = f"{_machine(records[0])}, {manifest['name']}, answers of up to {manifest['max_tokens']} tokens"
    simulated = ", simulated acceptance" if any(record.content["simulated"] for record in records) else ""
    return f"{', '.join(record.name for record in records)}: {about}{simulated}"


def _joined(records: Sequence[Record]) -> tuple[Cells, list[str]]:
    """All runs, and a line for each arm measured twice: the first file's is kept."""
    cells: Cells = {}
    twice = []
    for record in records:
        for load, arms in _cells(record).items():
            for name, runs in arms.items():
                if cells.setdefault(load, {}).setdefault(name, runs) is not runs:
                    temperature, c = _label(load)
                    told = f"c = {c}, temperature {temperature}, {name}: {tokens_per_s(runs):.0f}"
                    twice.append(f"{told} in {record.name}, not shown")
    return dict(sorted(cells.items())), twice


def _cells(record: Record) -> Cells:
    """Runs of one record; BadRecord where a request failed."""
    cells: Cells = {}
    for run in record_of(record.content).runs:
        load = (float(record.content["manifest"]["temperature"]), run.concurrency, float(run.rate or 0))
        cells.setdefault(load, {}).setdefault(run.arm, []).append(run)
        if run.failed:
            raise BadRecord(f"{record.name}: {run.arm}: {len(run.failed)} requests failed, so there is no throughput")
    return cells


def _label(load: Load) -> tuple[str, str]:
    temperature, c, rate = load
    return f"{temperature:g}", f"{c}, {rate:g} requests/s" if rate else f"{c}"


def tokens_per_s(runs: Sequence[Run]) -> float:
    """Output tokens over the windows of all runs."""
    return sum(row.output_tokens for run in runs for row in run.rows) / sum(run.window_s for run in runs)


def _speeds(cells: Cells, names: Sequence[str], ratios: Ratios) -> str:
    pairs = [(arm, base) for base in ratios.over if base in names
             for arm in ratios.of or names if arm in names and arm != base]  # fmt: skip
    lines = []
    for load, arms in cells.items():
        rates = {name: tokens_per_s(arms[name]) if name in arms else None for name in names}
        texts = bold_best(list(rates.values()), [NONE if one is None else f"{one:.0f}" for one in rates.values()])
        lines.append([*_label(load), *texts, *[times(rates[arm], rates[base]) for arm, base in pairs]])
    return "tokens/s\n\n" + grid(["temperature", "c", *names, *[f"{arm} over {base}" for arm, base in pairs]], lines)


def _about_runs(cells: Cells) -> str:
    head = ["temperature", "c", "arm", "runs", "requests", "tokens an answer", "requests/s", "first token, s, median",
            "requests in a step", "window, s", "client's share of a core"]  # fmt: skip
    return grid(head, [[*_label(load), name, *_figures(runs)] for load, arms in cells.items()
                       for name, runs in arms.items()])  # fmt: skip


def _figures(runs: Sequence[Run]) -> list[str]:
    rows, window = [row for run in runs for row in run.rows], sum(run.window_s for run in runs)
    firsts = [row.first_token_s - row.sent_s for row in rows if row.first_token_s is not None]
    steps, lanes = (sum(run.counters.get(name, 0) for run in runs) for name in ("steps", "request_steps"))
    per_s = len(rows) / window
    busy = [run.client_busy for run in runs if run.client_busy is not None]
    return [
        str(len(runs)),
        str(len(rows)),
        f"{sum(row.output_tokens for row in rows) / len(rows):.0f}",
        f"{per_s:.0f}" if per_s >= 9.95 else f"{per_s:.1f}",
        f"{statistics.median(firsts):.3f}" if firsts else NONE,
        f"{lanes / steps:.1f}" if steps and lanes else NONE,
        f"{window / len(runs):.1f}",
        f"{statistics.fmean(busy):.2f}" if busy else NONE,
    ]
