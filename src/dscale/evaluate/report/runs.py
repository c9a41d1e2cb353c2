"""Sections of a `dscale bench` record about its runs: latency, fixed widths, progress, open loops."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from dscale.evaluate.bench_record import ArmInfo, RequestRow, Run
from dscale.evaluate.report.bench import Bench
from dscale.evaluate.report.blocks import Block, Figure, Section, Table, number
from dscale.evaluate.report.figures import Line, at_whole, draw_bars, draw_lines, draw_steps, panel
from dscale.evaluate.statistics import Spread, latency_summary, phrase

FEWEST_WIDTHS = 3
TAILS = ("mean", "p95", "p99")


def latency(bench: Bench) -> Section | None:
    """End-to-end latency of the shown arms: bars by concurrency, and the table with first and following tokens."""
    cells = {cell: rows_of(runs) for cell, runs in bench.closed.items() if cell[0] in bench.shown_arms}
    if not cells:
        return None
    spreads = {cell: latency_summary(rows).end_to_end for cell, rows in cells.items()}
    panels, simulated = [], bench.record.simulated
    for level in bench.levels:
        arms = [arm for arm in bench.shown_arms if spreads.get((arm, level)) is not None]
        series = [(bench.style(arm), tails(spreads[arm, level])) for arm in arms]
        title = f"{level} request{'s' * (level != 1)} at a time"
        panels.append(panel(draw_bars(TAILS, series), title, "", "seconds", simulated))
    figure = Figure(
        "Latency of whole answers",
        "Seconds from sending to the last token: mean, 95th and 99th percentile of every arm, by requests at a time.",
        tuple(panels),
        tuple((arm, bench.style(arm)) for arm in bench.shown_arms),
        simulated=simulated,
    )
    return Section(f"{bench.key}latency", "Latency", (figure, latency_table(bench, cells)), bench.name)


def rows_of(runs: Sequence[Run]) -> list[RequestRow]:
    """Rows of all runs."""
    return [row for run in runs for row in run.rows]


def tails(spread: Spread | None) -> list[float]:
    """Mean, p95 and p99 in seconds."""
    return [float("nan")] * 3 if spread is None else [spread.mean, spread.p95, spread.p99]


def latency_table(bench: Bench, cells: dict[tuple[str, int], list[RequestRow]]) -> Table:
    """Seconds of whole answers, milliseconds to the first token and between tokens."""
    rows = []
    for level in bench.levels:
        for arm in (one for one in bench.shown_arms if (one, level) in cells):
            found = latency_summary(cells[arm, level])
            whole = [number(one) for one in tails(found.end_to_end)]
            first, between = found.first_token, found.between_tokens
            parts = [number(1e3 * one, 0) if one is not None else "–" for one in _two(first)]
            parts += [number(1e3 * one, 1) if one is not None else "–" for one in _two(between)]
            rows.append((arm, str(level), *whole, *parts, str(len(cells[arm, level]))))
    columns = ("arm", "c", "mean, s", "p95, s", "p99, s", "first token, ms", "its p95", "between tokens, ms", "its p95")
    return Table("Latency: mean and tails", (*columns, "requests"), tuple(rows))


def _two(spread: Spread | None) -> tuple[float | None, float | None]:
    return (None, None) if spread is None else (spread.mean, spread.p95)


def width_of(arm: ArmInfo) -> int | None:
    """Rows verified by an arm of a fixed width; None for others."""
    found = re.fullmatch(r"fixed:(\d+)", arm.policy or "")
    if found:
        return int(found[1])
    return arm.width if arm.policy in (None, "full") and not arm.autoregressive else None


def widths(bench: Bench) -> Section | None:
    """Throughput by width, for each engine that was run at three or more."""
    blocks: list[Block] = []
    for engine in dict.fromkeys(arm.engine for arm in bench.record.arms):
        found = {width: arm for arm in bench.record.arms if arm.engine == engine and (width := width_of(arm))}
        ran = {width: arm for width, arm in sorted(found.items()) if any(a == arm.name for a, _ in bench.closed)}
        if len(ran) >= FEWEST_WIDTHS:
            blocks += _by_width(bench, engine, ran)
    return Section(f"{bench.key}widths", "Fixed widths", tuple(blocks), bench.name) if blocks else None


def _by_width(bench: Bench, engine: str, arms: dict[int, ArmInfo]) -> list[Block]:
    whole = arms[max(arms)].name
    panels, rows, best = [], [], []
    for number_of, level in enumerate(bench.levels):
        ran = [(width, arm.name) for width, arm in arms.items() if (arm.name, level) in bench.closed]
        if not ran:
            continue
        speeds = [bench.speed(name, level) for _, name in ran]
        line = Line(engine, [width for width, _ in ran], speeds, number_of)
        best.append(f"{ran[int(np.argmax(speeds))][0]} at c = {level}")
        title = f"{level} request{'s' * (level != 1)} at a time"
        panels.append(
            panel(at_whole(draw_lines([line], zero=True)), title, "width", "tokens/s", bench.record.simulated)
        )
        for (width, name), speed in zip(ran, speeds, strict=True):
            found = bench.compare(name, level, whole) if name != whole else None
            change = phrase(found) if found is not None else "–"
            rows.append((str(width), str(level), number(speed, 0), change))
    table = Table(
        f"{engine} by width", ("width", "c", "tokens/s", f"against width {max(arms)}, 95% interval"), tuple(rows)
    )
    told = f"Throughput of {engine} by the rows it verifies of each block; fastest: {', '.join(best)}."
    figure = Figure(
        f"Throughput by width, {engine}", told, tuple(panels), table=table, simulated=bench.record.simulated
    )
    return [figure]


def progress(bench: Bench) -> Section | None:
    """Tokens a step: of every step where the server counts by position, else the means of requests."""
    by_step = {arm: shares for arm in bench.shown_arms if (shares := step_shares(bench, arm)) is not None}
    plain = {arm.name for arm in bench.record.arms if arm.autoregressive}
    if by_step:
        shown, of = by_step, "drafted steps"
    else:
        means = {arm: request_means(bench, arm) for arm in bench.shown_arms if arm not in plain}
        shown = {arm: _histogram(values) for arm, values in means.items() if values}
        of = "requests, by the mean of their steps (rounded)"
    if not shown:
        return None
    drawn = draw_steps([(bench.style(arm), [100 * one for one in shares]) for arm, shares in shown.items()])
    ylabel = "% of drafted steps" if by_step else "% of requests"
    means_of = {arm: sum((k + 1) * share for k, share in enumerate(shares)) for arm, shares in shown.items()}
    told = ", ".join(f"{arm} {mean:.2f}" for arm, mean in means_of.items())
    width = max(len(shares) for shares in shown.values())
    cells = [(arm, *(_share(shares, k) for k in range(width))) for arm, shares in shown.items()]
    figure = Figure(
        "Distribution of tokens a step",
        f"Share of {of}; means: {told}.",
        (panel(drawn, "Tokens a step", "tokens", ylabel, bench.record.simulated),),
        tuple((arm, bench.style(arm)) for arm in shown),
        Table("% by tokens a step", ("arm", *map(str, range(1, width + 1))), tuple(cells)),
        simulated=bench.record.simulated,
    )
    return Section(f"{bench.key}progress", "Progress", (figure,), bench.name)


def _share(shares: Sequence[float], place: int) -> str:
    return f"{100 * shares[place]:.1f}" if place < len(shares) else "–"


def step_shares(bench: Bench, arm: str) -> list[float] | None:
    """Share of steps that gave 1, 2, … tokens, from the server's counts of acceptance by position."""
    runs = [run for (name, _), of in bench.closed.items() if name == arm for run in of]
    known = [run.counters for run in runs if run.counters.get("accepted_by_position") and run.counters.get("drafts")]
    if not known:
        return None
    depth = max(len(one["accepted_by_position"]) for one in known)
    reached = np.zeros(depth + 2)
    for one in known:
        reached[0] += one["drafts"]
        reached[1 : 1 + len(one["accepted_by_position"])] += one["accepted_by_position"]
    shares = -np.diff(reached) / reached[0]
    return [max(0.0, float(one)) for one in shares] if (shares >= -1e-9).all() else None


