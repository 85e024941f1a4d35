"""EarlyStop: keep the weights that draft best on held-back rows, and end when they no longer improve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from paceline.learn.data.selection import NEW, OLD
from paceline.train.data.examples import Examples
from paceline.train.loop import acceptance
from paceline.train.loop.batches import Batch, collate, epoch_batches
from paceline.train.loop.progress import Progress
from paceline.train.loop.sequences import TargetStates
from paceline.train.objectives.objective import Objective, WriteHead

EVALUATIONS = 8  # during a run; there is one more before it
PATIENCE = 3  # evaluations in a row without a gain end the run
MAX_LOSS = 0.01  # of tokens per pass on old rows: more is forgetting (the bar is 2 %)
BATCH_TOKENS = 2048  # of an evaluation, which gives way between two batches
MAX_STATE_BYTES = 1 << 28  # of a group's states that are kept; what is beyond is computed each time

Scores = Mapping[str, float]  # tokens per pass, by group of rows


@dataclass(frozen=True)
class Kept:
    """The best head so far, with its scores."""

    step: int
    scores: Scores
    write: WriteHead


class HeldBack:
    """Rows that measure a head, with the target's states, which stay the same while the head trains."""

    def __init__(self, objective: Objective, examples: Examples) -> None:
        device = objective.target.embedding.device
        everything = torch.arange(len(examples)).numpy()
        indices = epoch_batches(examples, everything, BATCH_TOKENS, 0, 0)
        self._objective, self._batches = objective, [collate(examples, some, device) for some in indices]
        self._states: dict[int, TargetStates] = {}  # by the place of a batch's first token
        self._room = MAX_STATE_BYTES
        self.num_tokens = len(examples.tokens)

    @torch.no_grad()
    def tokens_per_pass(self, may_go_on: Callable[[], bool]) -> float:
        """Tokens per pass with chains of the head; 1 is plain decoding. `may_go_on` is called before each
        batch."""
        return acceptance.tokens_per_pass(self._accepted, (each for each in self._batches if may_go_on()))

    def _accepted(self, batch: Batch) -> torch.Tensor:
        states = self._states.get(batch.starts[0])
        if states is None:
            states = self._objective.states(batch)
            size = states.features.nbytes + states.final.nbytes + states.best.nbytes
            if size <= self._room:
                self._states[batch.starts[0]] = states
                self._room -= size
        return self._objective.accepted(batch, states)


class EarlyStop:
    """Measures a head while it trains."""

    def __init__(
        self,
        objective: Objective,
        groups: Mapping[str, Examples],
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """`groups`: rows that are never trained on. The initial head is the one to beat.

        `may_go_on` is called before every batch of an evaluation, and waits while it must. If it returns
        False, the measurement is discarded.
        """
        self._objective = objective
        self._groups = {name: HeldBack(objective, group) for name, group in groups.items()}
        self.before = self._measured(0, lambda: True)  # this loads kernels, so its time is not measured
        self._may_go_on = may_go_on
        self.best = self.before
        self.last = self.before
        self._without_gain = 0
        self._tokens = sum(group.num_tokens for group in self._groups.values())

    def is_due(self, progress: Progress) -> bool:
        """Whether to measure now: at most EVALUATIONS times, and on fewer tokens than were trained on since.

        A token costs about twice as much in training, so training gets two thirds of the time.
        """
        steps = progress.step - self.last.step
        assert progress.pace is not None
        trained = steps * progress.pace.batch_tokens
        return steps >= progress.total / EVALUATIONS and trained >= self._tokens

    def evaluate(self, step: int) -> bool:
        """Measure the head after this step. Returns whether to continue."""
        self.last = kept = self._measured(step, self._may_go_on)
        if is_better(kept.scores, self.best.scores, self.before.scores):
            self.best, self._without_gain = kept, 0
        else:
            self._without_gain += 1
        return self._without_gain < PATIENCE

    def _measured(self, step: int, may_go_on: Callable[[], bool]) -> Kept:
        scores = {name: group.tokens_per_pass(may_go_on) for name, group in self._groups.items()}
        return Kept(step, scores, self._objective.snapshot())


def is_better(scores: Scores, best: Scores, before: Scores) -> bool:
    """Whether a head with these scores is better on new rows than the best one, and has forgotten little."""
    forgotten = OLD in scores and scores[OLD] < (1 - MAX_LOSS) * before[OLD]
    return scores[NEW] > best[NEW] and not forgotten
