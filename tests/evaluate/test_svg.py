"""Small SVG draws what matplotlib's does: the same texts, marks and lines, in the same places, for less."""

from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")

from dscale.evaluate.report.figures import INK, LINE, Line, draw_bars, draw_lines, draw_signal
from dscale.evaluate.svg import small

SETTINGS: dict[Any, Any] = {"svg.hashsalt": "x", "text.color": INK, "grid.color": LINE, "axes.axisbelow": True}
SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}href"
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


def drawn(draw: Any, fonttype: str = "none") -> str:
    """matplotlib's own SVG of one panel with a grid."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS | {"svg.fonttype": fonttype}):
        figure = Figure(figsize=(4.5, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.grid(linewidth=0.5)
        axes.set(xlabel="x & y", ylabel="<y>", title="Title")
        draw(axes)
        data = io.BytesIO()
        figure.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue().decode()


def points(path: str) -> list[tuple[float, float]]:
    """Corners of a path, its H and V written out; curves by their end points."""
    place, found = (0.0, 0.0), []
    for command, numbers in re.findall(r"([MLHVQCz])([^MLHVQCz]*)", path):
        values = [float(one) for one in re.findall(r"-?\d*\.?\d+(?:e-?\d+)?", numbers)]
        size = {"M": 2, "L": 2, "Q": 4, "C": 6}.get(command, 1)
        for one in range(0, len(values), size):
            part = values[one : one + size]
            place = {"H": (part[0], place[1]), "V": (place[0], part[-1])}.get(command, (part[-2:] + part)[:2])  # type: ignore[assignment]
            found.append((place[0], place[1]))
    return found


def corners(root: ElementTree.Element) -> np.ndarray:
    """Corners [N, 2] of everything that is seen, however it is said: paths, uses of shapes, marks of a path."""
    shapes = {one.get("id"): one for one in root.iter(f"{SVG}path") if one.get("id")}
    markers = {one.get("id"): one[0] for one in root.iter(f"{SVG}marker")}
    inside = {id(one) for defs in root.iter(f"{SVG}defs") for one in defs.iter()}
    seen: list[np.ndarray] = []
    for one in (one for one in root.iter() if id(one) not in inside):
        shape, places = one, [(0.0, 0.0)]
        if one.tag == f"{SVG}use":
            shape = shapes[(one.get(XLINK) or one.get("href") or "")[1:]]
            places = [(float(one.get("x", 0)), float(one.get("y", 0)))]
        elif "marker-mid" in one.attrib:
            shape, places = markers[one.attrib["marker-mid"][5:-1]], points(one.attrib["d"])
        if shape.tag == f"{SVG}path" and not re.search("(^|; )opacity: 0(;|$)", shape.get("style", "")):
            seen += [np.add(points(shape.attrib["d"]), place) for place in places]
    return np.concatenate(seen)


@pytest.mark.parametrize("name", DRAWN)
def test_same_texts_and_marks_in_a_third(name: str) -> None:
    before = drawn(DRAWN[name])
    after = small(before)
    assert len(after) < len(before) / 3
    old, new = ElementTree.fromstring(before), ElementTree.fromstring(after)
    texts = [sorted(one.text or "" for one in root.iter(f"{SVG}text")) for root in (old, new)]
    assert texts[0] == texts[1]
    assert {"x & y", "<y>", "Title"} <= set(texts[1])
    here, there = corners(old), corners(new)
    assert len(here) == len(there) > 40
    apart = np.abs(here[:, None] - there).max(2)
    assert max(apart.min(0).max(), apart.min(1).max()) < 0.0101  # two roundings: of a mark and of its shape


@pytest.mark.parametrize("name", DRAWN)
def test_colours_stay_and_every_reference_has_its_id(name: str) -> None:
    before = drawn(DRAWN[name])
    after = small(before)
    assert set(re.findall("#[0-9a-f]{6}", after)) == set(re.findall("#[0-9a-f]{6}", before))
    ids = re.findall(r' id="(\w+)"', after)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#(\w+)', after)) == set(ids)
    assert "\n" not in after
    assert not re.search(r"\.\d{3}", after)


def test_letters_drawn_as_shapes_keep_their_scale() -> None:
    before = drawn(DRAWN["bands"], "path")
    after = small(before)
    assert sorted(re.findall(r"scale\([^)]*\)", after)) == sorted(re.findall(r"scale\([^)]*\)", before))
    root = ElementTree.fromstring(after)
    shapes = {one.get("id") for one in root.iter() if one.get("id")}
    uses = [one.get("href", "")[1:] for one in root.iter(f"{SVG}use")]
    assert set(uses) <= shapes
    assert len(uses) == before.count("<use") - drawn(DRAWN["bands"]).count("<use")  # all others stand where they are
    assert len(after) < 0.75 * len(before)
