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

from paceline.train.sequences import LOGITS_AT_ONCE, TargetStates, fused

# From predicted logits [..., draft vocabulary] and the target's distribution over the same tokens to one
# loss per row.
Loss = Callable[[Tensor, Tensor], Tensor]
Scores = Callable[[Tensor], Tensor]  # [steps, rows, hidden] to [steps, rows, draft vocabulary]

OVERLAP_RATE = 3.0  # how fast the hybrid loss moves from divergence to overlap as the overlap grows


def cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Cross-entropy; smallest where the distributions are equal."""
    return logits.logsumexp(-1) - (logits * probabilities).sum(-1)


def lk_hybrid(logits: Tensor, probabilities: Tensor) -> Tensor:
    """A mixture of KL divergence and 1 - sum(min(p, q)), the probability that a sampled token is rejected.

    The rejection probability is what costs time at temperature 1, but has almost no gradient far from the
    target. So its weight grows with the overlap that is already reached.
    """
    logarithms = logits.log_softmax(-1)
    overlap = torch.minimum(probabilities, logarithms.exp()).sum(-1)
    divergence = (torch.xlogy(probabilities, probabilities) - probabilities * logarithms).sum(-1)
    share = (-OVERLAP_RATE * overlap.detach()).exp()
    return share * divergence + (1 - share) * (1 - overlap)


def l1_mixture(logits: Tensor, probabilities: Tensor) -> Tensor:
    """0.1 cross-entropy + 0.9 L1 distance, as DSpark's authors weigh them.

    Half of the L1 distance is the probability that a sampled token is rejected.
    """
    distance = (logits.softmax(-1) - probabilities).abs().sum(-1)
    return 0.1 * cross_entropy(logits, probabilities) + 0.9 * distance


LOSSES: dict[str, Loss] = {"kl": cross_entropy, "lk": lk_hybrid, "l1": l1_mixture}


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
    answers: Tensor,
    lengths: Tensor,
    loss: Loss = cross_entropy,
) -> StepLosses:
    """Losses of each step's outputs [batch, tokens, hidden] against the target's distributions.

    `scores` turns the outputs of all steps into logits.
    """
    steps, (_, width), device = len(outputs), target.best.shape, target.best.device
    position = torch.arange(width, device=device)
    # tokens followed by an answered one that a draft may predict: [teachers], sequences concatenated
    taught = (position >= answers[:, None]) & (position < lengths[:, None] - 1)
    teachers = torch.nonzero(taught.flatten()).flatten()
    since_answer = (position - answers[:, None]).flatten()[teachers]
    # step k of slot i is compared with token i + 1 + k, so token p is the teacher of step k of slot p - 1 - k
    students = torch.stack(
        [
            output.flatten(0, 1).index_select(0, (teachers - 1 - step).clamp(min=0))
            for step, output in enumerate(outputs)
        ]
    )  # [steps, teachers, hidden]
    counts = torch.stack([since_answer >= step for step in range(steps)])  # bool [steps, teachers]
    final, best = target.final.flatten(0, 1)[teachers], target.best.flatten()[teachers]
    sums = torch.zeros(2, steps, device=device)
    sum_up = _chunk_sums_for(device.type)
    chunk = max(1, LOGITS_AT_ONCE[device.type] // (steps * len(draft_ids.ids)))
    for start in range(0, len(teachers), chunk):
        part = slice(start, start + chunk)
        predictions = target_predictions(draft_ids, final[part], best[part])
        # the logits of all steps would not fit into memory: recomputed in the backward pass
        sums = sums + checkpoint(
            sum_up, scores, loss, predictions, students[:, part], counts[:, part], use_reentrant=False
        )
    number = counts.sum(1).clamp(min=1)
    return StepLosses(sums[0] / number, (sums[1] / number).detach())


@dataclass(frozen=True)
class TargetPredictions:
    """The target's predictions at some tokens."""

    probabilities: Tensor  # float32 [teachers, draft vocabulary]
    best: Tensor  # int64 [teachers] most likely token as a draft id, -1 if it has none


@torch.no_grad()
def target_predictions(draft_ids: DraftIds, final: Tensor, best: Tensor) -> TargetPredictions:
    """The target's predictions at tokens with these final states [teachers, hidden] and best next tokens."""
    scores = F.linear(final, draft_ids.rows)  # [teachers, draft vocabulary]
    return TargetPredictions(scores.float().softmax(-1), draft_ids.inverse[best])


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
    losses = loss(logits, predictions.probabilities)
    matches = logits.argmax(-1) == predictions.best
    return torch.stack([(losses * counts).sum(1), (matches & counts).sum(1)])
