"""The training losses: distance between the head's and the target's distributions.

For every kind of head, a slot predicts several tokens, one per step, and each step is compared with the
target's distribution at the token before the predicted one:

    slot i, step k      predicts token i + 2 + k      target: the distribution at token i + 1 + k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.train.loop.batches import Batch
from paceline.train.loop.sequences import LOGITS_AT_ONCE, TargetStates, fused

# From predicted logits [..., draft vocabulary] and the target's predictions there to one loss per row.
Loss = Callable[[Tensor, "TargetPredictions"], Tensor]
Scores = Callable[[Tensor], Tensor]  # [steps, rows, hidden] to [steps, rows, draft vocabulary]

OVERLAP_RATE = 3.0  # how fast the hybrid loss moves from divergence to overlap as the overlap grows


@dataclass(frozen=True)
class TargetPredictions:
    """The target's predictions at some tokens, and what it answered there."""

    probabilities: Tensor  # float32 [teachers, draft vocabulary]
    best: Tensor  # int64 [teachers] most likely token as a draft id, -1 if it has none
    answered: Tensor  # int64 [teachers] the answered token as a draft id, -1 if it has none

    def at(self, which: Tensor) -> TargetPredictions:
        return TargetPredictions(self.probabilities[which], self.best[which], self.answered[which])


def cross_entropy(logits: Tensor, target: TargetPredictions) -> Tensor:
    """Cross-entropy; smallest where the distributions are equal."""
    return logits.logsumexp(-1) - (logits * target.probabilities).sum(-1)


def answered_cross_entropy(logits: Tensor, target: TargetPredictions) -> Tensor:
    """Cross-entropy with the answered token, as DFlash's authors use it; 0 if it has no draft id."""
    right = logits.gather(-1, target.answered.clamp(min=0).expand(logits.shape[:-1])[..., None])[..., 0]
    return torch.where(target.answered >= 0, logits.logsumexp(-1) - right, 0.0)


def lk_hybrid(logits: Tensor, target: TargetPredictions) -> Tensor:
    """A mixture of KL divergence and 1 - sum(min(p, q)), the probability that a sampled token is rejected.

    The rejection probability is what costs time at temperature 1, but has almost no gradient far from the
    target. So its weight grows with the overlap that is already reached.
    """
    probabilities, logarithms = target.probabilities, logits.log_softmax(-1)
    overlap = torch.minimum(probabilities, logarithms.exp()).sum(-1)
    divergence = (torch.xlogy(probabilities, probabilities) - probabilities * logarithms).sum(-1)
    share = (-OVERLAP_RATE * overlap.detach()).exp()
    return share * divergence + (1 - share) * (1 - overlap)


def l1_mixture(logits: Tensor, target: TargetPredictions) -> Tensor:
    """0.1 cross-entropy + 0.9 L1 distance, as DSpark's authors weigh them.

    Half of the L1 distance is the probability that a sampled token is rejected.
    """
    distance = (logits.softmax(-1) - target.probabilities).abs().sum(-1)
    return 0.1 * cross_entropy(logits, target) + 0.9 * distance


LOSSES: dict[str, Loss] = {
    "kl": cross_entropy,
    "ce": answered_cross_entropy,
    "lk": lk_hybrid,
    "l1": l1_mixture,
}


@dataclass(frozen=True)
class DraftIds:
    """The target's token ids that a head can predict, and the target's output weights."""

    ids: Tensor  # int64 [draft vocabulary]
    target_head: Tensor  # [vocabulary, hidden]

    @cached_property
    def inverse(self) -> Tensor:
        """The draft id of each target id, -1 if it has none: int64 [vocabulary]."""
        inverse = torch.full((len(self.target_head),), -1, device=self.ids.device)
        inverse[self.ids] = torch.arange(len(self.ids), device=self.ids.device)
        return inverse

    @cached_property
    def rows(self) -> Tensor:
        """The target's output weights of these tokens: [draft vocabulary, hidden]."""
        return self.target_head[self.ids]


@dataclass(frozen=True)
class StepLosses:
    """Losses of a batch, per step."""

    losses: Tensor  # [steps] mean loss; carries the gradient
    matches: Tensor  # [steps] fraction of predictions that were the target's best token


def distillation_losses(
    outputs: Sequence[Tensor],
    scores: Scores,
    draft_ids: DraftIds,
    target: TargetStates,
    batch: Batch,
    loss: Loss = cross_entropy,
) -> StepLosses:
    """Losses of each step's outputs [1, tokens, hidden] against the target's distributions.

    `scores` turns the outputs of all steps into logits. Drafts start after an answered token, and only
    answered tokens are predicted.
    """
    steps, teachers, device = len(outputs), batch.taught, batch.device
    # step k of slot i is compared with token i + 1 + k, so token p is the teacher of step k of slot p - 1 - k
    students = torch.stack(
        [output[0].index_select(0, (teachers - 1 - step).clamp(min=0)) for step, output in enumerate(outputs)]
    )  # [steps, teachers, hidden]
    since_answer = batch.since_answer[teachers]
    counts = torch.stack([since_answer >= step for step in range(steps)])  # bool [steps, teachers]
    sums = torch.zeros(2, steps, device=device)
    sum_up = _chunk_sums_for(device.type)
    chunk = max(1, LOGITS_AT_ONCE[device.type] // (steps * len(draft_ids.ids)))
    for start in range(0, len(teachers), chunk):
        part = slice(start, start + chunk)
        predictions = target_predictions(draft_ids, target, batch, teachers[part])
        # the logits of all steps would not fit into memory: recomputed in the backward pass
        sums = sums + checkpoint(
            sum_up, scores, loss, predictions, students[:, part], counts[:, part], use_reentrant=False
        )
    number = counts.sum(1).clamp(min=1)
    return StepLosses(sums[0] / number, (sums[1] / number).detach())


@torch.no_grad()
def target_predictions(
    draft_ids: DraftIds, target: TargetStates, batch: Batch, teachers: Tensor
) -> TargetPredictions:
    """The target's predictions at these places of the row: int64 [teachers]. Each has a next token."""
    scores = F.linear(target.final[0, teachers], draft_ids.rows)  # [teachers, draft vocabulary]
    best, answered = target.best[0, teachers], batch.tokens[0, teachers + 1]
    return TargetPredictions(scores.float().softmax(-1), draft_ids.inverse[best], draft_ids.inverse[answered])


@cache
def _chunk_sums_for(
    device_type: str,
) -> Callable[[Scores, Loss, TargetPredictions, Tensor, Tensor], Tensor]:
    return fused(_chunk_sums) if device_type == "cuda" else _chunk_sums


def _chunk_sums(
    scores: Scores, loss: Loss, predictions: TargetPredictions, students: Tensor, counts: Tensor
) -> Tensor:
    """Loss and number of matches, summed over the counted teachers: [2, steps]."""
    logits = scores(students).float()  # [steps, teachers, draft vocabulary]
    losses = loss(logits, predictions)
    matches = logits.argmax(-1) == predictions.best
    return torch.stack([(losses * counts).sum(1), (matches & counts).sum(1)])
