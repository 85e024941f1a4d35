"""Medusa heads in training: each predicts, from the target's last hidden state, one token further ahead.

    token       x0   x1   x2   x3   x4
    state       s0                          after the target's final norm
    head 0 of s0 predicts x2, head 1 predicts x3, ...: x1 is the target's own next token

So head k predicts what step k of an EAGLE-3 head does, and is compared with the same tokens: see
losses.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.arrays import Int32Array
from paceline.errors import ConfigError
from paceline.models.heads.config import TargetName
from paceline.models.heads.medusa import MedusaCheckpoint, MedusaConfig, write_medusa
from paceline.models.heads.torch_medusa import TorchMedusa
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop.acceptance import accepted_by_steps
from paceline.train.loop.batches import Batch
from paceline.train.loop.sequences import TargetStates
from paceline.train.objectives.losses import StepLosses, distillation_losses
from paceline.train.objectives.new_head import choose_draft_ids
from paceline.train.objectives.objective import Objective, WriteHead, float16_weights, precision_of
from paceline.train.options import MedusaOptions

MAX_TREE_PATHS = 64  # of the tree stored with the heads
MAX_BRANCHES = 10  # candidates per head in a tree
NEVER = 1 << 30  # rank of a token outside the draft vocabulary


class MedusaObjective(Objective):
    """Trains heads on the target's distributions."""

    method, recipe, title = "medusa", "medusa", "Medusa draft heads"
    network: TorchMedusa

    def __init__(
        self,
        target: Transformer,
        examples: Examples,
        options: MedusaOptions,
        name: TargetName | None = None,
        init_from: MedusaCheckpoint | None = None,
    ) -> None:
        """New heads, or those of `init_from`."""
        if init_from is None:
            draft_ids = choose_draft_ids(examples.answer_counts(), options.draft_vocab_size)
            sizes = options.heads, options.layers, target.config.hidden_size, len(draft_ids)
            self.config = MedusaConfig(*sizes, name)
            self.network = new_medusa(self.config, target, draft_ids)
        else:
            self.config, draft_ids = replace(init_from.config, target=name), _ids_of(init_from, target)
            self.network = TorchMedusa.load(init_from, target.embedding.device, torch.float32)
            self.network.requires_grad_(True)
        layers = (target.config.num_layers,)
        super().__init__(target, examples, options, draft_ids, layers, init_from)
        self.num_steps = self.config.num_heads
        self._paths: tuple[tuple[int, ...], ...] = ()

    def losses(self, batch: Batch) -> StepLosses:
        states = self._states(batch)
        inputs = [states.final] * self.num_steps
        with precision_of(self.target):
            return distillation_losses(inputs, self.network.scores, self._ids, states, batch, self._loss)

    @torch.no_grad()
    def accepted(self, batch: Batch, states: TargetStates | None = None) -> torch.Tensor:
        states = self._states(batch) if states is None else states
        with precision_of(self.target):
            return accepted_by_steps([states.final] * self.num_steps, self.network.scores, self._ids, batch)

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Set the tree that would have been accepted most often on these batches."""
        self._paths = likeliest_paths([rank for batch in batches for rank in self._ranks(batch).tolist()])

    def _ranks(self, batch: Batch) -> torch.Tensor:
        """Rank of the true token for each head, 0 is the best: int64 [answered tokens, heads]."""
        final = self._states(batch).final[0]
        ranks = []
        for begin, answer, size in zip(batch.begins, batch.answers, batch.sizes, strict=True):
            states = final[begin + answer - 1 : begin + size - 2]
            ahead = self._ids.inverse[batch.tokens[0, begin + answer + 1 : begin + size]]
            ahead = F.pad(ahead, (0, self.num_steps), value=-1)  # there are no answered tokens after the end
            with precision_of(self.target):
                guesses = self.network(states)  # [heads, states, draft vocabulary]
            wanted = torch.stack([ahead[head : head + len(states)] for head in range(self.num_steps)])
            better = (guesses > guesses.gather(2, wanted.clamp(min=0)[..., None])).sum(2)
            ranks.append(torch.where(wanted >= 0, better, NEVER).T)
        return torch.cat(ranks)

    def snapshot(self) -> WriteHead:
        """A function that writes the heads as they are now, with vLLM's names."""
        ids = None if len(self.draft_ids) == self.target.config.vocab_size else self.draft_ids
        heads = MedusaCheckpoint(self.config, float16_weights(self.network), ids, Path(), self._paths)
        return lambda folder: write_medusa(heads, folder)

    def size(self) -> str:
        config = self.config
        return f"{config.num_heads} heads of {config.num_layers} blocks, hidden {config.hidden_size}"


def likeliest_paths(
    ranks: Sequence[Sequence[int]], number: int = MAX_TREE_PATHS
) -> tuple[tuple[int, ...], ...]:
    """The paths of a candidate tree that are accepted most often, the best first.

    `ranks` has, per position, each head's rank of the true token. See draft/heads/ranked.py.
    """
    counts = Counter(
        tuple(right[:depth])
        for right in ranks
        for depth in range(1, len(right) + 1)
        if max(right[:depth]) < MAX_BRANCHES
    )
    best = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return tuple(best[:number])


def new_medusa(config: MedusaConfig, target: Transformer, draft_ids: Int32Array) -> TorchMedusa:
    """Heads that all score like the target: their residual blocks still add nothing."""
    heads = TorchMedusa(config)
    rows = target.head[torch.from_numpy(draft_ids).long()]
    with torch.no_grad():
        for parameter in heads.blocks.parameters():
            parameter.zero_()
        for scores in heads.lm_heads.parameters():
            scores.copy_(rows)
    return heads.to(target.embedding.device)


def _ids_of(heads: MedusaCheckpoint, target: Transformer) -> Int32Array:
    """The target ids that the heads predict; ConfigError if the heads belong to another target."""
    config, ids = heads.config, heads.draft_ids
    if ids is None:
        ids = np.arange(config.draft_vocab_size, dtype=np.int32)
    sizes = target.config
    fits = ids.max() < sizes.vocab_size if heads.draft_ids is not None else len(ids) == sizes.vocab_size
    if config.hidden_size != sizes.hidden_size or not fits:
        raise ConfigError(
            f"{heads.source} is for a target with hidden size {config.hidden_size} and token ids up to "
            f"{ids.max()}, but this one has {sizes.hidden_size} and {sizes.vocab_size} tokens. Give heads "
            "that were trained for it."
        )
    return ids
