"""Limits of a trainer beside a server: few cores, or a share of the time of the server's GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import ConfigError
from paceline.learn.activity import Activity
from paceline.learn.training.yielding import StoppedTime, Yielding
from paceline.models.checkpoint import Checkpoint
from paceline.models.transformer.model import Transformer
from paceline.options import check_number
from paceline.train.loop.sequences import load_target


@dataclass(frozen=True)
class Limits:
    """How much a trainer may use. The shares are of a GPU's time; on a CPU its low priority is enough."""

    threads: int = 1
    gpu_share: float = 0.1
    busy_share: float | None = None  # while requests run, by `activity`; None: the same
    activity: Path | None = None  # of the server that has started this process
    end_with_parent: bool = False

    def __post_init__(self) -> None:
        for name in ("gpu_share", "busy_share"):
            if (share := getattr(self, name)) is not None:
                check_number(ConfigError, name, share, 0.0, 1.0, low_open=True)


def yielding_on(device: str, limits: Limits) -> Yielding:
    """The Yielding of a trainer on this device.

    On a GPU nothing is compiled from now on: that takes 100 s of CPU time, and a training has few steps.
    """
    torch.set_num_threads(limits.threads)
    if device == "cpu":  # stands still while the process is stopped, or gets no core
        return Yielding(end_with_parent=limits.end_with_parent, clock=time.thread_time)
    stopped_time = StoppedTime()
    stopped_time.watch()
    torch.compiler.set_stance("force_eager")
    return Yielding(
        limits.gpu_share,
        limits.busy_share,
        None if limits.activity is None else Activity(limits.activity),
        limits.end_with_parent,
        stopped_time.seconds,
        # launches return before the device is done: without it, a step would seem to take no time
        finish=torch.cuda.synchronize,
    )


def load_target_beside_server(checkpoint: Checkpoint, device: str) -> Transformer:
    """The target on this device; ConfigError if a GPU has no room for it beside the server's."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        return load_target(checkpoint, torch.device(device), dtype)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The GPU has no room for a second copy of the model, which training needs beside the server: "
            "lower the server's --gpu-memory-utilization, or train on the CPU with --device cpu."
        ) from error
