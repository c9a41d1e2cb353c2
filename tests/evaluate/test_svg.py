"""Small SVG draws what matplotlib's does: the same texts and marks in the same places and colours, for less."""

from __future__ import annotations

import io
import re
import sys
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("scour", reason="needs scour")

from dscale.evaluate.report.figures import INK, LINE, Line, draw_bars, draw_lines, draw_signal, inline, panel
from dscale.evaluate.svg import small

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "x", "svg.fonttype": "none", "text.color": INK, "grid.color": LINE, "axes.axisbelow": True,
}  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"
SERIES = [
    Line("a", [1, 2, 3], [3, 4, 8], 0, [2, 3, 7], [4, 5, 9]),
    Line("b", [1, 2, 3], [3, 5, 7], 9, [2, 3, 6], [4, 6, 9]),
]
DRAWN = {
    "bars and marks": draw_lines(SERIES, bars=True),
    "bands": draw_lines(SERIES, zero=True),
    "dots": draw_signal(np.arange(60), np.arange(60) % 7, SERIES),
    "columns": draw_bars(["p", "q"], [(0, [1, 2]), (9, [2, 1])]),
}


def drawn(draw: Any) -> str:
    """matplotlib's own SVG of one panel with a grid."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(4.5, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.grid(linewidth=0.5)
        axes.set(xlabel="x & y", ylabel="<y>", title="Title")
        draw(axes)
        data = io.BytesIO()
        figure.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue().decode()


def placed(svg: str) -> list[tuple[str, float, float]]:
    """Texts and used shapes with their places."""
    root = ElementTree.fromstring(svg)
    marks = [("", one) for one in root.iter(f"{SVG}use")] + [(one.text or "", one) for one in root.iter(f"{SVG}text")]
    return sorted((said, float(one.get("x", 0)), float(one.get("y", 0))) for said, one in marks)


@pytest.mark.parametrize("name", DRAWN)
def test_same_texts_and_marks_in_the_same_places_for_less(name: str) -> None:
    before = drawn(DRAWN[name])
    after = small(before)
    assert len(after) < 0.67 * len(before)
    there, here = placed(before), placed(after)
    assert [one[0] for one in here] == [one[0] for one in there]
    assert {"x & y", "<y>", "Title"} <= {one[0] for one in here}
    assert np.abs(np.array([one[1:] for one in here]) - np.array([one[1:] for one in there])).max() <= 0.01


@pytest.mark.parametrize("name", DRAWN)
def test_colours_stay_and_every_reference_has_its_id(name: str) -> None:
    before = drawn(DRAWN[name])
    for after in (small(before), inline(before, "Title")):
        ids = re.findall(r' id="([\w-]+)"', after)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'(?:url\(|href=")#([\w-]+)', after)) <= set(ids)
        assert "<metadata" not in after
    assert {INK, LINE} <= set(re.findall("#[0-9a-f]{6}", small(before)))
    assert not re.search("#0d0e|http:", inline(before, "Title"))  # placeholders became the page's colours
    assert "var(--line)" in inline(before, "Title")


def test_without_the_library_the_picture_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn(DRAWN["bands"])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scour", None)
        assert small(before) == before[before.index("<svg") :]
        alone = inline(before, "Title")
    assert "var(--line)" in alone
    assert len(inline(before, "Title")) < 0.75 * len(alone)


@pytest.mark.parametrize("title", ['an id="a" & version="2"', "naïve — “q” ≥ 'µ'", r"$5 and $\bad$", "<b>href=#a</b>"])
def test_texts_stay_as_they_are(title: str) -> None:
    made = panel(draw_lines(SERIES), title, "$x$", "y").replace("xlink:", "")
    said = [one.text for one in ElementTree.fromstring(made).iter("text")]
    assert {title, "$x$", "y"} <= set(said)
