"""Markdown tables of docs/results.md from the records in benchmarks/records.

    python benchmarks/tables.py benchmarks/records/cpu_speed.json
    python benchmarks/tables.py benchmarks/records/gpu_throughput_8b.json benchmarks/records/gpu_step_8b.json
    python benchmarks/tables.py benchmarks/records/gpu_http_{off,auto}_greedy.json --join --over off
    python benchmarks/tables.py SGLANG.json OURS.json --join --over dflash+fa3 --of dscale+fa3 --of "ours, auto"

Records are known by their schema: cpu_speed, gpu_throughput, gpu_step, gpu_clocks, gpu_tp, gpu_real (parts c and d),
gpu_attention, sglang_h200, and those of `dscale bench`. Each has tables of its own. With --join, records of one schema
share tables: their models and prompts must be the same, an arm measured twice at one concurrency is shown from the
first file, ratios stay those of each call, and throughput records stand beside SGLang's arms as "ours, ARM". --over and
--of add ratios of medians by arms' names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_tables import BENCH, bench_tables
from gpu_tables import ATTENTION, GPU_TABLES, SGLANG, THROUGHPUT
from markdown_tables import BadRecord, Ratios, Record, row

from dscale.evaluate.record_file import read_json

CPU_SPEED = "dscale.cpu_speed/1"


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


def cpu_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """All tables of records of cpu_speed.py."""
    del ratios
    parts = (speed_table, progress_table, curve_table)
    return [part(record.content) for record in records for part in parts]


TABLES = {CPU_SPEED: cpu_tables, BENCH: bench_tables, **GPU_TABLES}


def read(path: str) -> Record:
    """A record of a known schema; BadRecord where it is none."""
    try:
        content = read_json(Path(path))
    except OSError as problem:
        raise BadRecord(f"{path}: {problem.strerror or problem}; give a record of benchmarks/records") from None
    except ValueError as problem:
        raise BadRecord(f"{path}: not JSON: {str(problem).splitlines()[0]}") from None
    schema = schema_of(content) if isinstance(content, dict) else None
    if schema not in list(TABLES):
        raise BadRecord(f"{path}: schema {schema!r} has no table; known are {', '.join(TABLES)}")
    return Record(Path(path).name, {**content, "schema": schema})


def schema_of(content: dict[str, Any]) -> Any:
    """What a record says it is, in one spelling."""
    if "schema" not in content and {"working_set", "times"} <= content.keys():
        return ATTENTION  # its first records do not say so
    schema = content.get("schema")
    return f"dscale.{content['kind']}/{schema}" if "kind" in content else schema  # of a command of dscale


def grouped(records: Sequence[Record], join: bool) -> list[list[Record]]:
    """Records that share tables."""
    if not join:
        return [[record] for record in records]
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.content["schema"], []).append(record)
    if SGLANG in groups:
        groups[SGLANG] += groups.get(THROUGHPUT, [])
    return list(groups.values())


def shown(group: Sequence[Record], ratios: Ratios) -> list[str]:
    """The tables of a group."""
    schema = group[0].content["schema"]
    try:
        return TABLES[schema](group, ratios)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as problem:
        if isinstance(problem, BadRecord):
            raise
        names = ", ".join(record.name for record in group)
        raise BadRecord(f"{names}: not a whole record of {schema}: {type(problem).__name__} {problem}") from None


def arms_of(group: Sequence[Record]) -> set[str]:
    """Names in the tables of a group that --over and --of may give."""
    names: set[str] = set()
    beside = group[0].content["schema"] == SGLANG
    for content in [record.content for record in group]:
        if content["schema"] in (SGLANG, BENCH):
            names |= {arm["name"] for arm in content["arms"]}
        parts = [content, content.get("c"), content.get("d")]
        arms = {name for part in parts if part for cell in part.get("cells", []) for name in cell.get("arms", ())}
        names |= {f"ours, {name}" for name in arms} if beside else arms
    return names


def check_arms(groups: Sequence[Sequence[Record]], ratios: Ratios) -> None:
    """BadRecord where an arm of --over or --of is nowhere, or no two of them are in one table."""
    if ratios.of and not ratios.over:
        raise BadRecord("--of: say over what with --over ARM")
    known = [arms_of(group) for group in groups] if ratios.over else []
    all_arms = set().union(*known)
    for name in [*ratios.over, *ratios.of]:
        if name not in all_arms:
            raise BadRecord(f"--over, --of: no arm {name!r} here; there are: {'; '.join(sorted(all_arms)) or 'none'}")
    if ratios.of and not any(arms & set(ratios.over) and arms & set(ratios.of) for arms in known):
        raise BadRecord("--over, --of: these arms are in no table together; --join makes one of several records")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", help="JSON files that the benchmarks wrote")
    parser.add_argument("--join", action="store_true", help="one table for all records of a schema")
    parser.add_argument("--over", action="append", default=[], metavar="ARM", help="ratios over this arm; repeatable")
    parser.add_argument("--of", action="append", default=[], metavar="ARM", help="of this arm only; repeatable")
    return parser.parse_args(given)


def tables(args: argparse.Namespace) -> str:
    """Everything to print; BadRecord where something given cannot be used."""
    groups, ratios = grouped([read(path) for path in args.records], args.join), Ratios(args.over, args.of)
    made = [part for group in groups for part in shown(group, ratios)]
    check_arms(groups, ratios)
    return "\n\n".join(made)


def main(given: Sequence[str] | None = None) -> int:
    """Print the tables; 2 after one line about what cannot be shown."""
    try:
        print(tables(arguments(given)))
    except BadRecord as problem:
        print(f"tables.py: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
