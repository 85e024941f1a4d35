"""Eagle3Objective: an EAGLE-3 or P-EAGLE head in training."""

from __future__ import annotations

import torch

from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import TargetName
from paceline.models.heads.torch_head import Head
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop.acceptance import accepted_by_steps
from paceline.train.loop.batches import Batch
from paceline.train.loop.sequences import TargetStates
from paceline.train.objectives.eagle3 import step_losses, unroll
from paceline.train.objectives.losses import StepLosses
from paceline.train.objectives.new_head import choose_draft_ids, head_config, head_from, new_head, rarest_id
from paceline.train.objectives.objective import Objective, WriteHead, precision_of, write_later
from paceline.train.options import Eagle3Options, PEagleOptions

# by whether the head guesses a draft in one pass: its name in `paceline train`, and in texts
NAMES = {False: ("eagle3", "An EAGLE-3 draft head"), True: ("p-eagle", "A P-EAGLE draft head")}


class Eagle3Objective(Objective):
    """Trains a head on its own unrolled drafting; see eagle3.py."""

    method = "eagle3"
    network: Head

    def __init__(
        self,
        target: Transformer,
        examples: Examples,
        options: Eagle3Options,
        name: TargetName | None = None,
        init_from: HeadCheckpoint | None = None,
    ) -> None:
        """A new head, or the one of `init_from`."""
        counts = examples.answer_counts()
        if init_from is None:
            draft_ids = choose_draft_ids(counts, options.draft_vocab_size)
            config = head_config(target.config, options, name, rarest_id(counts))
            self.network = new_head(config, target, draft_ids, options.seed)
        else:
            self.network, draft_ids = head_from(init_from, target, options, counts)
            if isinstance(options, PEagleOptions) and not self.network.config.is_parallel:
                raise ConfigError(f"{init_from.source} is no P-EAGLE head: give one, or use `train eagle3`.")
        config = self.network.config
        self.recipe, self.title = NAMES[config.is_parallel]
        layers = config.layers_of(target.config.num_layers)
        super().__init__(target, examples, options, draft_ids, layers, init_from)
        self.name, self.num_steps = name, options.unroll
        if target.embedding.is_cuda:
            self.network.compile_small_steps()

    def losses(self, batch: Batch) -> StepLosses:
        states = self._states(batch)
        with precision_of(self.target):
            return step_losses(self.network, self._ids, states, batch, self.num_steps, self._loss)

    @torch.no_grad()
    def accepted(self, batch: Batch, states: TargetStates | None = None) -> torch.Tensor:
        states = self._states(batch) if states is None else states
        with precision_of(self.target):
            outputs = unroll(self.network, states.features, batch, self.num_steps)
            return accepted_by_steps(outputs, self.network.logits, self._ids, batch)

    def snapshot(self) -> WriteHead:
        return write_later(self.network, self.draft_ids, self.name)

    def size(self) -> str:
        config = self.network.config
        size = f"hidden {config.hidden_size}, MLP {config.intermediate_size}, {config.num_heads} heads"
        return size if config.mask_token_id is None else f"{config.num_layers} layers, {size}"
