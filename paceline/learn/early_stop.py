"""EarlyStop: keep the weights that draft best on rows that are held back, and end when they get no better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from paceline.learn.selection import NEW, OLD
from paceline.train import acceptance
from paceline.train.batches import collate, epoch_batches
from paceline.train.examples import Examples
from paceline.train.objective import Objective, WriteHead
from paceline.train.progress import Progress

EVALUATIONS = 8  # in a run, besides the one before it
PATIENCE = 3  # evaluations in a row without a gain end the run
MAX_LOSS = 0.01  # of tokens per pass on old rows: more is forgetting (the bar is 2 %)
BATCH_TOKENS = 2048  # of an evaluation, which gives way between two batches

Scores = Mapping[str, float]  # tokens per pass, by group of rows


@dataclass(frozen=True)
class Kept:
    """A head on its way, with what it is worth."""

    step: int
    scores: Scores
    write: WriteHead


@torch.no_grad()
def tokens_per_pass(
    objective: Objective, examples: Examples, may_go_on: Callable[[], bool] = lambda: True
) -> float:
    """What chains of this head gain on these rows; 1 is plain decoding. `may_go_on`: asked before a batch."""
    device = objective.target.embedding.device
    everything = torch.arange(len(examples)).numpy()
    indices = epoch_batches(examples, everything, BATCH_TOKENS, 0, 0)
    batches = (collate(examples, some, device) for some in indices if may_go_on())
    return acceptance.tokens_per_pass(objective.accepted, batches)


class EarlyStop:
    """Measures a head while it trains."""

    def __init__(
        self,
        objective: Objective,
        groups: Mapping[str, Examples],
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """`groups`: rows that are never trained on. The head as it is now is the one to beat.

        `may_go_on`, asked before every batch of an evaluation, waits while it must; if it says no, what is
        measured then is of no use.
        """
        self._objective, self._groups = objective, groups
        self.before = self._measured(0, lambda: True)  # kernels are loaded meanwhile: no measure of its time
        self._may_go_on = may_go_on
        self.best = self.before
        self.last = self.before
        self._without_gain = 0
        self._tokens = sum(len(group.tokens) for group in groups.values())

    def is_due(self, progress: Progress) -> bool:
        """Whether to measure now: at most EVALUATIONS times, and on fewer tokens than were trained on since.

        A token costs about twice as much in training, so training gets two thirds of the time.
        """
        steps = progress.step - self.last.step
        assert progress.pace is not None
        trained = steps * progress.pace.batch_tokens
        return steps >= progress.total / EVALUATIONS and trained >= self._tokens

    def evaluate(self, step: int) -> bool:
        """Measure the head after this step. Returns whether to go on."""
        self.last = kept = self._measured(step, self._may_go_on)
        if is_better(kept.scores, self.best.scores, self.before.scores):
            self.best, self._without_gain = kept, 0
        else:
            self._without_gain += 1
        return self._without_gain < PATIENCE

    def _measured(self, step: int, may_go_on: Callable[[], bool]) -> Kept:
        scores = {
            name: tokens_per_pass(self._objective, group, may_go_on) for name, group in self._groups.items()
        }
        return Kept(step, scores, self._objective.snapshot())


def is_better(scores: Scores, best: Scores, before: Scores) -> bool:
    """Whether a head with these scores is better on new rows than the best one, and has forgotten little."""
    forgotten = OLD in scores and scores[OLD] < (1 - MAX_LOSS) * before[OLD]
    return scores[NEW] > best[NEW] and not forgotten
