"""What a trainer trains: the contract between the loop and a kind of head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.models.safetensors_files import SafeTensor
from paceline.models.safetensors_writer import encode
from paceline.models.transformer import Transformer
from paceline.train.batches import Batch
from paceline.train.losses import StepLosses

NEW = "new"
Int32Array = npt.NDArray[np.int32]
WriteHead = Callable[[Path], None]  # writes a head into a folder


class Objective(Protocol):
    """A head in training: what changes, and what it is to become."""

    method: str  # what speculative_config calls such a head
    title: str  # what people call it
    target: Transformer
    draft_ids: Int32Array  # [draft vocabulary] what it can guess
    num_steps: int  # tokens ahead that it learns to guess
    start: str  # what it began as: NEW, or the head that is trained further

    @property
    def network(self) -> nn.Module:
        """What is trained: all of its parameters."""
        ...

    def losses(self, batch: Batch) -> StepLosses:
        """What the head is taught by a batch, for each token ahead."""
        ...

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Called after training, with what was held out: the place to find out what the head is good at."""
        ...

    def snapshot(self) -> WriteHead:
        """What writes the head as it is now, whenever that is called."""
        ...

    def size(self) -> str:
        """How large the head is, for its card."""
        ...


def float16_weights(network: nn.Module) -> Mapping[str, SafeTensor]:
    """A copy of all parameters in float16, by name."""
    return {
        name: encode(parameter.detach().float().cpu().numpy(), "F16")
        for name, parameter in network.named_parameters()
    }


def precision_of(target: Transformer) -> AbstractContextManager[Any]:
    """bfloat16 products where the target is in bfloat16, else none but its own."""
    dtype = target.embedding.dtype
    return torch.autocast(target.embedding.device.type, dtype, enabled=dtype == torch.bfloat16)
