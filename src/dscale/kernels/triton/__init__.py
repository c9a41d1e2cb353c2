"""Triton versions of the kernels, for CUDA devices. Nothing here imports triton before a kernel is wanted."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

from torch import Tensor


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether the triton package is installed."""
    return find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Whether a Triton kernel can work on this tensor."""
    return x.is_cuda and available()
