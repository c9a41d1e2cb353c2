"""The reliability plot of a predictor: predicted chance of survival against what happened, by position."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from dscale.train.artifacts import write_bytes


def plot_reliability(positions: list[dict[str, Any]], pooled: list[dict[str, float]], path: Path) -> bool:
    """Write a PNG from the curves in metrics.json (quality.position_scores, quality.reliability).

    False, and no file, where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for one in _spread(positions):
        curve = one["reliability"]
        label = f"draft {one['position']}"
        axes.plot([p["predicted"] for p in curve], [p["observed"] for p in curve], ".-", linewidth=1, label=label)
    axes.plot([p["predicted"] for p in pooled], [p["observed"] for p in pooled], "k.-", linewidth=2, label="all")
    axes.set(xlabel="predicted survival q", ylabel="share that survived", xlim=(0, 1), ylim=(0, 1))
    axes.set_title("Reliability on held-out prompts")
    axes.legend()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(buffer, dpi=120, format="png", metadata={"Software": None})
    write_bytes(path, buffer.getvalue())
    return True


def _spread(positions: list[dict[str, Any]], most: int = 4) -> list[dict[str, Any]]:
    """At most four of the positions, the first and the last among them."""
    if len(positions) <= most:
        return positions
    return [positions[round(i * (len(positions) - 1) / (most - 1))] for i in range(most)]
