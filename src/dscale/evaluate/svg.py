"""matplotlib's SVG at a third of its size or less: the same marks and texts, said in fewer words.

    small(figure_as_svg)

matplotlib writes coordinates to a nanometre, a style on each element, a group around each, one path a grid line. Here
coordinates have two decimals (a hundredth of a point: a report's panel is shown at one to two pixels a point), paths
are one line, styles are attributes that groups hand down, and lines of one axis that look alike are one path.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

DIGITS = 2
NAMESPACE = "http://www.w3.org/2000/svg"
NUMBER = re.compile(r"-?\d*\.?\d+(?:e[-+]?\d+)?")
MOVE = re.compile(r"(?:translate|rotate)\([^)]*\)")
REFERENCES = ("href", "clip-path", "marker-start", "marker-mid", "marker-end")
COORDINATES = ("d", "x", "y", "width", "height")
INHERITED = (
    "fill", "fill-opacity", "fill-rule", "stroke", "stroke-opacity", "stroke-width", "stroke-linecap",
    "stroke-linejoin", "stroke-dasharray", "stroke-dashoffset", "font-family", "font-size", "font-style",
    "font-weight", "text-anchor",
)  # fmt: skip
STYLES = (*INHERITED, "opacity")
SAYING = {*STYLES, "clip-path", "transform", "style"}
SHARED = (*INHERITED, "clip-path")  # what a group may say for all that it holds
KINDS = {"defs": 0, "path": 1, "use": 2}  # their order in an axis, where nothing covers anything
EACH = {"stroke-linejoin": "round"}  # matplotlib's rule for every element, here of the outermost one
PLAIN = re.compile(r"[MLQCz\s\d.e+-]*")  # absolute commands of pairs, all that matplotlib writes


def small(svg: str) -> str:
    """The same picture in fewer bytes, as an SVG document of its own. `svg`: a document that matplotlib wrote."""
    root = _parsed(svg)
    for element in root.iter():
        _style_to_attributes(element)
    _drop_unseen(root)
    _place_lone_uses(root)
    _string_marks(root)
    for axis in [one for one in root.iter("g") if one.get("id", "").startswith("matplotlib.axis")]:
        axis[:] = sorted(_leaves(axis), key=lambda one: KINDS.get(one.tag, len(KINDS)))
        _join_lines(axis)
    _short_ids(root)
    _unwrap(root)
    for group in list(root.iter()):
        _hand_down(group)
    _unwrap(root)
    for element in root.iter():
        _round(element)
    root.attrib = {"xmlns": NAMESPACE} | {k: v for k, v in root.attrib.items() if k != "version"} | EACH
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")


def _parsed(svg: str) -> Element:
    """The tree without namespaces, white space between elements and metadata."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if not (element.text or "").strip() and element.tag not in ("text", "tspan"):
            element.text = None
        if not (element.tail or "").strip():
            element.tail = None
    return root


def _style_to_attributes(element: Element) -> None:
    """Declarations that may be attributes become some; others stay a style."""
    rest = []
    for declaration in filter(None, map(str.strip, element.attrib.pop("style", "").split(";"))):
        name, _, value = map(str.strip, declaration.partition(":"))
        if name in STYLES:
            element.set(name, value.removesuffix("px"))
        else:
            rest.append(f"{name}: {value}")
    if rest:
        element.set("style", "; ".join(rest))
    if element.get("stroke-dashoffset") == "0":
        del element.attrib["stroke-dashoffset"]
    if re.match(r"rotate\(-?0(\.0)?[ ,)]", element.get("transform", "")):
        del element.attrib["transform"]


