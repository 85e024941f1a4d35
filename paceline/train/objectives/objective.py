"""Objective: what the training loop asks of a kind of head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.arrays import Int32Array
from paceline.models.files.safetensors_files import SafeTensor
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import HeadCheckpoint, write_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.medusa import MedusaCheckpoint
from paceline.models.heads.torch_head import BesideTarget
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop.batches import Batch
from paceline.train.loop.prefix_cache import PrefixCache
from paceline.train.loop.sequences import TargetStates
from paceline.train.loop.state_cache import StateCache
from paceline.train.objectives.losses import LOSSES, DraftIds, StepLosses
from paceline.train.options import TrainOptions

NEW = "new"
WriteHead = Callable[[Path], None]  # writes a head into a folder


class Objective(ABC):
    """A head in training: its parameters, its losses, and how it is written."""

    method: str  # its method in speculative_config
    recipe: str  # its name in `paceline train`
    title: str  # its name in texts
    num_steps: int  # tokens ahead that it predicts
    network: nn.Module  # whose parameters are trained

    def __init__(
        self,
        target: Transformer,
        examples: Examples,
        options: TrainOptions,
        draft_ids: Int32Array,
        layers: Sequence[int],
        init_from: HeadCheckpoint | MedusaCheckpoint | None,
    ) -> None:
        """A head that predicts the target ids `draft_ids` [draft vocabulary] from the hidden states `layers`.

        `init_from` is the head that is trained further; None: it is new.
        """
        self.target, self.draft_ids, self.layers = target, draft_ids, tuple(layers)
        self.start = NEW if init_from is None else str(init_from.source)
        self._loss = LOSSES[options.loss]
        ids = torch.from_numpy(draft_ids).long().to(target.embedding.device)
        self._ids = DraftIds(ids, target.head)
        self._states: StateCache | PrefixCache = StateCache(
            target, layers, len(examples.tokens), options.keep_states
        )

    def reuse_prefixes(self) -> None:
        """Compute the common start of prompts once: see PrefixCache.

        Then the states of a batch depend on the batches before it, by rounding: a training that is to be
        resumed bit for bit cannot do that.
        """
        self._states = PrefixCache(self.target, self.layers)

    @abstractmethod
    def losses(self, batch: Batch) -> StepLosses:
        """The losses of a batch, per token ahead."""

    def states(self, batch: Batch) -> TargetStates:
        """The target's states of a batch: the same for all heads that read the same `layers`."""
        return self._states(batch)

    @abstractmethod
    def accepted(self, batch: Batch, states: TargetStates | None = None) -> torch.Tensor:
        """Accepted guesses of a chain after each token: int64 [batch, tokens]; see acceptance.py.

        `states`: of the batch, if they are known.
        """

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Called after training with the held-out batches, for what depends on the head's accuracy."""
        return  # not abstract: most trees are shaped by the head's confidence

    @abstractmethod
    def snapshot(self) -> WriteHead:
        """A function that writes the head as it is now, whenever it is called."""

    @abstractmethod
    def size(self) -> str:
        """The head's size, for its card."""


def write_later(network: BesideTarget, draft_ids: Int32Array, target: TargetName | None) -> WriteHead:
    """A function that writes a head as it is now, in the format that vLLM and SGLang load."""
    config = replace(network.config, target=target)
    head = HeadCheckpoint(config, float16_weights(network), draft_ids, Path())
    return lambda folder: write_head(head, folder, "vllm")


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
