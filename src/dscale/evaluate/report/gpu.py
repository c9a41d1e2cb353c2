"""Sections of the GPU benchmarks: throughput with its ablation, and the time of a step with its breakdown."""

from __future__ import annotations

from typing import Any

from dscale.evaluate.report.blocks import Block, Figure, Listing, Section, Table, Text, number, percent
from dscale.evaluate.report.figures import Line, at_concurrencies, draw_bars, draw_lines, panel

Record = dict[str, Any]
ABLATION = {  # arms of benchmarks/gpu_throughput.py by what they have
    "control": "wide tiles, whole blocks, no graphs",
    "tiles": "path-aware tiles, whole blocks, no graphs",
    "tiles-dvl": "path-aware tiles, 8 rows a request, no graphs",
    "full+wide": "wide tiles, whole blocks, captured steps",
    "full": "path-aware tiles, whole blocks, captured steps",
    "dvl": "path-aware tiles, 8 rows a request, captured steps",
    "dvl@8": "path-aware tiles, 8 rows a request, captured steps",
    "auto": "path-aware tiles, rows chosen by the engine, captured steps",
}


def throughput(key: str, name: str, record: Record) -> list[Section]:
    """Throughput by concurrency, and the ablation where its arms were run."""
    cells = [cell for cell in record["cells"] if any("tokens_per_s" in arm for arm in cell["arms"].values())]
    cells.sort(key=lambda cell: cell["concurrency"])
    names = list(dict.fromkeys(arm for cell in cells for arm in cell["arms"]))
    levels = [cell["concurrency"] for cell in cells]
    simulated = "simulated" in record.get("note", "")
    lines = [_line(arm, place, cells, "tokens_per_s") for place, arm in enumerate(names)]
    gains = [line for place, arm in enumerate(names) if (line := _gain(arm, place, cells)).x]
    axis = "requests at a time"
    panels = [panel(at_concurrencies(draw_lines(lines, zero=True), levels), "Throughput", axis, "tokens/s", simulated)]
    if gains:
        drawn = at_concurrencies(draw_lines(gains, bars=True), levels, even=True)
        panels.append(panel(drawn, "Gain over the base arm", axis, "%", simulated))
    figure = Figure(
        f"Throughput of {record['model']} on {record['device']}",
        "Tokens per second in steady state and gain over the base arm, paired by repetition, 95% intervals.",
        tuple(panels), tuple((arm, place) for place, arm in enumerate(names)), _table(cells, names),
        simulated=simulated,
    )  # fmt: skip
    blocks: list[Block] = [Text(_about(record)), figure, *_ablation(cells, simulated)]
    skipped = tuple(line for cell in record["cells"] for line in _skipped(cell))
    blocks += [Text("Not run:"), Listing(skipped)] if skipped else []
    return [Section(f"{key}gpu", "GPU throughput", tuple(blocks), name)]


def _skipped(cell: Record) -> list[str]:
    """What was not run at a concurrency, runs with one reason together."""
    reasons: dict[str, list[str]] = {}
    for line in cell.get("skipped", ()):
        what, _, reason = line.partition(": ")
        reasons.setdefault(reason, []).append(what)
    return [f"c = {cell['concurrency']}, {reason}: {'; '.join(runs)}" for reason, runs in reasons.items()]


def _about(record: Record) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    made = record["acceptance"]
    told = ", ".join(f"{key} {value}" for key, value in made.items()) if isinstance(made, dict) else str(made)
    return f"{record['model']}, {record['dtype']}, on {record['device']}. Acceptance: {told}. Versions: {versions}."


def _line(arm: str, place: int, cells: list[Record], what: str) -> Line:
    own = [(cell["concurrency"], cell["arms"][arm][what]) for cell in cells if what in cell["arms"].get(arm, {})]
    return Line(arm, [one for one, _ in own], [value for _, value in own], place)


def _gain(arm: str, place: int, cells: list[Record]) -> Line:
    own = [(cell["concurrency"], cell["arms"][arm]) for cell in cells if cell["arms"].get(arm, {}).get("interval")]
    own = [(level, one) for level, one in own if one["base"] != arm]
    spans = [[100 * (v - 1) for v in (one["ratio"], *one["interval"])] for _, one in own]
    middle, low, high = zip(*spans, strict=True) if spans else ((), (), ())
    return Line(arm, [level for level, _ in own], middle, place, low, high)


