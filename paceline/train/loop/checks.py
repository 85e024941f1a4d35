"""AcceptanceChecks: which weights of a run are written, and whether it continues.

Acceptance can fall while the loss still improves, so neither is decided by the loss. A few times in a run the
head, as it would be written, is measured on held-out answers by replayed chains (acceptance.py); the weights
with most tokens per pass are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from paceline.train.loop.acceptance import tokens_per_pass
from paceline.train.loop.average import WeightAverage
from paceline.train.loop.batches import Batch
from paceline.train.loop.progress import Check, Progress
from paceline.train.loop.rounding import round_matrices, rounded_weights
from paceline.train.objectives.objective import Objective
from paceline.train.options import TrainOptions

CHECKED_BATCHES = 2  # held-out batches of a check; a parallel head guesses after every token of them
LEAST_STEPS = 64  # between two checks; a check takes as long as about 2 steps, 6 with a parallel head
FALLEN = 0.99  # of the best: fewer tokens per pass are no noise
FALLEN_CHECKS = 3  # in a row end a run


class AcceptanceChecks:
    """The checks of one run. Without `checks` there are none, and the last weights are kept."""

    def __init__(self, objective: Objective, average: WeightAverage, options: TrainOptions) -> None:
        self.best: dict[str, Tensor] = {}  # the weights that accept most, by name
        self._objective, self._average, self._options = objective, average, options
        self._parameters = dict(objective.network.named_parameters())

    def is_due(self, progress: Progress) -> bool:
        """Whether to measure now: at the first step, at the last, and at most as often as asked in between.

        Short runs are never measured.
        """
        if not self._options.checks or (not progress.checks and progress.total < LEAST_STEPS):
            return False
        every = max(LEAST_STEPS, progress.total // self._options.checks)
        last = progress.checks[-1].step if progress.checks else -every
        return progress.step >= last + every or last < progress.step >= progress.total

    @torch.no_grad()
    def measure(self, progress: Progress, batches: Iterable[Batch]) -> None:
        """Add a check on these batches to the progress, and keep the weights if none accept more."""
        with self._average.applied():
            kept = {name: each.detach().clone() for name, each in self._parameters.items()}
            rounds = self._options.round_weights
            with rounded_weights(self._parameters) if rounds else nullcontext():
                check = Check(progress.step, tokens_per_pass(self._objective.accepted, batches))
        progress.checks.append(check)
        if progress.best is check:
            self.best = kept

    @staticmethod
    def has_fallen(progress: Progress) -> bool:
        """Whether the head accepts less than before, and the second half of the run has not mended it.

        In the first half a high learning rate may cost a trained head what it gains back later.
        """
        latest = progress.checks[-FALLEN_CHECKS:]
        if progress.best is None or len(latest) < FALLEN_CHECKS or 2 * progress.step < progress.total:
            return False
        return all(check.tokens_per_pass < FALLEN * progress.best.tokens_per_pass for check in latest)

    @torch.no_grad()
    def apply(self) -> None:
        """Overwrite the parameters with the best ones; without checks, with their average."""
        self._average.apply()
        for name, tensor in self.best.items():
            self._parameters[name].copy_(tensor)
        if self._options.round_weights:
            round_matrices(self._parameters)

    def load(self, best: Mapping[str, Tensor]) -> None:
        """Continue from the tensors of a checkpoint."""
        self.best = {name: tensor.to(self._parameters[name].device) for name, tensor in best.items()}
