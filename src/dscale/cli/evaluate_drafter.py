"""`dscale evaluate drafter`: E[L] on uniform anchors, on the re-anchored walk and as served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dscale.config import InputError


def drafter(
    target: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file or alias (smollm2-135m).")],
    drafter: Annotated[str, typer.Argument(help="Drafter folder; auto takes the shipped one.")],
    out: Annotated[Path, typer.Argument(help="Output folder.")],
) -> None:
    """Accepted length by depth on uniform anchors, on the re-anchored walk and as served.

    Example: dscale evaluate drafter smollm2-135m auto out/eval --preset tiny
    """
    raise InputError("evaluate drafter: being built")