def _table(cells: list[Record], names: list[str]) -> Table:
    rows = []
    for cell in cells:
        for arm in names:
            one = cell["arms"].get(arm, {})
            if "tokens_per_s" in one:
                rows.append((arm, str(cell["concurrency"]), number(one["tokens_per_s"], 0), ratio_text(one, arm)))
    return Table("Tokens per second", ("arm", "c", "median tokens/s", "against the base arm, 95%"), tuple(rows))


def ratio_text(arm: Record, name: str) -> str:
    """A ratio to the base arm with its interval, in words where it spans one."""
    if "ratio" not in arm or arm["base"] == name:
        return "base" if arm.get("base") == name else "–"
    if not arm["interval"]:
        return f"{arm['ratio']:.2f}× (one repetition, no interval)"
    low, high = arm["interval"]
    span = f"({low:.2f} … {high:.2f})"
    return f"no difference shown {span}" if low <= 1 <= high else f"{arm['ratio']:.2f}× {span}"


def _ablation(cells: list[Record], simulated: bool) -> list[Block]:
    """Bars of arms that differ by one thing or two; nothing unless the control and two more were run."""
    present = [arm for arm in ABLATION if any("ratio" in cell["arms"].get(arm, {}) for cell in cells)]
    if "control" not in present or len(present) < 3:
        return []
    groups = [f"c = {cell['concurrency']}" for cell in cells]
    series = [
        (place, [cell["arms"].get(arm, {}).get("ratio", float("nan")) for cell in cells])
        for place, arm in enumerate(present)
    ]
    rows = [(arm, ABLATION[arm], *(ratio_text(cell["arms"].get(arm, {}), arm) for cell in cells)) for arm in present]
    table = Table("Ablation: ratio to the control", ("arm", "what it has", *groups), tuple(rows))
    told = "Median ratios; what each arm has: " + ", ".join(f"{arm} ({ABLATION[arm]})" for arm in present)
    panels = (panel(draw_bars(groups, series), "Ratio to the control", "", "times", simulated),)
    legend = tuple((arm, place) for place, arm in enumerate(present))
    return [Figure("Ablation", f"{told}.", panels, legend, table, simulated=simulated)]


def step(key: str, name: str, record: Record) -> list[Section]:
    """Time of a step beside its floor, and what it is spent on."""
    rows, simulated = record["rows"], "simulated" in record.get("note", "")
    groups = list(dict.fromkeys(group for row in rows for group in row["groups_ms"]))
    labels = [f"{row['name']}, c = {row['concurrency']}" for row in rows]
    series = [(place, [row["groups_ms"].get(group, 0.0) for row in rows]) for place, group in enumerate(groups)]
    drawn = draw_bars(labels, series, stacked=True)
    share = max((row["decide_share"] for row in rows), default=0.0)
    figure = Figure(
        f"What a step of {record['model']} is spent on",
        f"Milliseconds of the device by group of kernels. Prediction, allocation and packing take at most {share:.1%}.",
        (panel(drawn, "Breakdown of a step", "milliseconds", "", simulated),),
        tuple((group, place) for place, group in enumerate(groups)),
        Table("Milliseconds a step by group", ("step", *groups),
              tuple((label, *(f"{row['groups_ms'].get(g, 0.0):.3f}" for g in groups))
                    for label, row in zip(labels, rows, strict=True))),
        simulated=simulated,
    )  # fmt: skip
    blocks: list[Block] = [Text(_about(record)), figure, _floors(rows)]
    blocks += [Text("Not run:"), Listing(tuple(record["skipped"]))] if record.get("skipped") else []
    return [Section(f"{key}step", "Step breakdown", tuple(blocks), name)]


def _floors(rows: list[Record]) -> Table:
    made = [
        (row["name"], str(row["concurrency"]), number(row["rows"], 0), number(row["interval_ms"]),
         number(row["device_ms"]), number(row["floor_ms"]), f"{row['times_floor']:.2f}×", percent(row["decide_share"]),
         percent(row["idle_share"]))
        for row in rows
    ]  # fmt: skip
    columns = ("arm", "c", "rows", "interval, ms", "device, ms", "floor, ms", "interval / floor", "decide", "idle")
    note = "Floor: bytes over copy bandwidth or FLOPs over the rate of products, both measured in the same run."
    return Table("Steps beside their roofline", columns, tuple(made), note)
