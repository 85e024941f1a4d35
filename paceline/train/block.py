"""Training of parallel heads: blocks behind random anchors of each sequence, all at once.

    keys of the context        keys of the block
    tokens before the anchor   its own slots        a block never sees another, nor later tokens

Step k of a block guesses the token k + 1 after the anchor, and is compared with the target's distribution at
the token before that, restricted to the draft vocabulary. The token before is the true one (teacher forcing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.models.heads.config import BlockAttention
from paceline.models.heads.torch_block import BlockHead, block_mask
from paceline.train.batches import Batch
from paceline.train.losses import (
    DraftIds,
    Loss,
    StepLosses,
    TargetPredictions,
    target_predictions,
)
from paceline.train.sequences import LOGITS_AT_ONCE, TargetStates, fused


def random_anchors(batch: Batch, share: float, seed: int) -> Tensor:
    """The tokens at which blocks start: int64 [batch, anchors], -1 where a sequence has fewer.

    They follow from the seed and the tokens, so that a resumed run draws the same ones. The token after an
    anchor is an answered one.
    """
    first, count = batch.answers - 1, batch.lengths - batch.answers
    generator = torch.Generator().manual_seed(seed + int(batch.tokens.sum()))
    order = torch.rand(batch.tokens.shape, generator=generator).to(batch.tokens.device)
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    usable = (place >= first[:, None].clamp(min=1)) & (place < (first + count)[:, None])
    order = order.masked_fill(~usable, -1.0)
    wanted = (count * share).ceil().long().clamp(min=1)
    chosen = order.topk(int(wanted.max()), dim=1)
    is_wanted = torch.arange(chosen.indices.shape[1], device=place.device) < wanted[:, None]
    return torch.where(is_wanted & (chosen.values >= 0), chosen.indices, -1)


def run_blocks(head: BlockHead, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """The outputs of blocks that start at these anchors: [batch, anchors, slots, hidden].

    features is [batch, tokens, width], tokens int64 [batch, tokens], anchors int64 [batch, anchors].
    """
    size, length = head.block.size, tokens.shape[1]
    anchors = anchors.clamp(min=0)
    context = head.context(features)
    place = torch.arange(length, device=tokens.device)
    slots = anchors[..., None] + torch.arange(size, device=tokens.device)  # [batch, anchors, size]
    inputs = torch.full_like(slots, head.block.mask_token_id)
    inputs[..., 0] = tokens.gather(1, anchors)
    masks = _masks(head, anchors, place)
    groups = head.config.num_heads // head.config.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = head.keys_values(layer, context, place.expand(tokens.shape))
        # the keys of all blocks lie behind those of the context: [batch, heads, tokens + slots, head_dim]
        joined = (torch.cat((far, near.flatten(1, 2)), 1) for far, near in ((keys, key), (values, value)))
        every_key, every_value = (each.transpose(1, 2).repeat_interleave(groups, 1) for each in joined)
        mixed = F.scaled_dot_product_attention(
            query.flatten(1, 2).transpose(1, 2),
            every_key,
            every_value,
            attn_mask=masks[head.block.layers[layer]],
        )
        return mixed.transpose(1, 2).reshape(query.shape)

    outputs: Tensor = head(inputs, slots, attend)
    return outputs


def _masks(head: BlockHead, anchors: Tensor, place: Tensor) -> dict[BlockAttention, Tensor]:
    """Which keys each slot sees, by what layers attend to: bool [batch, 1, slots, tokens + slots]."""
    size = head.block.size
    slots = (anchors[..., None] + torch.arange(size, device=place.device)).flatten(1)  # [batch, slots]
    start = anchors.repeat_interleave(size, dim=1)[..., None]  # [batch, slots, 1] the anchor of each slot
    block = torch.arange(slots.shape[1], device=place.device) // size
    own = (block[:, None] == block).expand(len(slots), -1, -1)
    in_block = torch.cat((torch.zeros_like(start, dtype=torch.bool).expand(-1, -1, len(place)), own), dim=-1)
    seen = torch.cat((place < start, own), dim=-1)
    keys = torch.cat((place.expand(len(slots), -1), slots), dim=1)
    distance = slots[..., None] - keys[:, None]
    return {
        attention: (seen & block_mask(head, layer, distance, in_block))[:, None]
        for layer, attention in enumerate(head.block.layers)
    }


@dataclass(frozen=True)
class Guesses:
    """The guesses of blocks that are compared with the target, flat."""

    outputs: Tensor  # [guesses, hidden]
    previous: Tensor  # int64 [guesses] the tokens before the guessed ones
    teachers: Tensor  # int64 [guesses] the same tokens by number, sequences concatenated
    steps: Tensor  # int64 [guesses] tokens from the anchor to that token

    def part(self, where: slice) -> Guesses:
        return Guesses(self.outputs[where], self.previous[where], self.teachers[where], self.steps[where])


def guesses_of(head: BlockHead, outputs: Tensor, batch: Batch, anchors: Tensor) -> Guesses:
    """The guesses of blocks with these outputs: those whose token is part of its sequence."""
    steps = torch.arange(head.block.num_drafts, device=outputs.device)
    before = anchors[..., None] + steps  # [batch, anchors, steps] the token before the guessed one
    counts = (anchors[..., None] >= 0) & (before + 1 < batch.lengths[:, None, None])
    first = torch.arange(len(anchors), device=outputs.device)[:, None, None] * batch.tokens.shape[1]
    teachers = (first + before)[counts]
    slots = outputs if head.block.sample_from_anchor else outputs[:, :, 1:]
    return Guesses(
        slots[counts], batch.tokens.flatten()[teachers], teachers, steps.expand(before.shape)[counts]
    )


def block_losses(
    head: BlockHead, draft_ids: DraftIds, target: TargetStates, batch: Batch, anchors: Tensor, loss: Loss
) -> StepLosses:
    """Losses of the blocks at these anchors, per token ahead."""
    outputs = run_blocks(head, target.features, batch.tokens, anchors)
    guesses = guesses_of(head, outputs, batch, anchors)
    final, best = target.final.flatten(0, 1), target.best.flatten()
    num_steps = head.block.num_drafts
    sums = torch.zeros(2, num_steps, device=final.device)
    chunk = max(1, LOGITS_AT_ONCE[final.device.type] // len(draft_ids.ids))
    for start in range(0, len(guesses.steps), chunk):
        part = guesses.part(slice(start, start + chunk))
        teachers, which = torch.unique(part.teachers, return_inverse=True)
        predictions = target_predictions(draft_ids, final[teachers], best[teachers])
        predictions = TargetPredictions(predictions.probabilities[which], predictions.best[which])
        # the logits of all blocks would not fit into memory: recomputed in the backward pass
        sums = sums + checkpoint(_chunk_sums, head, loss, part, predictions, use_reentrant=False)
    number = torch.bincount(guesses.steps, minlength=num_steps).clamp(min=1)
    return StepLosses(sums[0] / number, (sums[1] / number).detach())


def _chunk_sums(head: BlockHead, loss: Loss, part: Guesses, predictions: TargetPredictions) -> Tensor:
    """Loss and number of matches, summed by step: [2, steps]."""
    logits = head.guesses(part.outputs, part.previous)
    confidence = head.confidence(part.outputs, part.previous)
    rows = _row_losses_for(logits.device.type)(loss, logits, confidence, predictions)
    return torch.zeros(2, head.block.num_drafts, device=logits.device).index_add(1, part.steps, rows)


RowLosses = Callable[[Loss, Tensor, Tensor | None, TargetPredictions], Tensor]


@cache
def _row_losses_for(device_type: str) -> RowLosses:
    return fused(_row_losses) if device_type == "cuda" else _row_losses


def _row_losses(
    loss: Loss, logits: Tensor, confidence: Tensor | None, predictions: TargetPredictions
) -> Tensor:
    """The loss of each guess, and whether it is the target's best token: [2, guesses]."""
    logits = logits.float()
    losses = loss(logits, predictions.probabilities)
    if confidence is not None:
        distance = (logits.detach().softmax(-1) - predictions.probabilities).abs().sum(-1)
        accepted = 1 - distance / 2  # the chance that rejection sampling accepts the guess
        losses = losses + F.binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
    matches = logits.argmax(-1) == predictions.best
    return torch.stack((losses, matches.float()))
