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

Steps after step 0 of a P-EAGLE head read the mask token and `mask_hidden` instead, whatever was guessed. What
they attend to is the same, layer by layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.models.heads.torch_head import Attend, Head
from paceline.train.loop.batches import Batch
from paceline.train.loop.sequences import TargetStates
from paceline.train.objectives.losses import DraftIds, Loss, StepLosses, cross_entropy, distillation_losses
from paceline.train.objectives.unrolled_attention import PackedFlash, PaddedFlash, UnrolledAttention


def unroll(head: Head, features: torch.Tensor, batch: Batch, steps: int) -> list[torch.Tensor]:
    """Outputs of each step [1, tokens, hidden], for all slots at once.

    features is [1, tokens, features * target hidden]. The outputs of slots whose token is not part of their
    document are meaningless: no other slot reads them.
    """
    attend = [_attention(batch) for _ in range(head.config.num_layers)]
    tokens, positions = batch.tokens, batch.positions[None]
    mask = head.config.mask_token_id
    state = head.fuse(features)
    outputs: list[torch.Tensor] = []
    for step in range(steps):
        following = F.pad(tokens[:, 1 + step :], (0, min(1 + step, tokens.shape[1])))
        if mask is not None and step:
            following = torch.full_like(following, mask)
            state = head.fuse(head.get_parameter("mask_hidden")).expand_as(outputs[0])
        output = head(state, following, positions + step, *attend)
        outputs.append(output)
        state = head.feed_back(output)
    return outputs


def _attention(batch: Batch) -> Attend:
    """The attention of one layer, for one step after another."""
    if batch.device.type == "cuda":
        return UnrolledAttention(PackedFlash(batch.bounds, batch.longest))
    attention = [(group, UnrolledAttention(PaddedFlash())) for group in batch.groups]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        parts = [
            group.packed(merged(*(group.padded(each) for each in (query, key, value))))
            for group, merged in attention
        ]
        return torch.cat(parts, 1)

    return attend


def step_losses(
    head: Head,
    draft_ids: DraftIds,
    target: TargetStates,
    batch: Batch,
    steps: int,
    loss: Loss = cross_entropy,
) -> StepLosses:
    """Losses of a batch, of each step."""
    outputs = unroll(head, target.features, batch, steps)
    return distillation_losses(outputs, head.logits, draft_ids, target, batch, loss)
