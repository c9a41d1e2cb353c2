"""What a record was measured on; no name of the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """System, processor, cores this process may use, threads of torch, memory, and GPUs where there are any."""
    import torch

    made: dict[str, Any] = {"platform": platform.system(), "processor": processor(), "cores": cores()}
    made["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    made["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        made |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return made


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
