"""Plots of evaluation records. matplotlib is imported only here, and only when a plot is drawn."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dscale.evaluate.svg import small
from dscale.train.artifacts import write_bytes

COLORS = {"uniform": "#d95f02", "re-anchored": "#1b9e77", "served": "#3b4cc0"}
STYLES = {"uniform": "-", "re-anchored": "-", "served": ":"}


def plot_curves(record: dict[str, Any], folder: Path) -> bool:
    """curves.svg and curves.png: survival and hazard by depth, a column per workload. False without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(record["workloads"])
    figure = Figure(figsize=(2.6 * len(names) + 0.8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(names), sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(names):
        for way, curves in record["workloads"][name]["ways"].items():
            _draw(axes[:, column], way, curves["full_depth"])
        axes[0, column].set_title(name, fontsize=9)
        axes[1, column].set_xlabel("depth")
    axes[0, 0].set_ylabel("survival S(k)")
    axes[1, 0].set_ylabel("hazard h(k)")
    for axis in axes[0]:
        axis.legend(fontsize=7, frameon=False)
    for kind, data in drawn(figure):
        write_bytes(folder / f"curves.{kind}", data)
    return True


def drawn(figure: Any) -> Iterator[tuple[str, bytes]]:
    """A matplotlib Figure as (svg, its bytes) and (png, its bytes), the same whenever it is drawn."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "dscale"}):
        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            data = io.BytesIO()
            figure.savefig(data, format=kind, dpi=120, metadata=metadata)
            yield kind, small(data.getvalue().decode()).encode() if kind == "svg" else data.getvalue()


def _draw(axes: Any, way: str, curves: dict[str, Any]) -> None:
    """One way's two curves with their intervals, and its E[L] in the legend."""
    depth = range(1, len(curves["survival"]) + 1)
    expected = curves["expected"]
    label = f"{way} {expected:.2f}" if expected is not None else way
    for axis, what in zip(axes, ("survival", "hazard"), strict=True):
        values = [float("nan") if one is None else one for one in curves[what]]
        axis.plot(depth, values, STYLES[way], color=COLORS[way], label=label, linewidth=1.4)
        spans = [[float("nan") if one is None else one for one in span] for span in curves[f"{what}_interval"]]
        axis.fill_between(depth, *zip(*spans, strict=True), color=COLORS[way], alpha=0.15, linewidth=0)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.tick_params(labelsize=7)
