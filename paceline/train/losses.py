"""How far guesses are from what the target says: what a head is trained to make small.

Whatever the head, a slot guesses several tokens ahead, one a step, and each step is taught by the token
before the one that it guesses:

    slot i, step k      guesses token i + 2 + k      is taught by the target's distribution at token i + 1 + k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.train.sequences import fused

# From guesses [..., draft vocabulary], as logits, and the target's distribution over the same tokens, to one
# number for each row.
Loss = Callable[[Tensor, Tensor], Tensor]
Scores = Callable[[Tensor], Tensor]  # [steps, rows, hidden] to [steps, rows, draft vocabulary]

LOGITS_AT_ONCE = {"cuda": 1 << 28, "cpu": 1 << 24}  # scores in a chunk of the loss: 1 GB and 64 MB in float32
HASTE = 3.0  # how soon the hybrid turns from divergence to overlap as they come together


def cross_entropy(guesses: Tensor, wanted: Tensor) -> Tensor:
    """The usual one: least where the distributions are the same."""
    return guesses.logsumexp(-1) - (guesses * wanted).sum(-1)


def lk_hybrid(guesses: Tensor, wanted: Tensor) -> Tensor:
    """A mixture of the divergence, which teaches from afar, and of the chance that a drawn guess is refused.

    That chance, 1 - sum(min(p, q)), is what costs time at temperature 1, but far from the target it has
    hardly a gradient. So its share grows with the overlap that is already reached.
    """
    logarithms = guesses.log_softmax(-1)
    overlap = torch.minimum(wanted, logarithms.exp()).sum(-1)
    divergence = (torch.xlogy(wanted, wanted) - wanted * logarithms).sum(-1)
    share = (-HASTE * overlap.detach()).exp()
    return share * divergence + (1 - share) * (1 - overlap)


LOSSES: dict[str, Loss] = {"kl": cross_entropy, "lk": lk_hybrid}


@dataclass(frozen=True)
class DraftIds:
    """The target's ids that a head can guess, and the target's weights that score all ids."""

    ids: Tensor  # int64 [draft vocabulary]
    target_head: Tensor  # [vocabulary, hidden]

    @cached_property
    def places(self) -> Tensor:
        """The draft id of each of the target's, -1 if it is none: int64 [vocabulary]."""
        places = torch.full((len(self.target_head),), -1, device=self.ids.device)
        places[self.ids] = torch.arange(len(self.ids), device=self.ids.device)
        return places


@dataclass(frozen=True)
class StepLosses:
    """What a batch gave, step by step."""

    losses: Tensor  # [steps] mean loss; carries the gradient
    matches: Tensor  # [steps] share of guesses that were the target's best token


def taught_losses(
    outputs: Sequence[Tensor],
    scores: Scores,
    draft_ids: DraftIds,
    final: Tensor,
    answers: Tensor,
    lengths: Tensor,
    loss: Loss = cross_entropy,
) -> StepLosses:
    """Losses of what each step of each slot gave, [batch, tokens, hidden], against the target's own scores.

    `scores` turns outputs of all steps into guesses; `final` [batch, tokens, hidden] are the target's states.
    """
    steps, width = len(outputs), final.shape[1]
    place = torch.arange(width, device=final.device)
    # tokens that are followed by an answered one which a draft may guess: [teachers], sequences end to end
    taught = (place >= answers[:, None]) & (place < lengths[:, None] - 1)
    teachers = torch.nonzero(taught.flatten()).flatten()
    since_answer = (place - answers[:, None]).flatten()[teachers]
    # step k of slot i is taught by token i + 1 + k, so token p teaches step k of slot p - 1 - k
    students = torch.stack(
        [
            output.flatten(0, 1).index_select(0, (teachers - 1 - step).clamp(min=0))
            for step, output in enumerate(outputs)
        ]
    )  # [steps, teachers, hidden]
    counts = torch.stack([since_answer >= step for step in range(steps)])  # bool [steps, teachers]
    final = final.flatten(0, 1)[teachers]
    sums = torch.zeros(2, steps, device=final.device)
    sum_up = _chunk_sums_for(final.device.type)
    chunk = max(1, LOGITS_AT_ONCE[final.device.type] // (steps * len(draft_ids.ids)))
    for start in range(0, len(teachers), chunk):
        part = slice(start, start + chunk)
        lesson = _lesson(draft_ids, final[part])
        # scores of all steps over the draft vocabulary would fill the memory: computed again going back
        sums = sums + checkpoint(
            sum_up, scores, loss, lesson, students[:, part], counts[:, part], use_reentrant=False
        )
    number = counts.sum(1).clamp(min=1)
    return StepLosses(sums[0] / number, (sums[1] / number).detach())


@dataclass(frozen=True)
class Lesson:
    """What the target says at some tokens."""

    wanted: Tensor  # float32 [teachers, draft vocabulary] its distribution over it
    best: Tensor  # int64 [teachers] its best token as a draft id, -1 if it is none


@torch.no_grad()
def _lesson(draft_ids: DraftIds, final: Tensor) -> Lesson:
    scores = F.linear(final, draft_ids.target_head)  # [teachers, vocabulary]
    best = draft_ids.places[scores.argmax(-1)]
    return Lesson(scores[:, draft_ids.ids].float().softmax(-1), best)


@cache
def _chunk_sums_for(
    device_type: str,
) -> Callable[[Scores, Loss, Lesson, Tensor, Tensor], Tensor]:
    return fused(_chunk_sums) if device_type == "cuda" else _chunk_sums


def _chunk_sums(scores: Scores, loss: Loss, lesson: Lesson, students: Tensor, counts: Tensor) -> Tensor:
    """Loss and number of matches, summed over the counted teachers: [2, steps]."""
    guesses = scores(students).float()  # [steps, teachers, draft vocabulary]
    losses = loss(guesses, lesson.wanted)
    matches = guesses.argmax(-1) == lesson.best
    return torch.stack([(losses * counts).sum(1), (matches & counts).sum(1)])
