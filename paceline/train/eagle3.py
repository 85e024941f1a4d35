"""EAGLE-3 training: the head's own drafting, unrolled over every slot of a sequence at once.

Slot i reads the feature h_i and the token x_{i+1}, and predicts x_{i+2}. Its draft continues from the
head's own state; only the tokens are the true ones (teacher forcing):

    step 0    reads h_i              and x_{i+1} at position i        predicts x_{i+2}
    step k    reads its state of k-1 and x_{i+1+k} at position i + k  predicts x_{i+2+k}

It attends to step 0 of the slots j <= i, whose features are the target's, and to its own earlier steps:

    keys of step 0        keys of steps 1 to k
    * . . .               *
    * * . .     and         *               a draft never sees the steps of another
    * * * .                   *
    * * * *                     *

The loss of step k compares with the target's distribution at token i + 1 + k, restricted to the draft
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.models.heads.torch_head import Head
from paceline.train.losses import DraftIds, Loss, StepLosses, cross_entropy, distillation_losses
from paceline.train.sequences import TargetStates
from paceline.train.unrolled_attention import UnrolledAttention


def unroll(head: Head, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Outputs of each step [batch, tokens, hidden], for all slots at once.

    features is [batch, tokens, features * target hidden], tokens int64 [batch, tokens]. At the end, slots
    without a token to read get token 0; their outputs are meaningless.
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

    `answers` [batch] is the index of each sequence's first answered token. Drafts start after an answered
    token, and only answered tokens are predicted.
    """
    outputs = unroll(head, target.features, tokens, steps)
    return distillation_losses(outputs, head.logits, draft_ids, target, answers, lengths, loss)
