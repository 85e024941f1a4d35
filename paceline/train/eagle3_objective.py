"""Eagle3Objective: an EAGLE-3 head in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from paceline.models.heads.checkpoint import HeadCheckpoint, write_head
from paceline.models.heads.config import TargetName
from paceline.models.transformer import Transformer
from paceline.train.acceptance import accepted_by_steps
from paceline.train.batches import Batch
from paceline.train.eagle3 import step_losses, unroll
from paceline.train.examples import Examples
from paceline.train.losses import LOSSES, DraftIds, StepLosses
from paceline.train.new_head import choose_draft_ids, head_config, head_from, new_head
from paceline.train.objective import NEW, WriteHead, float16_weights, precision_of
from paceline.train.options import Eagle3Options
from paceline.train.state_cache import StateCache


class Eagle3Objective:
    """Trains a head on its own unrolled drafting; see eagle3.py."""

    method, title = "eagle3", "An EAGLE-3 draft head"

    def __init__(
        self,
        target: Transformer,
        examples: Examples,
        options: Eagle3Options,
        name: TargetName | None = None,
        init_from: HeadCheckpoint | None = None,
    ) -> None:
        """A new head, or the one of `init_from`."""
        self.target, self.name, self.num_steps = target, name, options.unroll
        self.start = NEW if init_from is None else str(init_from.source)
        if init_from is None:
            self.draft_ids = choose_draft_ids(examples.answer_counts(), options.draft_vocab_size)
            config = head_config(target.config, options, name)
            self.network = new_head(config, target, self.draft_ids, options.seed)
        else:
            self.network, self.draft_ids = head_from(init_from, target)
        self._loss = LOSSES[options.loss]
        device = target.embedding.device
        if device.type == "cuda":
            self.network.compile_small_steps()
        self._ids = DraftIds(torch.from_numpy(self.draft_ids).long().to(device), target.head)
        layers = self.network.config.layers_of(target.config.num_layers)
        self._states = StateCache(target, layers, len(examples.tokens), options.keep_states)

    def losses(self, batch: Batch) -> StepLosses:
        """The losses of a batch, per draft step."""
        states = self._states(batch)
        with precision_of(self.target):
            return step_losses(
                self.network,
                self._ids,
                states,
                batch.tokens,
                batch.answers,
                batch.lengths,
                self.num_steps,
                self._loss,
            )

    @torch.no_grad()
    def accepted(self, batch: Batch) -> torch.Tensor:
        """Accepted guesses of a chain after each token: int64 [batch, tokens]; see acceptance.py."""
        states = self._states(batch)
        with precision_of(self.target):
            outputs = unroll(self.network, states.features, batch.tokens, self.num_steps)
            return accepted_by_steps(outputs, self.network.logits, self._ids, batch)

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Nothing to do: trees are shaped by the head's confidence."""

    def snapshot(self) -> WriteHead:
        """A function that writes the head as it is now, in SGLang's format."""
        config = replace(self.network.config, target=self.name)
        head = HeadCheckpoint(config, float16_weights(self.network), self.draft_ids, Path())
        return lambda folder: write_head(head, folder, "sglang")

    def size(self) -> str:
        """The head's size, for its card."""
        config = self.network.config
        return f"hidden {config.hidden_size}, MLP {config.intermediate_size}, {config.num_heads} heads"