def _drop_unseen(root: Element) -> None:
    """Without what is fully transparent, metadata, and the style sheet, which the outermost element stands for."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.get("opacity") == "0" or child.tag in ("metadata", "style"):
                parent.remove(child)
    for parent in list(root.iter()):
        for child in [one for one in parent if one.tag == "defs" and len(one) == 0]:
            parent.remove(child)


def _place_lone_uses(root: Element) -> None:
    """Shapes that are used once, and strokes of two points (ticks, caps), stand where they are used."""
    shapes = {f"#{one.get('id')}": one for defs in root.iter("defs") for one in defs if one.tag == "path"}
    times = Counter(one.get("href", "") for one in root.iter("use"))
    for parent in list(root.iter()):
        for place, use in enumerate(list(parent)):
            shape = shapes.get(use.get("href", "")) if use.tag == "use" else None
            if shape is not None and _placeable(use, shape, times[use.get("href", "")]):
                parent[place] = _placed(use, shape)
    _drop_unused(root)


def _drop_unused(root: Element) -> None:
    """Without shapes that nothing shows any more."""
    used = {one.get("href", "") for one in root.iter("use")}
    for defs in list(root.iter("defs")):
        for shape in [one for one in defs if one.tag == "path" and f"#{one.get('id')}" not in used]:
            defs.remove(shape)
    _drop_unseen(root)


def _string_marks(root: Element) -> None:
    """Marks of a series are the corners of one path that is not drawn itself: a pair of numbers a mark."""
    shapes = {f"#{one.get('id')}": one for defs in root.iter("defs") for one in defs if one.tag == "path"}
    for parent in list(root.iter()):
        children: list[Element] = []
        for (drawn, _), run in itertools.groupby(list(parent), key=_mark):
            marks = list(run)
            if drawn and len(marks) > 1:
                name = f"marker{len(list(root.iter('marker')))}"
                children += [_marker(name, marks[0], shapes[drawn]), _strung(name, marks)]
            else:
                children += marks
        parent[:] = children
    _drop_unused(root)


def _mark(element: Element) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What it shows and how; nothing for what is no mark at a place of its own."""
    if element.tag != "use" or {*element.keys()} - {*INHERITED} != {"href", "x", "y"}:
        return "", ()
    return element.attrib["href"], tuple(sorted((name, value) for name, value in element.items() if name in INHERITED))


def _marker(name: str, use: Element, shape: Element) -> Element:
    """The shape as each of the marks shows it, the right way up and unscaled."""
    style = {name: value for one in (use, shape) for name, value in one.items() if name not in ("href", "x", "y", "id")}
    marker = Element("marker", {"id": name, "markerUnits": "userSpaceOnUse", "overflow": "visible"})
    marker.append(Element("path", style))
    defs = Element("defs")
    defs.append(marker)
    return defs


def _strung(name: str, marks: list[Element]) -> Element:
    corners = " L ".join(f"{one.get('x')} {one.get('y')}" for one in marks)
    every = {f"marker-{place}": f"url(#{name})" for place in ("start", "mid", "end")}
    return Element("path", {"d": f"M {corners}", "fill": "none"} | every)


def _placeable(use: Element, shape: Element, times: int) -> bool:
    drawn = shape.get("d", "")
    other = {"transform", "clip-path", "opacity", "style"}
    if other & {*use.keys(), *shape.keys()} or not PLAIN.fullmatch(drawn):
        return False
    return times == 1 or (drawn.count("L") == 1 and len(NUMBER.findall(drawn)) == 4 and "z" not in drawn)


def _placed(use: Element, shape: Element) -> Element:
    """The shape at the place of its use; what the shape says of itself counts before what the use says."""
    shift = itertools.cycle((float(use.get("x", 0)), float(use.get("y", 0))))
    moved = NUMBER.sub(lambda found: f"{float(found[0]) + next(shift):.6f}", shape.get("d", ""))
    style = {name: value for one in (use, shape) for name, value in one.items() if name in STYLES}
    if len(NUMBER.findall(moved)) == 4:
        style["fill"] = "none"  # a stroke has no inside
    return Element("path", {"d": moved} | style)


def _leaves(group: Element) -> Iterator[Element]:
    """What a group draws, in its order; groups that say something stay whole."""
    for child in list(group):
        if child.tag == "g" and not SAYING & {*child.keys()}:
            yield from _leaves(child)
        else:
            yield child


