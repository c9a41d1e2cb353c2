"""matplotlib's SVG in about half of its bytes, by scour."""

from __future__ import annotations

import re

DIGITS = 5  # significant ones of a coordinate: a hundredth of a point, where a panel has 324


def small(svg: str) -> str:
    """The same picture, from its `<svg` on: numbers shortened, styles as attributes, unused ids and metadata gone.

    Where scour is not installed the picture is as it was.
    """
    try:
        from scour import scour
    except ImportError:
        return svg[svg.index("<svg") :]
    options = scour.generateDefaultOptions()
    options.digits = options.cdigits = DIGITS
    options.remove_metadata = options.strip_comments = options.strip_ids = options.shorten_ids = True
    options.group_create, options.simple_colors = True, False  # colours may be placeholders
    options.newlines, options.indent_type, options.quiet = False, "none", True
    made = str(scour.scourString(svg, options))
    made = re.sub(r' transform="rotate\(-?0[ ,)][^"]*"', "", made[made.index("<svg") :])
    return re.sub(r'( [xy]="-?\d+\.\d\d)\d+"', r'\1"', made).strip()
