"""One or several processes (torchrun) that train one head."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist


class Processes(Protocol):
    """The processes of a run, seen from one of them."""

    rank: int  # of this process; rank 0 writes files and reports progress
    number: int

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its mean over all processes, which pass the same ones in the same order."""
        ...

    def agree(self, value: int) -> int:
        """The value of rank 0, on every rank."""
        ...


class SingleProcess:
    """A single process."""

    rank, number = 0, 1

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def agree(self, value: int) -> int:
        return value


class DistributedProcesses:
    """The processes that torchrun started, one per GPU."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.number = dist.get_rank(), dist.get_world_size()
        self.device = device

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= self.number

    def agree(self, value: int) -> int:
        shared = torch.tensor(value, device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared)


def started_by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def processes_on(device: str) -> tuple[Processes, torch.device]:
    """The processes of this run, and this process's device: under torchrun, each has its own GPU."""
    if not started_by_torchrun():
        return SingleProcess(), torch.device(device)
    own_device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if device.startswith("cuda") else device)
    return DistributedProcesses(own_device), own_device
