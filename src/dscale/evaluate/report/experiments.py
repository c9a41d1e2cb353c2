"""Sections of the figure experiments (kind "figures", benchmarks/cpu_figures.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dscale.evaluate.policy_record import ALL
from dscale.evaluate.report.blocks import Block, Figure, Section, Table, Text, number, percent, spanned
from dscale.evaluate.report.figures import Line, at_whole, draw_lines, draw_signal, draw_steps, panel

Record = dict[str, Any]
SIGNALS = {
    "mean_gap": "mean gap of the best two logits",
    "mean_entropy": "mean entropy (nats)",
    "expected": "predicted accepted drafts",
}
ARMS = {"fixed": "fixed width", "seeded": "seeded allocation", "exact": "exact allocation", "oracle": "oracle"}
RAW = "raw windows k⁰"
RAW_STYLE = 6  # a cross in the colour of none of the lines
BINS = 8  # of equal counts, for the trend of a signal


def sections(key: str, name: str, record: Record) -> list[Section]:
    """All parts that the record has."""
    made: list[tuple[str, str, list[Block]]] = []
    made += [(f"{key}progress", "Progress", [progress(record)])] if "progress" in record else []
    if "widths" in record:
        made.append((f"{key}widths", "Progress by width", [widths(record)]))
    if "signals" in record:
        made.append((f"{key}signals", "Signals against acceptance", [signals(record)]))
    if "retention" in record:
        made.append((f"{key}retention", "Retention before and after allocation", list(retention(record))))
    if made:
        made[0][2].append(Text(about(record)))
    return [Section(one, title, tuple(blocks), name) for one, title, blocks in made]


def about(record: Record) -> str:
    """What was run."""
    sets = ", ".join(f"{one['name']} {one['prompts']}" for one in record["workloads"])
    left = (
        f"{record['recorded']} steps of policy full, {record['cut']} left out because the answer ended inside a block"
    )
    return (
        f"{record['model']}, {record['dtype']}, greedy, at most {record['max_tokens']} tokens; prompts: {sets}; {left}."
    )


def names_of(record: Record) -> list[str]:
    """The workloads in order."""
    return [one["name"] for one in record["workloads"]]


def progress(record: Record) -> Figure:
    """Distribution of tokens a step by workload."""
    scopes = {name: record["progress"][name] for name in [*names_of(record), ALL]}
    shares = {name: [100 * n / one["steps"] for n in one["counts"]] for name, one in scopes.items()}
    width = record["width"]
    drawn = draw_steps([(number_of, values) for number_of, values in enumerate(shares.values())])
    rows = [
        (name, number(scopes[name]["mean"]), str(scopes[name]["steps"]), *_padded(values, width))
        for name, values in shares.items()
    ]
    told = ", ".join(f"{name} {one['mean']:.2f}" for name, one in scopes.items())
    whole = scopes[ALL]["counts"]
    tail = whole[width - 1] / scopes[ALL]["steps"] if len(whole) >= width else 0.0
    return Figure(
        "Distribution of tokens a step",
        f"Tokens that a step of whole blocks gives. Means: {told}. {percent(tail)} of all steps give all {width}.",
        (panel(drawn, "Tokens a step", "tokens", "% of steps", record["simulated"]),),
        tuple((name, place) for place, name in enumerate(scopes)),
        Table("% of steps by tokens", ("workload", "mean", "steps", *map(str, range(1, width + 1))), tuple(rows)),
        simulated=record["simulated"],
    )


def _padded(values: list[float], width: int) -> list[str]:
    return [f"{one:.1f}" for one in values] + ["0.0"] * (width - len(values))


def widths(record: Record) -> Figure:
    """Tokens a step at fixed widths, served anew at each."""
    names, policies = names_of(record), record["widths"]["policies"]
    at = sorted(map(int, policies))
    means = {name: [_mean(policies[str(w)], place) for w in at] for place, name in enumerate(names)}
    means[ALL] = [_mean(policies[str(w)], None) for w in at]
    lines = [Line(name, at, values, place) for place, (name, values) in enumerate(means.items())]
    rows = [(str(w), *(number(values[i]) for values in means.values())) for i, w in enumerate(at)]
    gain = means[ALL][-1] / means[ALL][0] - 1
    return Figure(
        "Tokens a step by fixed width",
        f"Every prompt served again at each width, the anchor included; width {at[-1]} gives {gain:.0%} more tokens a "
        f"step than width {at[0]}. It does not depend on how many requests run side by side.",
        (panel(at_whole(draw_lines(lines)), "Progress by width", "width", "tokens a step", record["simulated"]),),
        tuple((line.label, line.style) for line in lines),
        Table("Tokens a step by width", ("width", *means), tuple(rows)),
        simulated=record["simulated"],
    )


def _mean(rows: list[list[int]], workload: int | None) -> float:
    own = [row for row in rows if workload is None or row[0] == workload]
    return sum(row[2] for row in own) / sum(row[3] for row in own)


def signals(record: Record) -> Figure:
    """What was known before verification against the drafts that were then accepted."""
    columns = dict(zip(record["steps"]["fields"], np.array(record["steps"]["rows"], float).T, strict=True))
    names, panels = names_of(record), []
    for signal, label in SIGNALS.items():
        x, y = columns[signal], columns["accepted"]
        trends = [trend(name, x, y, columns["workload"] == place, place) for place, name in enumerate(names)]
        rho = record["signals"][ALL][signal][0]
        drawn = draw_signal(x, y, trends)
        panels.append(panel(drawn, f"{label}: ρ = {rho:.2f}", label, "accepted drafts", record["simulated"]))
    rows = [(scope, *(spanned(record["signals"][scope][signal]) for signal in SIGNALS)) for scope in [*names, ALL]]
    told = ", ".join(f"{label} {record['signals'][ALL][signal][0]:.2f}" for signal, label in SIGNALS.items())
    return Figure(
        "Signals against accepted drafts",
        f"Spearman's rank correlation with the accepted length over all steps: {told}. Dots: some of the steps; lines: "
        f"means of {BINS} bins with equally many steps.",
        tuple(panels),
        tuple((name, place) for place, name in enumerate(names)),
        Table("Spearman with 95% intervals over prompts", ("workload", *SIGNALS.values()), tuple(rows)),
        simulated=record["simulated"],
    )


def trend(name: str, x: np.ndarray, y: np.ndarray, inside: np.ndarray, style: int) -> Line:
    """Means over bins of a signal that hold equally many steps."""
    order = np.flatnonzero(inside)[np.argsort(x[inside], kind="stable")]
    bins = [part for part in np.array_split(order, BINS) if len(part)]
    return Line(name, [float(x[part].mean()) for part in bins], [float(y[part].mean()) for part in bins], style)


def retention(record: Record) -> list[Block]:
    """Drafts kept by rows verified: a figure over all lanes, and the table at the budget that raw windows use."""
    lanes = list(dict.fromkeys(arm["lanes"] for arm in record["retention"]))
    panels, rows = [], []
    for count in lanes:
        own = [arm for arm in record["retention"] if arm["lanes"] == count]
        raw = next(arm for arm in own if arm["arm"] == "raw")
        panels.append(panel(_retained(own, raw), f"{count} requests share a budget", "rows verified a request",
                            "% of accepted drafts kept", record["simulated"]))  # fmt: skip
        rows.append((str(count), number(raw["used"]), _kept(raw), *["–"] * len(ARMS)))
        rows += [_kept_row(count, slots, own) for slots in _budgets(own, record["width"])]
    places = {name: place for place, name in enumerate(ARMS)}
    figure = Figure(
        "Accepted drafts kept by rows verified",
        "Share of the drafts accepted in whole blocks that survives when fewer rows are verified: Σ min(y, k−1) / Σ y. "
        f"The {RAW} are where the predictor alone would stop, before requests share a budget.",
        tuple(panels),
        (*((label, places[arm]) for arm, label in ARMS.items()), (RAW, RAW_STYLE)),
        Table(
            "Accepted drafts kept, 95% intervals over prompts", ("requests", "rows", RAW, *ARMS.values()), tuple(rows)
        ),
        simulated=record["simulated"],
    )
    return [figure, by_workload(record)]


def _retained(own: list[Record], raw: Record) -> Any:
    lines = []
    for place, arm in enumerate(ARMS):
        swept = sorted((one for one in own if one["arm"] == arm), key=lambda one: one["used"])
        middle, low, high = ([100 * one["figures"][ALL][part] for one in swept] for part in range(3))
        lines.append(Line(arm, [one["used"] for one in swept], middle, place, low, high))
    kept = [[100 * one] for one in raw["figures"][ALL]]
    lines.append(Line("raw", [raw["used"]], kept[0], RAW_STYLE, kept[1], kept[2]))
    return draw_lines(lines)


def _budgets(own: list[Record], width: int) -> list[int]:
    known = {one["slots"] for one in own if one["slots"] is not None}
    return sorted({3, 4, 6, 8, 12, width} & known)


def _kept_row(lanes: int, slots: int, own: list[Record]) -> tuple[str, ...]:
    arms = {one["arm"]: one for one in own if one["slots"] == slots}
    return (str(lanes), str(slots), "–", *(_kept(arms[arm]) for arm in ARMS))


def _kept(arm: Record, scope: str = ALL) -> str:
    return spanned(arm["figures"][scope], 1, 100, "%")


def by_workload(record: Record) -> Table:
    """Raw windows, and allocation and a fixed width of eight rows (or the whole block), by workload."""
    rows, slots = [], min(8, record["width"])
    for lanes in dict.fromkeys(arm["lanes"] for arm in record["retention"]):
        own = {(a["arm"], a["slots"]): a for a in record["retention"] if a["lanes"] == lanes}
        shown = [("raw", None), ("exact", slots), ("fixed", slots), ("oracle", slots)]
        for scope in [*names_of(record), ALL]:
            rows.append((scope, str(lanes), *(_kept(own[cell], scope) for cell in shown)))
    columns = ("workload", "requests", RAW, f"exact, {slots} rows", f"fixed width {slots}", f"oracle, {slots} rows")
    return Table("Accepted drafts kept by workload, before and after allocation", columns, tuple(rows))
