"""Objective: the contract between the training loop and a kind of head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from paceline.core.arrays import Int32Array
from paceline.models.safetensors_files import SafeTensor
from paceline.models.safetensors_writer import encode
from paceline.models.transformer import Transformer
from paceline.train.batches import Batch
from paceline.train.losses import StepLosses

NEW = "new"
WriteHead = Callable[[Path], None]  # writes a head into a folder


class Objective(Protocol):
    """A head in training: its parameters, its losses, and how it is written."""

    method: str  # its method in speculative_config
    title: str  # its name in texts
    target: Transformer
    draft_ids: Int32Array  # [draft vocabulary] target ids that it can predict
    num_steps: int  # tokens ahead that it predicts
    start: str  # NEW, or the name of the head that is trained further

    @property
    def network(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    def losses(self, batch: Batch) -> StepLosses:
        """The losses of a batch, per token ahead."""
        ...

    def accepted(self, batch: Batch) -> torch.Tensor:
        """Accepted guesses of a chain after each token: int64 [batch, tokens]; see acceptance.py."""
        ...

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Called after training with the held-out batches, for what depends on the head's accuracy."""
        ...

    def snapshot(self) -> WriteHead:
        """A function that writes the head as it is now, whenever it is called."""
        ...

    def size(self) -> str:
        """The head's size, for its card."""
        ...


def float16_weights(network: nn.Module) -> Mapping[str, SafeTensor]:
    """A copy of all parameters in float16, by name."""
    return {
        name: encode(parameter.detach().float().cpu().numpy(), "F16")
        for name, parameter in network.named_parameters()
    }


def precision_of(target: Transformer) -> AbstractContextManager[Any]:
    """Autocast to bfloat16 if the target is in bfloat16; otherwise no change."""
    dtype = target.embedding.dtype
    return torch.autocast(target.embedding.device.type, dtype, enabled=dtype == torch.bfloat16)
