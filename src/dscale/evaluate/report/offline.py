"""Sections of the offline evaluations: `dscale evaluate policies` and `dscale evaluate drafter`."""

from __future__ import annotations

from typing import Any

from dscale.evaluate.policy_record import ALL, change
from dscale.evaluate.report.blocks import Block, Figure, Listing, Section, Table, number, spanned
from dscale.evaluate.report.figures import Line, draw_lines, panel

Record = dict[str, Any]
WAYS = ("uniform", "re-anchored", "served")
VALUES = {
    "retention": ("Drafts kept", "% of accepted drafts", 100.0),
    "progress": ("Tokens a step", "tokens", 1.0),
    "tokens_per_s": ("Modelled speed", "tokens/s", 1.0),
}


def policies(key: str, name: str, record: Record) -> list[Section]:
    """Every policy on the same traces: kept, progress and modelled speed by rows verified."""
    blocks: list[Block] = []
    for lanes, one in record["concurrency"].items():
        blocks += [_policies_figure(lanes, one["arms"]), _fastest_table(lanes, one["arms"])]
    blocks.append(Listing(tuple(record["limits"])))
    return [Section(f"{key}policies", "Policies on the same traces", tuple(blocks), name)]


def family(arm: Record) -> str:
    """Fixed widths, off and full are one line."""
    fixed = arm["policy"] in ("off", "full") or arm["policy"].startswith("fixed:")
    return "fixed width" if fixed else arm["policy"]


def _policies_figure(lanes: str, arms: list[Record]) -> Figure:
    names = list(dict.fromkeys(map(family, arms)))
    panels = []
    for value, (title, y, scale) in VALUES.items():
        lines = [_line(name, place, arms, value, scale) for place, name in enumerate(names)]
        panels.append(panel(draw_lines(lines), f"{title}, {lanes} requests", "rows verified a request", y))
    full = next(arm for arm in arms if arm["policy"] == "full")
    own = full["figures"][ALL]
    return Figure(
        f"Policies with {lanes} requests side by side",
        f"By rows verified a request. Whole blocks: {own['progress'][0]:.2f} tokens a step, "
        f"{own['tokens_per_s'][0]:.0f} modelled tokens/s.",
        tuple(panels),
        tuple((name, place) for place, name in enumerate(names)),
    )


def _line(name: str, place: int, arms: list[Record], value: str, scale: float) -> Line:
    own = sorted((arm for arm in arms if family(arm) == name), key=lambda arm: arm["figures"][ALL]["slots"][0])
    at = [arm["figures"][ALL]["slots"][0] for arm in own]
    middle, low, high = ([scale * arm["figures"][ALL][value][part] for arm in own] for part in range(3))
    return Line(name, at, middle, place, low, high)


def _fastest_table(lanes: str, arms: list[Record]) -> Table:
    best: dict[str, Record] = {}
    for arm in arms:
        name = arm["policy"].partition(":")[0]
        if name not in best or _speed(arm) > _speed(best[name]):
            best[name] = arm
    rows = []
    for arm in sorted(best.values(), key=_speed, reverse=True):
        figures = arm["figures"][ALL]
        cells = [number(figures["slots"][0]), spanned(figures["retention"], 1, 100, "%"), spanned(figures["progress"])]
        rows.append((arm["policy"], *cells, spanned(figures["tokens_per_s"], 0), change(figures["vs_full"])))
    columns = ("policy", "rows a request", "drafts kept", "tokens a step", "modelled tokens/s", "against full")
    return Table(f"{lanes} requests: every policy at its fastest budget", columns, tuple(rows))


def _speed(arm: Record) -> float:
    return float(arm["figures"][ALL]["tokens_per_s"][0])


def drafter(key: str, name: str, record: Record) -> list[Section]:
    """How far a drafter gets, by depth and by the way anchors are chosen."""
    workloads = record["workloads"]
    shown = workloads.get(ALL) or next(iter(workloads.values()))
    panels = [
        panel(draw_lines(_depths(shown, what)), title, "depth", y)
        for what, title, y in (
            ("survival", "Survival of the prefix", "share"),
            ("hazard", "Failure at this draft", "chance"),
        )
    ]
    ways = [way for way in WAYS if way in shown["ways"]]
    told = ", ".join(f"{way} {shown['ways'][way]['full_depth']['expected']:.2f}" for way in ways)
    figure = Figure(
        "Acceptance by depth and anchors",
        f"Expected tokens a block E[L], all workloads: {told}. Uniform anchors overstate what a server gets.",
        tuple(panels),
        tuple((way, WAYS.index(way)) for way in ways),
    )
    return [Section(f"{key}drafter", "Drafter", (figure, _drafter_table(workloads)), name)]


def _depths(workload: Record, what: str) -> list[Line]:
    lines = []
    for way in (one for one in WAYS if one in workload["ways"]):
        curve = workload["ways"][way]["full_depth"]
        values = [float("nan") if one is None else one for one in curve[what]]
        spans = [[float("nan") if one is None else one for one in span] for span in curve[f"{what}_interval"]]
        low, high = zip(*spans, strict=True)
        lines.append(Line(way, range(1, len(values) + 1), values, WAYS.index(way), low, high))
    return lines


def _drafter_table(workloads: Record) -> Table:
    rows = []
    for name, one in workloads.items():
        cells = [_expected(one["ways"].get(way)) for way in WAYS]
        proxy = one["ways"]["uniform"]["full_depth"].get("proxy_retired")
        rows.append((name, str(one["conversations"]), *cells, number(proxy)))
    columns = ("workload", "conversations", *(f"E[L] {way}" for way in WAYS), "proxy (retired)")
    return Table("Expected tokens a block with 95% intervals", columns, tuple(rows))


def _expected(way: Record | None) -> str:
    if way is None or way["full_depth"]["expected"] is None:
        return "–"
    cohort = way["full_depth"]
    return spanned([cohort["expected"], *cohort["expected_interval"]])
