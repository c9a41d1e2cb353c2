"""Markdown tables of GPU records of closed loops, which tables.py prints. A record joined with others keeps its own
ratios: they are of arms that took turns in one call, and cards and calls differ by a few percent."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_step_tables import attention_tables, clock_tables, step_tables
from markdown_tables import NONE, BadRecord, Ratios, Record, bold_best, grid, times, title
from paired_ratios import interval, paired

THROUGHPUT, STEP, SGLANG = "dscale.gpu_throughput/1", "dscale.gpu_step/1", "dscale.sglang_h200/1"
CLOCKS = "dscale.gpu_clocks/1"
REAL, TENSOR_PARALLEL, ATTENTION = "dscale.gpu_real/1", "dscale.gpu_tp/1", "dscale.gpu_attention/1"


@dataclass
class Line:
    """An arm of a table with a column a concurrency. cells: {c: (tokens/s, ms from step to step or None)}."""

    name: str
    cells: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    prompt_steps: dict[int, str] = field(default_factory=dict)
    graphs: str = NONE


def rate(arm: dict[str, Any] | None) -> float | None:
    """Median tokens per second of an arm, None where no run of it exists."""
    return (arm or {}).get("tokens_per_s")


def names_of(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Arms of the cells in order of appearance."""
    return list(dict.fromkeys(name for cell in cells for name in cell["arms"]))


