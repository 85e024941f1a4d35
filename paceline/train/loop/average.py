"""WeightAverage: an exponential moving average of the weights in training.

The last weights of a run follow the latest batches; their average guesses a little better and is what a run
writes. Training itself continues with the unaveraged weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

WARMUP = 10  # steps: an average over more than have been done would keep the untrained weights


class WeightAverage:
    """The average of some parameters, by name; empty if the decay is 0."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.tensors = {name: each.detach().clone() for name, each in parameters.items()} if decay else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the parameters after this many steps."""
        decay = min(self._decay, (1 + step) / (WARMUP + step))
        if self.tensors:
            latest = [self._parameters[name] for name in self.tensors]
            torch._foreach_lerp_(list(self.tensors.values()), latest, 1 - decay)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the tensors of a checkpoint."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the parameters are their average."""
        latest = {name: self._parameters[name].detach().clone() for name in self.tensors}
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, values in latest.items():
                    self._parameters[name].copy_(values)

    @torch.no_grad()
    def apply(self) -> None:
        """Overwrite the parameters with their average."""
        for name, average in self.tensors.items():
            self._parameters[name].copy_(average)
