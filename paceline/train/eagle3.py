"""What an EAGLE-3 head is trained on: its own drafting, unrolled over every slot of a sequence at once.

Slot i reads the feature h_i and the token x_{i+1}, and guesses x_{i+2}. A draft that starts there goes on
from its own state; only its tokens are the true ones (teacher forcing):

    step 0    reads h_i              and x_{i+1} at position i        guesses x_{i+2}
    step k    reads its state of k-1 and x_{i+1+k} at position i + k  guesses x_{i+2+k}

It attends to step 0 of the slots j <= i, whose features are true, and to its own earlier steps:

    keys of step 0        keys of steps 1 to k
    * . . .               *
    * * . .     and         *               a draft never sees the guesses of another
    * * * .                   *
    * * * *                     *

Step k is taught by the target's distribution at token i + 1 + k, restricted to the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from paceline.draft.heads.torch_head import Head
from paceline.train.losses import Loss, cross_entropy
from paceline.train.sequences import TargetStates, fused

Scores = Callable[[torch.Tensor], torch.Tensor]  # [steps, rows, hidden] to [steps, rows, draft vocabulary]

LOGITS_AT_ONCE = 1 << 28  # the loss is computed in chunks of about so many scores: 1 GB in float32


@dataclass(frozen=True)
class DraftIds:
    """The target's ids that a head can guess, and the target's weights that score all ids."""

    ids: torch.Tensor  # int64 [draft vocabulary]
    target_head: torch.Tensor  # [vocabulary, hidden]

    @cached_property
    def places(self) -> torch.Tensor:
        """The draft id of each of the target's, -1 if it is none: int64 [vocabulary]."""
        places = torch.full((len(self.target_head),), -1, device=self.ids.device)
        places[self.ids] = torch.arange(len(self.ids), device=self.ids.device)
        return places


@dataclass(frozen=True)
class StepLosses:
    """What a batch gave, step by step."""

    losses: torch.Tensor  # [steps] mean loss; carries the gradient
    matches: torch.Tensor  # [steps] share of guesses that were the target's best token


class UnrolledAttention:
    """Attention of one step after the other; remembers the keys and values of those before."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []  # of each step [batch, slots, kv_heads, head_dim]
        self.values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        self.values.append(value)
        batch, slots, _, head_dim = query.shape
        grouped = query.view(batch, slots, key.shape[2], -1, head_dim)
        true = torch.einsum("bqhgd,bkhd->bhgqk", grouped, self.keys[0]).float()
        future = torch.ones(slots, slots, dtype=torch.bool, device=query.device).triu(1)
        true = true.masked_fill(future, float("-inf"))
        # a sum, because products of single rows are slow: [batch, kv, group, slots, 1] each
        own = [
            (grouped * each[:, :, :, None]).sum(-1, dtype=torch.float32).permute(0, 2, 3, 1)[..., None]
            for each in self.keys[1:]
        ]
        scores = torch.cat((true, *own), dim=-1)
        weights = (scores * head_dim**-0.5).softmax(-1).to(value.dtype)
        mixed = torch.einsum("bhgqk,bkhd->bqhgd", weights[..., :slots], self.values[0])
        for step, each in enumerate(self.values[1:]):
            share = weights[..., slots + step].permute(0, 3, 1, 2)[..., None]  # [batch, slots, kv, group, 1]
            mixed = mixed + share * each[:, :, :, None]
        return mixed.reshape(query.shape)


def unroll(head: Head, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Outputs of each step [batch, tokens, hidden], for every slot at once.

    features is [batch, tokens, features * target hidden], tokens int64 [batch, tokens]. Slots without a
    token to read, at the end, read token 0: what they give means nothing.
    """
    attend = UnrolledAttention()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    state = head.fuse(features)
    outputs = []
    for step in range(steps):
        following = F.pad(tokens[:, 1 + step :], (0, min(1 + step, tokens.shape[1])))
        output = head(state, following, positions + step, attend)
        outputs.append(output)
        state = head.feed_back(output)
    return outputs


def step_losses(
    head: Head,
    draft_ids: DraftIds,
    target: TargetStates,
    tokens: torch.Tensor,
    answers: torch.Tensor,
    lengths: torch.Tensor,
    steps: int,
    loss: Loss = cross_entropy,
) -> StepLosses:
    """Losses of a batch of padded sequences [batch, tokens] of these lengths [batch].

    `answers` [batch] is the index of each one's first answered token. A draft starts behind an answered
    token, and is taught about answered tokens only.
    """
    outputs = unroll(head, target.features, tokens, steps)
    return taught_losses(outputs, head.logits, draft_ids, target.final, answers, lengths, loss)


def taught_losses(
    outputs: Sequence[torch.Tensor],
    scores: Scores,
    draft_ids: DraftIds,
    final: torch.Tensor,
    answers: torch.Tensor,
    lengths: torch.Tensor,
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
    chunk = max(1, LOGITS_AT_ONCE // (steps * len(draft_ids.ids)))
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

    wanted: torch.Tensor  # float32 [teachers, draft vocabulary] its distribution over it
    best: torch.Tensor  # int64 [teachers] its best token as a draft id, -1 if it is none


@torch.no_grad()
def _lesson(draft_ids: DraftIds, final: torch.Tensor) -> Lesson:
    scores = F.linear(final, draft_ids.target_head)  # [teachers, vocabulary]
    best = draft_ids.places[scores.argmax(-1)]
    return Lesson(scores[:, draft_ids.ids].float().softmax(-1), best)


@cache
def _chunk_sums_for(
    device_type: str,
) -> Callable[[Scores, Loss, Lesson, torch.Tensor, torch.Tensor], torch.Tensor]:
    return fused(_chunk_sums) if device_type == "cuda" else _chunk_sums


def _chunk_sums(
    scores: Scores, loss: Loss, lesson: Lesson, students: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Loss and number of matches, summed over the counted teachers: [2, steps]."""
    guesses = scores(students).float()  # [steps, teachers, draft vocabulary]
    losses = loss(guesses, lesson.wanted)
    matches = guesses.argmax(-1) == lesson.best
    return torch.stack([(losses * counts).sum(1), (matches & counts).sum(1)])
