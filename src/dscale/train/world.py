"""The processes of a training run: one, or several of torchrun, each with its own share of every batch."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from dscale.config import require


class World:
    """Rank, size, device and the two collectives that training needs. device: auto, cpu, cuda or cuda:N."""

    def __init__(self, device: str = "auto") -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        found = torch.cuda.is_available()
        require(not device.startswith("cuda") or found, f"device: {device}, but torch finds no CUDA device here")
        self.cuda = found if device == "auto" else device.startswith("cuda")
        local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        self.device = torch.device((device if ":" in device else local) if self.cuda else "cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.cuda else "gloo")

    @property
    def first(self) -> bool:
        """True in the process that writes files and talks."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """value added up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def from_first(self, value: Tensor) -> Tensor:
        """The first process's value, in place."""
        if self.size > 1:
            dist.broadcast(value, 0)
        return value

    def wait(self) -> None:
        """Return when every process has come here."""
        self.sum(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Leave the group of processes."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