def speeds(cells: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Tokens/s by concurrency and arm, the ratio to the base arm with its interval, geometric means of the ratios."""
    bases = {arm["base"] for cell in cells for arm in cell["arms"].values() if "base" in arm}
    shown = bases if len(bases) == 1 else set()  # ratios to different arms do not belong in one table
    lines = [[cell["concurrency"], *_speed_row(cell, names, shown), _runs(cell)] for cell in cells]
    if shown:
        lines.append(["geometric mean", *[_mean(cells, name) for name in names], ""])
    about = f"; ratio to {next(iter(shown))} with its 95% interval" if shown else ""
    about = f"; no ratios, for they are to different arms: {', '.join(sorted(bases))}" if len(bases) > 1 else about
    return f"tokens/s{about}\n\n" + grid(["c", *names, "runs"], lines)


def _speed_row(cell: dict[str, Any], names: Sequence[str], bases: set[str]) -> list[str]:
    arms = [cell["arms"].get(name, {}) for name in names]
    rates = [rate(arm) for arm in arms]
    texts = bold_best(rates, [NONE if value is None else f"{value:.0f}" for value in rates])
    for at, (name, arm) in enumerate(zip(names, arms, strict=True)):
        if "ratio" in arm and name not in bases and bases:
            texts[at] += f" · {arm['ratio']:.2f}×"
            if arm.get("interval"):
                texts[at] += f" ({arm['interval'][0]:.2f}…{arm['interval'][1]:.2f})"
    return texts


def _runs(cell: dict[str, Any]) -> str:
    counts = sorted({len(arm["runs"]) for arm in cell["arms"].values()})
    return "–".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else "0"


def _mean(cells: Sequence[dict[str, Any]], name: str) -> str:
    ratios = [cell["arms"][name]["ratio"] for cell in cells if "ratio" in cell["arms"].get(name, {})]
    if not ratios:
        return NONE
    of = "" if len(ratios) == len(cells) else f" ({len(ratios)} of {len(cells)})"
    return f"{statistics.geometric_mean(ratios):.2f}×{of}"


def fixed_rates(arms: dict[str, Any], flags: str = "") -> dict[str, float]:
    """Tokens/s of the arms that auto is held against, where they ran: whole blocks and 8 slots, with these flags."""
    names = (f"full{flags}", f"dvl@8{flags}", f"dvl{flags}")
    return {name: value for name in names if (value := rate(arms.get(name))) is not None}


def best_fixed(arms: dict[str, Any], flags: str = "") -> str | None:
    """The fastest of those arms; None where none ran."""
    known = fixed_rates(arms, flags)
    return max(known, key=lambda name: known[name]) if known else None


def auto_over_best(cells: Sequence[dict[str, Any]]) -> list[str]:
    """auto over the better of full and dvl@8 of the same call; other budgets do not count."""
    lines = []
    for cell in cells:
        for name in [name for name in cell["arms"] if name.partition("+")[0] == "auto"]:
            auto = cell["arms"][name]
            call = {other: arm for other, arm in cell["arms"].items() if arm.get("call") == auto.get("call")}
            flags, value = name.removeprefix("auto"), rate(auto)
            known, best = fixed_rates(call, flags), best_fixed(call, flags)
            if value is None or best is None:
                continue
            alone = "" if len(known) > 1 else ", alone"
            lines.append((cell["concurrency"], name, f"{value:.0f}", f"{known[best]:.0f} ({best}{alone})",
                          f"{value / known[best]:.3f}", _pairs(paired(auto, call[best]))))  # fmt: skip
    head = ["c", "arm", "tokens/s", "best of full, dvl@8", "auto over best", "median of pairs (95% interval)"]
    return [grid(head, lines)] if lines else []


def _pairs(ratios: Sequence[float]) -> str:
    if not ratios:
        return NONE
    bounds = interval(ratios)
    return f"{statistics.median(ratios):.3f}" + (f" ({bounds[0]:.3f}…{bounds[1]:.3f})" if bounds else "")


def budget_curves(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Tokens/s by budget, the best in bold; arms with other flags (fp8, wide) have a table of their own."""
    curves: dict[str, dict[float, str]] = {}
    for name in names_of(cells):
        if found := re.fullmatch(r"dvl(?:@([\d.]+))?((?:\+\w+)*)", name):
            curves.setdefault(found[2], {})[float(found[1] or 8)] = name
    tables = []
    for curve in curves.values():
        names = [curve[slots] for slots in sorted(curve)]
        rows = [(cell["concurrency"], [rate(cell["arms"].get(name)) for name in names]) for cell in cells]
        lines = [[c, *bold_best(rates, [NONE if one is None else f"{one:.0f}" for one in rates])] for c, rates in rows]
        if len(names) > 1:
            tables.append(grid(["c, tokens/s", *names], lines))
    return tables


def cell_tables(cells: Sequence[dict[str, Any]]) -> list[str]:
    """All tables of cells of a closed loop, and a line where runs were left out."""
    names = names_of(cells)
    cells = sorted(cells, key=lambda cell: cell["concurrency"])
    left = [f"c = {cell['concurrency']}: {len(cell['skipped'])} left out, the first: {cell['skipped'][0]}"
            for cell in cells if cell.get("skipped")]  # fmt: skip
    return [speeds(cells, names), *auto_over_best(cells), *budget_curves(cells), *(["\n".join(left)] if left else [])]


def joined(records: Sequence[Record]) -> tuple[list[dict[str, Any]], list[str]]:
    """Cells of all records, one a concurrency, and a line for each arm measured twice: the first file's is kept."""
    for key in ("model", "device", "dtype", "acceptance", "prompt_tokens", "output_tokens"):
        kinds = [one.content.get(key, one.content["arguments"].get(key)) for one in records]
        if any(kind != kinds[0] for kind in kinds):
            told = [f"{one.name} has {kind}" for one, kind in zip(records, kinds, strict=True)]
            raise BadRecord(f"--join: {key} must be the same: {', '.join(told)}")
    cells: dict[int, dict[str, Any]] = {}
    twice = []
    for call, record in enumerate(records):
        for cell in record.content["cells"]:
            kept = cells.setdefault(cell["concurrency"], {**cell, "arms": {}, "skipped": []})
            kept["skipped"] += cell.get("skipped", [])
            for name, arm in cell["arms"].items():
                known, value = rate(kept["arms"].get(name)), rate(arm)
                if known is None:
                    kept["arms"][name] = {**arm, "call": call}
                elif value is not None:
                    twice.append(f"c = {cell['concurrency']}, {name}: {value:.0f} in {record.name}, not shown")
    return list(cells.values()), twice


def throughput_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """gpu_throughput.py: tokens/s, auto over best, budget curves, and the ratios asked for."""
    cells, twice = joined(records)
    lines = engine_lines(cells)
    return [title(records), *cell_tables(cells), *ratio_table(lines, ratios), *(["\n".join(twice)] if twice else [])]


def tensor_parallel_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """gpu_tp.py: what throughput records have, texts against one process, and more GPUs over fewer where joined."""
    made, by_ranks = [], {}
    for ranks in sorted({record.content["ranks"] for record in records}):
        some = [record for record in records if record.content["ranks"] == ranks]
        cells, twice = joined(some)
        by_ranks[ranks] = {cell["concurrency"]: cell["arms"] for cell in cells}
        made += [title(some, f"ranks: {ranks}"), *(cell_tables(cells) if cells else [])]
        made += [*ratio_table(engine_lines(cells), ratios), *(["\n".join(twice)] if twice else [])]
        texts = [_texts(one) for record in some for one in record.content["correctness"]]
        head = ["model", "policy", "sampling", "texts that differ", "first difference", "steps compared by ranks"]
        made += [grid(head, texts)] if texts else []
    least, *others = by_ranks
    for ranks in others:
        names = list(dict.fromkeys(name for arms in by_ranks[least].values() for name in arms))
        lines = [[c, *[times(rate(by_ranks[ranks].get(c, {}).get(name)), rate(arms.get(name))) for name in names]]
                 for c, arms in sorted(by_ranks[least].items())]  # fmt: skip
        made.append(f"{ranks} ranks over {least}\n\n" + grid(["c", *names], lines))
    return made


def _texts(one: dict[str, Any]) -> list[object]:
    told = [one["model"], one["policy"], one["sampling"]]
    if "failed" in one:
        return [*told, "failed: " + one["failed"], NONE, NONE]
    at = one.get("first_difference")
    where = NONE if at is None else f"text {at[0]}, token {at[1]}"
    return [*told, f"{one['different']} of {one['texts']}", where, one["steps_compared"]]


def real_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """gpu_real.py: part c with the cost of the deterministic mode, part d by temperature."""
    made = []
    for record in records:
        for part in [one for one in ("c", "d") if one in record.content]:
            content = record.content[part]
            for kind in sorted({cell["temperature"] for cell in content["cells"]}):
                cells = [cell for cell in content["cells"] if cell["temperature"] == kind]
                made += [title([record], f"part {part}, temperature {kind:g}"), *cell_tables(cells)]
                made += ratio_table(engine_lines(cells), ratios)
            if content.get("cost"):
                counts = sorted({c for costs in content["cost"].values() for c in costs}, key=int)
                lines = [[name, *[f"{costs[c]:.2f}×" if c in costs else NONE for c in counts]]
                         for name, costs in content["cost"].items()]  # fmt: skip
                head = ["deterministic over ordinary", *[f"c = {c}" for c in counts]]
                made.append(grid(head, lines))
    return made or [f"{records[0].name}: no part c or d"]


def engine_lines(cells: Sequence[dict[str, Any]], prefix: str = "") -> list[Line]:
    """Arms of throughput records as lines beside other engines."""
    lines = {name: Line(prefix + name) for name in names_of(cells)}
    for cell in sorted(cells, key=lambda cell: cell["concurrency"]):
        for name, arm in cell["arms"].items():
            plain = [run["interval_ms"] for run in arm["runs"] if run.get("interval_ms") is not None]
            if "tokens_per_s" in arm:
                interval = statistics.median(plain) if plain else None
                lines[name].cells[cell["concurrency"]] = (arm["tokens_per_s"], interval)
            if arm.get("graphs"):
                lines[name].graphs = f"{arm['graphs']['memory'] / 2**30:.2f}"
    return list(lines.values())


def sglang_line(arm: dict[str, Any]) -> Line:
    """Medians over repetitions of an arm of sglang_h200.py."""
    line = Line(arm["name"])
    runs: dict[int, list[dict[str, Any]]] = {}
    for cell in arm.get("cells", []):
        if "tokens_per_s" in cell:
            runs.setdefault(cell["concurrency"], []).append(cell)
    for c, some in sorted(runs.items()):
        plain = [one["interval_ms"] for one in some if one["interval_ms"] is not None]
        interval = statistics.median(plain) if plain else None
        line.cells[c] = (statistics.median(one["tokens_per_s"] for one in some), interval)
        line.prompt_steps[c] = "/".join(str(one["prefill_steps"]) for one in some)
    if (arm.get("memory") or {}).get("graph") is not None:
        line.graphs = f"{arm['memory']['graph']:.2f}"
    return line


def sglang_tables(records: Sequence[Record], ratios: Ratios) -> list[str]:
    """sglang_h200.py: arms by concurrency, with the arms of our engine where its records are joined."""
    lines: dict[str, Line] = {}
    told = []
    for record in [one for one in records if one.content["schema"] == SGLANG]:
        for arm in record.content["arms"]:
            line = sglang_line(arm)
            kept = lines.setdefault(line.name, line)
            if kept is not line:
                told += [f"{line.name}, c = {c} of {record.name}: not shown" for c in line.cells if c in kept.cells]
                kept.cells, kept.prompt_steps = line.cells | kept.cells, line.prompt_steps | kept.prompt_steps
            problems = [arm["problem"]] if "problem" in arm else []
            problems += [
                f"c = {one['concurrency']}: {one['problem']}" for one in arm.get("cells", []) if "problem" in one
            ]
            told += [f"{line.name}: {one if isinstance(one, str) else one[-1]}" for one in problems]
        told += [f"{pair}: {tokens} tokens" for pair, tokens in record.content.get("agreement", {}).items()]
    ours = [record for record in records if record.content["schema"] == THROUGHPUT]
    if ours:
        lines |= {line.name: line for line in engine_lines(joined(ours)[0], "ours, ")}
    shown = list(lines.values())
    made = [title(records), _beside(shown), *ratio_table(shown, ratios)]
    return [*made, *(["\n".join(told)] if told else [])]


def _levels(lines: Sequence[Line]) -> list[int]:
    return sorted({c for line in lines for c in line.cells})


def _beside(lines: Sequence[Line]) -> str:
    counts, columns = _levels(lines), []
    for c in counts:
        pairs = [line.cells.get(c) for line in lines]
        rates = [None if pair is None else pair[0] for pair in pairs]
        texts = bold_best(rates, [NONE if one is None else f"{one:.0f}" for one in rates])
        columns.append([text + _interval(pair) for text, pair in zip(texts, pairs, strict=True)])
    head = ["tokens/s (ms from step to step)", *[f"c = {c}" for c in counts], "prompt steps", "graphs, GiB"]
    rows = [[line.name, *[column[at] for column in columns], prompt_steps(line, counts), line.graphs]
            for at, line in enumerate(lines)]  # fmt: skip
    return grid(head, rows)


def prompt_steps(line: Line, counts: Sequence[int]) -> str:
    """Prompt steps in the window of each concurrency; repetitions by slashes."""
    return ", ".join(line.prompt_steps.get(c, NONE) for c in counts) if line.prompt_steps else NONE


def _interval(pair: tuple[float, float | None] | None) -> str:
    if pair is None or pair[1] is None:
        return ""
    return f" ({pair[1]:.2f})" if pair[1] < 9.995 else f" ({pair[1]:.1f})"


def ratio_table(lines: Sequence[Line], ratios: Ratios) -> list[str]:
    """Tokens/s of the chosen arms over others, by concurrency; nothing where the table has not these arms."""
    known, counts = {line.name: line for line in lines}, _levels(lines)
    rows = []
    for base in [known[name] for name in ratios.over if name in known]:
        for arm in [known[name] for name in (ratios.of or known) if name in known and name != base.name]:
            pairs = [(arm.cells.get(c, (None,))[0], base.cells.get(c, (None,))[0]) for c in counts]
            rows.append([f"{arm.name} over {base.name}", *[times(*pair) for pair in pairs]])
    return [grid(["ratio of medians", *[f"c = {c}" for c in counts]], rows)] if rows else []


GPU_TABLES: dict[str, Callable[[Sequence[Record], Ratios], list[str]]] = {
    THROUGHPUT: throughput_tables,
    STEP: step_tables,
    CLOCKS: clock_tables,
    SGLANG: sglang_tables,
    REAL: real_tables,
    TENSOR_PARALLEL: tensor_parallel_tables,
    ATTENTION: attention_tables,
}