def request_means(bench: Bench, arm: str) -> list[float]:
    """Tokens a step of each request of an arm."""
    rows = [row for (name, _), runs in bench.closed.items() if name == arm for row in rows_of(runs)]
    return [row.output_tokens / row.steps for row in rows if row.steps]


def _histogram(values: Sequence[float]) -> list[float]:
    counts = np.bincount(np.maximum(np.rint(values).astype(int), 1))[1:]
    return [float(one) for one in counts / counts.sum()]


def open_loop(bench: Bench) -> Section | None:
    """Runs in which requests arrive by themselves."""
    runs = [run for run in bench.record.runs if run.rate is not None]
    if not runs:
        return None
    rows, lines = [], []
    for arm in dict.fromkeys(run.arm for run in runs):
        at = []
        for rate in sorted({run.rate for run in runs if run.arm == arm and run.rate is not None}):
            own = [run for run in runs if run.arm == arm and run.rate == rate]
            spread = latency_summary(rows_of(own)).end_to_end
            tokens = sum(row.output_tokens for row in rows_of(own)) / sum(run.window_s for run in own)
            rows.append((arm, f"{rate:g}", number(tokens, 0), *map(number, tails(spread)), str(len(rows_of(own)))))
            at.append((rate, tails(spread)[1]))
        lines.append(Line(arm, [rate for rate, _ in at], [slow for _, slow in at], bench.style(arm)))
    columns = ("arm", "requests/s", "tokens/s", "mean, s", "p95, s", "p99, s", "requests")
    table = Table("Open loop: latency by rate of arrival", columns, tuple(rows))
    panels = (panel(draw_lines(lines, zero=True), "p95 latency", "requests/s", "seconds", bench.record.simulated),)
    legend = tuple((line.label, line.style) for line in lines)
    told = "95th percentile of latency by the rate at which requests arrive."
    figure = Figure("Latency by rate", told, panels, legend, simulated=bench.record.simulated)
    return Section(f"{bench.key}open", "Open loop", (figure, table), bench.name)


def sections(bench: Bench) -> list[Section]:
    """All of them that the record has something for."""
    return [one for one in (latency(bench), widths(bench), progress(bench), open_loop(bench)) if one is not None]
