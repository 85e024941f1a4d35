"""Limits of a trainer beside a server: few cores, or a share of the time of the server's GPU."""

from __future__ import annotations

import torch

from paceline.errors import ConfigError
from paceline.learn.yielding import StoppedTime, Yielding
from paceline.models.checkpoint import Checkpoint
from paceline.models.transformer import Transformer
from paceline.train.sequences import load_target


def yielding_on(device: str, threads: int, gpu_share: float, end_with_parent: bool) -> Yielding:
    """The Yielding of a trainer on this device. On a CPU its low priority is enough, so its share is 1.

    On a GPU nothing is compiled from now on: that takes 100 s of CPU time, and a training has few steps.
    """
    torch.set_num_threads(threads)
    stopped_time = StoppedTime()
    stopped_time.watch()
    if device == "cpu":
        return Yielding(1.0, end_with_parent, stopped_time.seconds)
    torch.compiler.set_stance("force_eager")
    # launches return before the device is done: without `finish`, a step would seem to take no time
    return Yielding(gpu_share, end_with_parent, stopped_time.seconds, finish=torch.cuda.synchronize)


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
