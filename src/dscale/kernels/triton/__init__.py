"""Triton versions of the kernels, for CUDA devices. Nothing here imports triton before a kernel is wanted.

Nothing is read on the host, so every call can be captured in a CUDA graph.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether the triton package is installed."""
    return find_spec("triton") is not None


def dense(*vectors: Tensor) -> list[Tensor]:
    """The same vectors without gaps between their numbers: kernels are given addresses, not strides of these."""
    return [vector.contiguous() for vector in vectors]


def usable(x: Tensor) -> bool:
    """Whether a Triton kernel works on this tensor: on CUDA, no gradient wanted, and DSCALE_TRITON is not 0.

    DSCALE_TRITON=interpret, beside TRITON_INTERPRET=1: on a CPU too, to test what surrounds the kernels.
    """
    wanted = os.environ.get("DSCALE_TRITON", "1")
    if not (x.is_cuda or wanted == "interpret") or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return wanted != "0" and available()
