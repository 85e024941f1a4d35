"""StateCache: the target's states of every batch, computed once per example where memory allows.

A step of training spends most of its time in the target, which gives the same states in every epoch. In
float8, with one scale for each hidden state of a token, those of ten million tokens fit on one large GPU:

    values [tokens, features + 1, hidden] float8        scales [tokens, features + 1, 1] float32
    best [tokens] int32

A head that learns from rounded states loses nothing that can be seen: rounding moves them by 2 %, and the
states of one token differ more than that from one quantization of the target to another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.models.transformer.model import Transformer
from paceline.train.loop.batches import Batch, on_device
from paceline.train.loop.sequences import TargetStates, target_states

ROUNDED = torch.float8_e4m3fn
LARGEST = torch.finfo(ROUNDED).max
SMALLEST = 1e-12  # of a scale: states may be zero


class StateCache:
    """Features and final states of batches. The first `gigabytes` of them are kept for later epochs."""

    def __init__(
        self, target: Transformer, feature_layers: Sequence[int], tokens: int, gigabytes: float = 0.0
    ) -> None:
        """`tokens`: of all examples, so that no more memory is taken than they need."""
        self._target, self._layers = target, tuple(feature_layers)
        shape = len(self._layers) + 1, target.config.hidden_size
        bytes_per_token = shape[0] * (shape[1] + torch.float32.itemsize) + torch.int32.itemsize
        room, device = min(tokens, int(1e9 * gigabytes / bytes_per_token)), target.embedding.device
        self._values = torch.empty(room, *shape, dtype=torch.uint8, device=device)  # bytes of ROUNDED
        self._scales = torch.empty(room, shape[0], 1, device=device)
        self._best = torch.empty(room, dtype=torch.int32, device=device)
        self._places: dict[int, int] = {}  # of an example's first token, by its place in the examples
        self._used = 0  # tokens

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TargetStates:
        """The states of a batch; rounded, for examples that were kept."""
        new = [number for number, start in enumerate(batch.starts) if start not in self._places]
        if not batch.starts or len(new) == len(batch.starts):
            states = target_states(self._target, batch, self._layers)
            self._keep(states, batch)
            return states
        kept, best = self._kept(batch)
        if new:
            part, where = batch.part(new)
            states = target_states(self._target, part, self._layers)
            self._keep(states, part)
            kept[:, where], best[:, where] = self._joined(states), states.best
        return TargetStates(kept[:, :, :-1].flatten(2), kept[:, :, -1], best)

    def _joined(self, states: TargetStates) -> torch.Tensor:
        """All states of each token: [1, tokens, features + 1, hidden]."""
        features = states.features.view(*states.final.shape[:2], len(self._layers), -1)
        return torch.cat((features, states.final[:, :, None]), dim=2)

    def _keep(self, states: TargetStates, batch: Batch) -> None:
        """Keep the states of these documents, if all of them fit."""
        end = self._used + sum(batch.sizes)
        if not batch.starts or end > len(self._values):
            return
        wide = self._joined(states)[0].float()
        scales = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=SMALLEST)
        self._values[self._used : end] = (wide / scales).to(ROUNDED).view(torch.uint8)
        self._scales[self._used : end] = scales
        self._best[self._used : end] = states.best[0].int()
        for start, size in zip(batch.starts, batch.sizes, strict=True):
            self._places[start] = self._used
            self._used += size

    def _kept(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The kept states [1, tokens, features + 1, hidden] and best tokens; of other documents, any."""
        places = np.repeat([self._places.get(start, 0) for start in batch.starts], batch.sizes)
        rows = (on_device(places, batch.device) + batch.positions).clamp(max=self._used - 1)
        states = self._values[rows].view(ROUNDED).float() * self._scales[rows]
        return states.to(self._target.dtype)[None], self._best[rows].long()[None]