def _join_lines(axis: Element) -> None:
    """Lines of an axis that look alike as one path. They are parallel, so nothing is drawn twice over itself."""
    found: dict[tuple[tuple[str, str], ...], Element] = {}
    for path in [one for one in axis if one.tag == "path" and one.get("fill") == "none"]:
        look = tuple(sorted((k, v) for k, v in path.items() if k not in ("d", "id")))
        if look in found:
            found[look].set("d", f"{found[look].get('d')} {path.get('d')}")
            axis.remove(path)
        else:
            found[look] = path


def _short_ids(root: Element) -> None:
    """Ids that are referred to become a, b, …; others go."""
    known = {one.attrib.pop("id"): one for one in root.iter() if "id" in one.attrib}
    referring = [(one, name) for one in root.iter() for name in REFERENCES if name in one.attrib]
    names: dict[str, str] = {}
    for element, attribute in referring:
        old = element.attrib[attribute].removeprefix("url(").strip("#)")
        known[old].set("id", names.setdefault(old, _name(len(names))))
        element.set(attribute, element.attrib[attribute].replace(old, names[old]))


def _name(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return (_name(number // 26 - 1) if number >= 26 else "") + letters[number % 26]


def _unwrap(group: Element) -> None:
    """Groups that say nothing give way to what they hold, those that hold one thing to that thing."""
    children: list[Element] = []
    for child in group:
        _unwrap(child)
        if child.tag != "g" or {*child.keys()} - {*SHARED}:
            children.append(child)
        elif not child.attrib:
            children += list(child)
        elif len(child) == 1 and _may_stand_for(child[0], child):
            child[0].attrib = child.attrib | child[0].attrib
            children.append(child[0])
        elif len(child):
            children.append(child)
    group[:] = children


def _may_stand_for(child: Element, group: Element) -> bool:
    """Whether a clip of the group is the same one on its child: not where the child is clipped or moved itself."""
    return "clip-path" not in group.attrib or (child.tag != "use" and not {"clip-path", "transform"} & {*child.keys()})


def _hand_down(group: Element) -> None:
    """Neighbours that look alike stand in a group that says so for all of them."""
    if group.tag in ("defs", "clipPath", "text"):
        return
    children: list[Element] = []
    for look, run in itertools.groupby(group, key=_look):
        alike = list(run)
        if look and len(alike) > 1:
            for one in alike:
                one.attrib = {name: value for name, value in one.items() if name not in SHARED}
            gathered = Element("g", dict(look))
            gathered[:] = alike
            alike = [gathered]
        children += alike
    group[:] = children


def _look(element: Element) -> tuple[tuple[str, str], ...]:
    """What a group may say in the element's place; nothing where a transform moves what clips it."""
    if "clip-path" in element.attrib and (element.tag == "use" or "transform" in element.attrib):
        return ()
    return tuple(sorted((name, value) for name, value in element.items() if name in SHARED))


def _round(element: Element) -> None:
    """Coordinates to DIGITS decimals, paths without what may be left out."""
    for name in COORDINATES:
        if name in element.attrib:
            element.set(name, NUMBER.sub(_rounded, element.attrib[name]))
    if "d" in element.attrib:
        element.set("d", _short_path(element.attrib["d"]))
    if "transform" in element.attrib:
        element.set("transform", MOVE.sub(lambda one: NUMBER.sub(_rounded, one[0]), element.attrib["transform"]))


def _rounded(found: re.Match[str]) -> str:
    text = f"{float(found[0]):.{DIGITS}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _short_path(path: str) -> str:
    """One line, without the command of lines: after a move or another line they follow by themselves."""
    made, last = "", ""
    place: list[str] = []
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        points, before = NUMBER.findall(numbers), place
        place = points[-2:] or place
        if command == "L" and place[1] == before[1]:
            command, points = "H", place[:1]
        elif command == "L" and place[0] == before[0]:
            command, points = "V", place[1:]
        made += (" " if command == last or (command, last) == ("L", "M") else command) + " ".join(points)
        last = command
    return re.sub(r" (?=-)", "", made)
