"""The transformer: one readable torch model for all families.

Families differ only by what ModelConfig declares: biases, norms and where they are, windows, rope, scales,
experts, recurrent layers. A pass takes rows, not sequences: see rows.py. So prefill, decoding and draft trees
are the same code.

The weights have the names and shapes of checkpoint.py; constructors take each of them once. A matrix is one
tensor, or as many as the model has pieces: see tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch

from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.transformer.attention import (
    Rotation,
    soft_cap,
)
from paceline.models.transformer.blocks import (
    NORMS,
    PerLayerInputs,
    Take,
    Vocabulary,
)
from paceline.models.transformer.layer import Layer, Recurrent, rotation_of
from paceline.models.transformer.recurrent import States
from paceline.models.transformer.rope import rope_frequencies
from paceline.models.transformer.rows import KeyValues, Rows
from paceline.models.transformer.tensor_parallel import WHOLE, TensorParallel


class Transformer:
    """A whole decoder, or a rank's pieces of one: token rows in, hidden states and logits out."""

    def __init__(
        self, config: ModelConfig, take: Take, parallel: TensorParallel = WHOLE, row_by_row: bool = False
    ) -> None:
        """`row_by_row`: a row is computed as if it were alone, so that its bits depend on its path only."""
        self.config, self.parallel, self.row_by_row = config, parallel, row_by_row
        self.vocabulary = Vocabulary(take, "model.embed_tokens.weight", config.vocab_size, parallel)
        inputs = config.per_layer_input
        self.per_layer_inputs = None if inputs is None else PerLayerInputs(take, config, inputs)
        self.layers = [Layer(take, config, layer, parallel) for layer in range(config.num_layers)]
        self.norm = NORMS[config.norm](take, "model.norm", config.rms_norm_eps)
        self.lm_head = (
            self.vocabulary
            if config.tie_embeddings
            else Vocabulary(take, "lm_head.weight", config.vocab_size, parallel)
        )
        self.dtype, self.device = self.norm.weight.dtype, self.norm.weight.device
        ropes = {config.rope_of(layer) for layer in range(config.num_layers)} - {None}
        # float32 [rotated values of a head // 2] each
        self.frequencies = {rope: self._frequencies(rope) for rope in ropes if rope is not None}

    @property
    def embedding(self) -> torch.Tensor:
        """The whole embedding [vocab, hidden] of a model in one piece."""
        (table,) = self.vocabulary.tables
        return table

    @property
    def head(self) -> torch.Tensor:
        """The whole output matrix [vocab, hidden] of a model in one piece."""
        (table,) = self.lm_head.tables
        return table

    def first_layers(self, count: int) -> Transformer:
        """The model of the first `count` layers, with the same weights."""
        early = copy(self)
        early.layers = self.layers[:count]
        early.config = replace(self.config, num_layers=count)
        return early

    def hidden_states(
        self, rows: Rows, cache: KeyValues, wanted: Sequence[int] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The last layer's output [rows, hidden], before the final norm, and the wanted hidden states.

        Index 0 is the embedding's output, index i the output of layer i - 1.
        """
        parts = rows.single_rows() if self.row_by_row else [rows]
        rotations = [self.rotations(part.positions) for part in parts]
        hidden = [self.embed(part.tokens) for part in parts]
        given = [self._given(part.tokens, states) for part, states in zip(parts, hidden, strict=True)]
        seen = {0: hidden}
        for index, layer in enumerate(self.layers):
            rope = self.config.rope_of(index)
            inputs = zip(hidden, parts, rotations, given, strict=True)
            hidden = [
                layer(states, part, rotation[rope], cache, own[index])
                for states, part, rotation, own in inputs
            ]
            if index + 1 in wanted:
                seen[index + 1] = hidden
        return torch.cat(hidden), [torch.cat(seen[index]) for index in wanted]

    @property
    def recurrences(self) -> list[Recurrent]:
        """The mixers of the recurrent layers, in order."""
        return [self.layers[layer].recurrence for layer in self.config.recurrent_layers]

    def make_states(self, count: int) -> States:
        """Zeroed storage for `count` states of every recurrent layer."""
        return States([mixer.make_states(count, self.device) for mixer in self.recurrences])

    def advance(self, states: States, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]) -> None:
        """Replace a slot's states by those after an accepted path: see RecurrentMixer.advance."""
        for mixer in self.recurrences:
            mixer.advance(states, slot, rows, checkpoints)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream at the bottom [..., hidden] of token ids."""
        hidden, scale = self.vocabulary.embed(tokens), self.config.embedding_scale
        # the factor is rounded first, as models were trained with it
        return hidden if scale == 1 else hidden * torch.tensor(scale, dtype=hidden.dtype)

    def _given(self, tokens: torch.Tensor, embedded: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """What each layer is given beside the residual stream: [rows, size] each, or nothing."""
        if self.per_layer_inputs is None:
            return [None] * len(self.layers)
        return [*self.per_layer_inputs(tokens, embedded)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab] of last hidden states [rows, hidden]."""
        return self.parallel.join(self.logit_parts(hidden), self.config.vocab_size)

    def logit_parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The logits [rows, piece] of each piece of the vocabulary that this rank has."""
        if self.row_by_row and len(hidden) > 1:
            single = [self.logit_parts(row) for row in torch.split(hidden, 1)]
            return [torch.cat(part) for part in zip(*single, strict=True)]
        scale, cap = self.config.logits_scale, self.config.logits_softcap
        parts = self.lm_head.parts(self.norm(hidden))
        return [soft_cap(part if scale == 1 else part * scale, cap) for part in parts]

    def rotations(self, positions: torch.Tensor) -> dict[RopeConfig | None, Rotation | None]:
        """The rotation of each row by its position, for every rope that a layer has."""
        return {None: None} | {
            rope: rotation_of(rope, frequencies, positions, self.dtype)
            for rope, frequencies in self.frequencies.items()
        }

    def _frequencies(self, rope: RopeConfig) -> torch.Tensor:
        return torch.from_numpy(rope_frequencies(rope, self.config.head_dim)).to(self.device)
