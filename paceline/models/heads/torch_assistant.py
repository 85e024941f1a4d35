"""The network of an assistant in torch: see assistant.py for what it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.heads.assistant import CENTROIDS, POST, PRE, AssistantCheckpoint
from paceline.models.transformer.blocks import Linear, Take
from paceline.models.transformer.model import Transformer
from paceline.models.transformer.rows import KeyValues, Rows


class Assistant(Transformer):
    """A small Gemma 4 whose layers attend to the keys and values of its target."""

    def __init__(self, checkpoint: AssistantCheckpoint, target: Transformer, take: Take) -> None:
        super().__init__(checkpoint.beside(target.config), take, target.parallel)  # the cache has its pieces
        self.pre = Linear(take, PRE.removesuffix(".weight"), self.config.hidden_size)
        self.post = Linear(take, POST.removesuffix(".weight"), target.config.hidden_size)
        self.clusters = checkpoint.clusters
        if self.clusters is not None:
            self.centroids = take(CENTROIDS)
            self.cluster_tokens = torch.from_numpy(self.clusters.tokens).to(self.device)

    def outputs(self, embedded: Tensor, states: Tensor, rows: Rows, cache: KeyValues) -> Tensor:
        """The normed outputs [rows, hidden] of steps that read the target's embeddings and states [rows, Ht].

        `cache` is the target's: nothing is written to it.
        """
        hidden, rotations = self.pre(torch.cat((embedded, states), dim=-1)), self.rotations(rows.positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rows, rotations[self.config.rope_of(index)], cache)
        return self.norm(hidden)

    def feed_back(self, outputs: Tensor) -> Tensor:
        """The states [rows, Ht] that the next steps read."""
        return self.post(outputs)

    def scores(self, outputs: Tensor) -> Tensor:
        """Logits [rows, vocab] of normed outputs; -inf for tokens outside of the chosen clusters."""
        logits = self.lm_head.logits(outputs)
        if self.clusters is None:
            return logits
        best = (outputs @ self.centroids.T).topk(self.clusters.chosen, dim=-1).indices
        tokens = self.cluster_tokens[best].flatten(1)
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, logits.gather(-1, tokens))
