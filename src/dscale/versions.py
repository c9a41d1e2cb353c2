"""Versions that a record carries."""

from __future__ import annotations

import platform


def versions() -> dict[str, str]:
    """dscale, torch, transformers and Python; imported here and not before, so that a command's start stays quick."""
    import torch
    import transformers

    import dscale

    return {
        "dscale": dscale.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
