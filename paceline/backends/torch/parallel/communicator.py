"""GroupCommunicator: all-gather across ranks by torch.distributed, with NCCL between GPUs, else gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from paceline.errors import BackendLostError

_DISTRIBUTED: Any = torch.distributed  # stores and groups are not in its stubs
LOOPBACK = "127.0.0.1"  # all ranks are on one machine, and no other machine may connect


class RankLostError(BackendLostError):
    """Another rank is gone, or does not answer."""


class GroupCommunicator:
    """One rank of a separate process group: torch's default group is left to the user."""

    def __init__(self, rank: int, devices: Sequence[torch.device], store: str, timeout: float) -> None:
        """Join the ranks, one per device, by the file `store`. `timeout`: seconds of a collective."""
        self.rank, self.size = rank, len(devices)
        self._device = devices[rank]
        # NCCL refuses two ranks on one GPU
        self._on_device = self._device.type == "cuda" and len(set(devices)) == len(devices)
        meeting = _DISTRIBUTED.FileStore(store, self.size)
        meeting.set_timeout(timedelta(seconds=timeout))
        make = _nccl_group if self._on_device else _gloo_group
        try:
            self._group = make(meeting, rank, self.size, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} of {self.size} did not find the others: {error}") from error

    def abort(self) -> None:
        """Abort collectives that wait for a lost rank (NCCL). With gloo they end by themselves."""
        if self._on_device:
            self._group.abort()

    def gather_into(self, full: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> None:
        """All-gather: write the tensors of all ranks, in rank order, to `full` [ranks, ...] of each.

        With NCCL it is one launch, which a CUDA graph can capture.
        """
        if not self._on_device:
            for to, part in zip(full, local, strict=True):
                for line, theirs in zip(to, self.gather(part), strict=True):
                    line.copy_(theirs)
            return
        self._group._start_coalescing()
        for to, part in zip(full, local, strict=True):
            sent = part.contiguous().view(torch.uint8).flatten()
            self._group._allgather_base(to.view(torch.uint8).flatten(), sent)
        self._group._end_coalescing().wait()

    def gather(self, local: torch.Tensor) -> list[torch.Tensor]:
        if not local.numel():
            return [local] * self.size
        # as bytes: gloo does not support every dtype, and an all-gather only copies
        sent = local.contiguous().view(torch.uint8)
        if not self._on_device:
            sent = sent.cpu()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        try:
            self._group.allgather([received], [sent]).wait()
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} lost another rank: {error}") from error
        return [part.to(self._device).view(local.dtype) for part in received]


def _gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    group = _DISTRIBUTED.ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return group(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    group = _DISTRIBUTED.ProcessGroupNCCL
    options = group.Options()
    options._timeout = timeout
    return group(store, rank, size, options)
