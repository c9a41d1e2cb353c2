"""Where models run, in what numbers, and what is done to them before they do."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from dscale.config import require
from dscale.kernels import native, triton
from dscale.layers.linear import Linear, deterministic_twin
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.loader import LoadedTarget


def resolve_device(name: str) -> str:
    """auto is the GPU where there is one, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    known = name == "cpu" or name.split(":")[0] == "cuda"
    require(known, f"device: {name!r} is not known; allowed are auto, cpu, cuda, cuda:N")
    require(name == "cpu" or torch.cuda.is_available(), f"device: {name!r} asked for, but no CUDA device is here")
    return name


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 on a GPU and where the CPU kernels run; float32 on other CPUs, whose bf16 arithmetic is emulated."""
    return torch.bfloat16 if device != "cpu" or native.fast_bfloat16() else torch.float32


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30


def deterministic_target(loaded: LoadedTarget) -> LoadedTarget:
    """The target with rows that depend on nothing but themselves. The drafter may stay as it is: it only proposes."""
    size = loaded.config.decoder.head_dim
    with torch.inference_mode():
        fast = triton.usable(loaded.model.embedding)
    require(fast, "deterministic: needs the Triton kernels on a GPU; install triton and leave DSCALE_TRITON alone")
    require(
        16 <= size <= 256 and size & (size - 1) == 0,
        f"deterministic: heads of {size} are not served; allowed are powers of two from 16 to 256",
    )
    return replace(loaded, model=deterministic_twin(loaded.model))


def pack_weights(target: Target, drafter: Drafter | None) -> None:
    """Give every linear layer its copy for the CPU kernels, where those are used."""
    if target.embedding.device.type != "cpu":
        return
    for model in (target, drafter):
        for module in model.modules() if model is not None else ():
            if isinstance(module, Linear) and module.packed is None:
                module.pack()
        if model is not None:
            model.stack.pack()
