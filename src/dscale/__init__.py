"""DScale: block-diffusion speculative decoding with adaptive verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from dscale.config import SamplingParams
    from dscale.engine.llm import LLM
    from dscale.engine.outputs import RequestOutput

_HOMES = {"LLM": "dscale.engine.llm", "SamplingParams": "dscale.config", "RequestOutput": "dscale.engine.outputs"}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that `dscale --help` does not wait for torch."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'dscale' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
