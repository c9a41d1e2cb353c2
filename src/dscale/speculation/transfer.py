"""Numbers from the host to the device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def place(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of these numbers on the device. To a GPU they go in stream order through pinned memory, which torch
    keeps until the copy has run; an ordinary copy would wait for everything queued before it."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def place_tensor(values: Tensor, out: Tensor) -> None:
    """Copy a tensor of the host into `out`, in place; to a GPU as `place` does."""
    if out.is_cuda:
        out.copy_(values.pin_memory(), non_blocking=True)
    else:
        out.copy_(values)
