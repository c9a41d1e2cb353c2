"""Kernels that start before the one ahead has ended: programmatic dependent launch, of Hopper and later chips.

A kernel launched with `**launch(device)` is scheduled as soon as every program of the kernel ahead has let it (or has
ended, for a kernel of a library), and calls `wait_for_earlier` before it touches memory. What a launch costs, and
`fetch_early`, then pass while the last programs ahead still run.

The wait ends once the kernel ahead is complete and its writes are seen. That kernel waited itself, so everything ahead
of it is complete too: this holds only while every program waits, whatever it goes on to do. So nothing may stand before
the wait that reads or writes memory of the device: no load, no store, no return.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, griddepcontrol.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import os
from functools import lru_cache

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a triton without them, or for other chips
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Wait for the kernels ahead, then let the next one start. Nothing where OVERLAP is off."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_early(start, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Bring `size` numbers at `start`, at most BLOCK, into the L2 cache; nothing where OVERLAP is off.

    This may stand before the wait, where a load of the same may not: a later write goes to the same cache, so that what
    is loaded after the wait is never old.
    """
    if OVERLAP:
        LINE: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
        LINES: tl.constexpr = (BLOCK + LINE - 1) // LINE
        at = start + tl.minimum(tl.arange(0, LINES) * LINE, size - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@lru_cache
def launch(device: torch.device) -> dict[str, bool]:
    """Keywords of a launch on this device: OVERLAP, what the kernel hands to the functions above, and launch_pdl.

    On for CUDA devices of compute capability 9.0 and later; off elsewhere, in Triton's interpreter, and where the
    environment has DSCALE_OVERLAP=0. Read once: launch.cache_clear() makes it read again.
    """
    if _on(device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def _on(device: torch.device) -> bool:
    interpreted = not isinstance(wait_for_earlier, triton.JITFunction)
    if interpreted or os.environ.get("DSCALE_OVERLAP", "1") == "0":
        return False
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0) and _declared()


def _declared() -> bool:
    """Whether this triton knows both the instructions and the option of the launch."""
    if gdc_wait is None:
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return "launch_pdl" in CUDAOptions.__dataclass_fields__
