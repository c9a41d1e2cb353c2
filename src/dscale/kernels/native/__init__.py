"""CPU kernels in C++, compiled once at first use and cached; every one has a plain torch version beside its caller.

Without a C++ compiler, or with DSCALE_NATIVE=0, `usable` is False and the torch versions run.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PackedWeight:
    """A linear weight in the order the CPU kernel reads it."""

    data: Tensor
    max_rows: int


def usable(x: Tensor) -> bool:
    """True when the native kernels are loaded and take this tensor (CPU, no gradient, float32 or bfloat16)."""
    return False


def pack(weight: Tensor) -> PackedWeight | None:
    """A copy of a linear weight [out, in] for the native kernel, or None where that kernel would not be used."""
    return None


def rms_norm(*arguments: object) -> Tensor:
    raise RuntimeError("native kernels are not loaded")


def add_rms_norm(*arguments: object) -> tuple[Tensor, Tensor]:
    raise RuntimeError("native kernels are not loaded")


def silu_mul(*arguments: object) -> Tensor:
    raise RuntimeError("native kernels are not loaded")


def linear(*arguments: object) -> Tensor:
    raise RuntimeError("native kernels are not loaded")


def split_rotate_write(*arguments: object) -> Tensor:
    raise RuntimeError("native kernels are not loaded")


def paged_attention(*arguments: object) -> Tensor:
    raise RuntimeError("native kernels are not loaded")
