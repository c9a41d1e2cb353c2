"""Figures of a report: small panels as SVG whose colours are those of the page, light, dark or printed.

matplotlib is imported only when something is drawn. It draws in placeholder colours, which are replaced by CSS
variables of the page; texts stay texts. Panels are small and have no legend: the page lays them out by its width and
draws one legend for all.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dscale.config import InputError
from dscale.evaluate.report.blocks import SIMULATED
from dscale.evaluate.svg import small

INK, LINE, PAPER = "#0d0e01", "#0d0e02", "#0d0e03"
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P", "X", "*"), ("-", "--", ":")
HUES = 8
STYLES = HUES * len(DASHES)
REPLACED = {INK: "currentColor", LINE: "var(--line)", PAPER: "var(--paper)"}
REPLACED |= {f"#0d0e1{hue}": f"var(--c{hue})" for hue in range(HUES)}
SIZE = (4.5, 3.0)  # inches


@dataclass(frozen=True)
class Line:
    """A series: its points, their 95% intervals if known, and the number of its style."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: int
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def colour(style: int) -> str:
    """Placeholder of a style's colour."""
    return f"#0d0e1{style % HUES}"


def panel(draw: Callable[[Any], None], title: str, x: str, y: str, simulated: bool = False) -> str:
    """One panel as inline SVG: `draw` gets the axes. Ids are unique for what is drawn."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("report: figures need matplotlib; pip install 'dscale[report]'") from None

    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9, "font.sans-serif": ["DejaVu Sans", "Arial"],
        "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "grid.color": LINE, "axes.axisbelow": True, "text.parse_math": False,  # a name with $ is no formula
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(linewidth=0.5)
        axes.set(xlabel=x, ylabel=y)
        axes.set_title(title, fontsize=9.5, loc="left", color=INK)
        if simulated:
            axes.set_title(SIMULATED, fontsize=8, loc="right", style="italic", color=INK)
        draw(axes)
        data = io.BytesIO()
        figure.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
    return inline(data.getvalue().decode(), title)


def inline(svg: str, title: str) -> str:
    """matplotlib's SVG as it may stand in a page: small, no addresses, no foreign ids, colours and font of the page."""
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", small(svg), flags=re.DOTALL)
    body = re.sub(r">[^<]+<", lambda text: text[0].replace('"', "&quot;"), body)  # no text is an attribute
    body = re.sub(r' (?:xmlns(?::xlink)?|version|font-family)="[^"]*"', "", body)
    own = hashlib.sha256((title + body).encode()).hexdigest()[:6]
    used = set(re.findall(r"#([\w-]+)[\")]", body))
    body = re.sub(r' id="([^"]+)"', lambda found: f' id="{own}-{found[1]}"' * (found[1] in used), body)
    body = re.sub(r'(url\(#|href="#)([\w-]+)', rf"\g<1>{own}-\g<2>", body)
    for placeholder, value in REPLACED.items():
        body = body.replace(placeholder, value)
    body = re.sub(r'^<svg width="[^"]*" height="[^"]*"|^<svg height="[^"]*" width="[^"]*"', "<svg", body)
    body = body.replace("<svg", '<svg aria-hidden="true" focusable="false" stroke-linejoin="round"', 1)
    return re.sub(r"\s*\n\s*", "\n", body).strip()


def draw_lines(lines: Sequence[Line], bars: bool = False, zero: bool = False) -> Callable[[Any], None]:
    """Lines with markers; intervals as a band, or as bars. zero: the y axis begins at 0."""

    def draw(axes: Any) -> None:
        for line in lines:
            dash = DASHES[line.style // HUES % len(DASHES)]
            marker = MARKERS[line.style % HUES]
            style = {
                "color": colour(line.style),
                "marker": marker,
                "markersize": 4,
                "linewidth": 1.5,
                "linestyle": dash,
            }
            if bars and line.low is not None and line.high is not None:
                off = [np.subtract(line.y, line.low), np.subtract(line.high, line.y)]
                axes.errorbar(line.x, line.y, yerr=np.abs(off), capsize=2.5, **style)
                continue
            axes.plot(line.x, line.y, **style)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour(line.style), alpha=0.15, linewidth=0)
        if zero:
            axes.set_ylim(bottom=0, top=1.06 * axes.get_ylim()[1])

    return draw


