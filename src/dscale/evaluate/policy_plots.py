"""Plots of `dscale evaluate policies`. matplotlib is imported only here, and only when a plot is drawn."""

from __future__ import annotations

from typing import Any

from dscale.evaluate.plots import drawn

ALL = "all"
COLOURS = {
    "fixed": "#8c8c8c",
    "confidence": "#d95f02",
    "dspark": "#7570b3",
    "dvl seeded": "#66a61e",
    "dvl exact": "#1b9e77",
    "oracle": "#222222",
    "auto": "#e7298a",
    "dvl windows": "#3b4cc0",
}


def plot_policies(record: dict[str, Any]) -> dict[str, bytes]:
    """policies.png and policies.svg by name, a row of three panels per concurrency; nothing without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return {}
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(record["concurrency"])
    figure = Figure(figsize=(12, 3.6 * count + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(count, 3, squeeze=False)
    for row, (lanes, one) in enumerate(record["concurrency"].items()):
        for panel, value in zip(panels[row], ("retention", "progress", "tokens_per_s"), strict=True):
            _draw(panel, one["arms"], value)
            panel.set_title(f"{lanes} requests", fontsize=9)
        panels[row, 0].set_ylabel("accepted drafts kept")
        panels[row, 1].set_ylabel("tokens a step")
        panels[row, 2].set_ylabel("modelled tokens/s")
    for panel in panels[-1]:
        panel.set_xlabel("slots verified a request")
    panels[0, 0].legend(fontsize=7, frameon=False)
    out = {}
    for kind, data in drawn(figure):
        figure.set_layout_engine("none")  # it is laid out; that is half of the work
        out[f"policies.{kind}"] = data
    return out


def _draw(panel: Any, arms: list[dict[str, Any]], value: str) -> None:
    """One line per policy over its budgets, with intervals; policies with a budget of their own as points."""
    for name, colour in COLOURS.items():
        swept = [arm for arm in arms if _family(arm) == name and arm["slots"] is not None]
        own = [arm for arm in arms if _family(arm) == name and arm["slots"] is None]
        if swept:
            at = [arm["figures"][ALL]["slots"][0] for arm in swept]
            middle, low, high = zip(*(arm["figures"][ALL][value] for arm in swept), strict=True)
            label = "fixed width" if name == "fixed" else name
            panel.plot(at, middle, color=colour, label=label, linewidth=1.3, marker=".", markersize=3)
            panel.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        for arm in own:
            figures = arm["figures"][ALL]
            marker = "*" if name == "auto" else "D"
            label = f"{name}, own budget"
            panel.plot(figures["slots"][0], figures[value][0], marker, color=colour, label=label, markersize=6)
    panel.grid(alpha=0.3, linewidth=0.5)
    panel.tick_params(labelsize=7)


def _family(arm: dict[str, Any]) -> str:
    return "fixed" if arm["policy"] in ("off", "full") or arm["policy"].startswith("fixed:") else arm["policy"]