def at_whole(draw: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same with ticks at whole numbers only."""

    def drawn(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return drawn


def at_concurrencies(draw: Callable[[Any], None], levels: Sequence[int], even: bool = False) -> Callable[[Any], None]:
    """The same over concurrencies: a logarithmic axis with a tick at each. even: a line at 0, no change."""

    def drawn(axes: Any) -> None:
        from matplotlib.ticker import NullLocator

        draw(axes)
        if len(levels) > 1:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(list(levels), [str(one) for one in levels])
        if even:
            axes.axhline(0, color=INK, linewidth=0.8)

    return drawn


def draw_bars(
    groups: Sequence[str], series: Sequence[tuple[int, Sequence[float]]], stacked: bool = False
) -> Callable[[Any], None]:
    """Bars side by side within each group, or horizontal ones of stacked parts. series: (style, a value a group)."""

    def draw(axes: Any) -> None:
        place = np.arange(len(groups))
        if stacked:
            left = np.zeros(len(groups))
            for style, values in series:
                shade = 1.0 - 0.35 * (style // HUES)
                axes.barh(place, values, 0.7, left=left, color=colour(style), alpha=shade, linewidth=0)
                left += np.asarray(values, float)
            axes.set_yticks(place, groups)
            axes.invert_yaxis()
            return
        width = 0.8 / max(len(series), 1)
        for number, (style, values) in enumerate(series):
            at = place + (number - (len(series) - 1) / 2) * width
            shade = 1.0 - 0.35 * (style // HUES)
            axes.bar(at, values, width * 0.92, color=colour(style), alpha=shade, linewidth=0)
        axes.set_xticks(place, groups)

    return draw


def draw_steps(counts: Sequence[tuple[int, Sequence[float]]]) -> Callable[[Any], None]:
    """Distributions over 1, 2, …: (style, share of each)."""

    def draw(axes: Any) -> None:
        for style, shares in counts:
            at = np.arange(1, len(shares) + 1)
            axes.plot(at, shares, color=colour(style), marker=MARKERS[style % HUES], markersize=3.5, linewidth=1.4,
                      linestyle=DASHES[style // HUES % len(DASHES)])  # fmt: skip
        axes.set_ylim(bottom=0)

    return draw


def draw_signal(
    x: Sequence[float], y: Sequence[float], trends: Sequence[Line], most: int = 400
) -> Callable[[Any], None]:
    """A signal against accepted drafts: some of the points, evenly picked, and means of equal-count bins."""

    def draw(axes: Any) -> None:
        pick = np.linspace(0, len(x) - 1, min(most, len(x))).astype(int)
        wobble = (np.arange(len(pick)) * 0.618034 % 1 - 0.5) * 0.7  # points of the same count side by side
        axes.plot(np.asarray(x)[pick], np.asarray(y)[pick] + wobble, ".", color=INK, alpha=0.35, markersize=3,
                  markeredgewidth=0)  # fmt: skip
        draw_lines(trends)(axes)

    return draw


def swatch(style: int) -> str:
    """A line with its marker, for a legend."""
    dash = ("", "5 3", "1.5 2.5")[style // HUES % len(DASHES)]
    marks = {
        "o": '<circle cx="13" cy="6" r="3"/>',
        "s": '<path d="M10 3h6v6h-6z"/>',
        "^": '<path d="M13 2l4 7h-8z"/>',
        "D": '<path d="M13 2l4 4-4 4-4-4z"/>',
        "v": '<path d="M13 10l4-7h-8z"/>',
        "P": '<path d="M12 2h2v3h3v2h-3v3h-2v-3h-3v-2h3z"/>',
        "X": '<path d="M10 2l3 2 3-2 1 1-2 3 2 3-1 1-3-2-3 2-1-1 2-3-2-3z"/>',
        "*": '<path d="M13 1l1.3 3.5 3.7.2-2.9 2.3 1 3.6-3.1-2-3.1 2 1-3.6-2.9-2.3 3.7-.2z"/>',
    }
    hue = f"var(--c{style % HUES})"
    line = f'<path d="M1 6h24" stroke="{hue}" stroke-width="2" stroke-dasharray="{dash}"/>'
    mark = f'<g fill="{hue}">{marks[MARKERS[style % HUES]]}</g>'
    return f'<svg viewBox="0 0 26 12" width="26" height="12" aria-hidden="true" focusable="false">{line}{mark}</svg>'
