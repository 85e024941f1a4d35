"""Training of parallel heads: blocks behind random anchors of each document, all at once.

    keys of the context        keys of the block
    tokens before the anchor   its own slots        a block never sees another, nor later tokens

Step k of a block guesses the token k + 1 after the anchor, and is compared with the target's distribution at
the token before that, restricted to the draft vocabulary. The token before is the true one (teacher forcing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.models.heads.config import BlockAttention
from paceline.models.heads.torch_block import BlockHead, block_mask
from paceline.train.loop.attention import masked_attention
from paceline.train.loop.batches import Batch, Group, on_device
from paceline.train.loop.sequences import LOGITS_AT_ONCE, TargetStates, fused
from paceline.train.objectives.losses import (
    DraftIds,
    Loss,
    StepLosses,
    TargetPredictions,
    answered_cross_entropy,
    target_predictions,
)

SMOOTHING = 0.5  # of the chances in D-PACE's weights


@dataclass(frozen=True)
class Anchors:
    """The tokens at which blocks start, document after document."""

    places: Tensor  # int64 [blocks] in the row
    positions: Tensor  # int64 [blocks] in their documents
    counts: Sequence[int]  # [documents] blocks of each

    @classmethod
    def of(cls, batch: Batch, chosen: Sequence[npt.NDArray[np.int64]]) -> Anchors:
        """Blocks at these positions of each document."""
        counts = [len(each) for each in chosen]
        positions = np.concatenate(chosen)
        places = positions + np.repeat(batch.begins, counts)
        return cls(on_device(places, batch.device), on_device(positions, batch.device), counts)

    def groups(self, batch: Batch) -> Iterator[Group]:
        """The blocks of each of the batch's groups of documents."""
        documents = blocks = 0
        for group in batch.groups:
            counts = self.counts[documents : documents + len(group.sizes)]
            yield Group(counts, blocks, batch.device)
            documents, blocks = documents + len(counts), blocks + sum(counts)


def random_anchors(batch: Batch, share: float, seed: int) -> Anchors:
    """Anchors of each document, in number this share of its answered tokens.

    They follow from the seed and the tokens, so that a resumed run draws the same ones. The token after an
    anchor is an answered one of the same document.
    """
    generator = np.random.default_rng([seed, int(batch.tokens.sum())])
    chosen = []
    for answer, size in zip(batch.answers, batch.sizes, strict=True):
        usable = np.arange(max(1, answer - 1), size - 1)
        wanted = max(1, math.ceil(share * (size - answer)))
        chosen.append(np.sort(generator.permutation(usable)[:wanted]))
    return Anchors.of(batch, chosen)


def run_blocks(head: BlockHead, features: Tensor, batch: Batch, anchors: Anchors) -> Tensor:
    """The outputs of blocks that start at these anchors: [blocks, slots, hidden].

    features is [1, tokens, width].
    """
    size = head.block.size
    context = head.context(features)
    slots = anchors.positions[:, None] + torch.arange(size, device=batch.device)  # [blocks, size]
    inputs = torch.full_like(slots, head.block.mask_token_id)
    inputs[:, 0] = batch.tokens[0, anchors.places]
    pairs = [
        (documents, blocks, _masks(head, blocks.padded(anchors.positions[None]), documents.longest))
        for documents, blocks in zip(batch.groups, anchors.groups(batch), strict=True)
        if blocks.total
    ]
    groups = head.config.num_heads // head.config.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = head.keys_values(layer, context, batch.positions[None])
        parts = []
        for documents, blocks, masks in pairs:
            wide = blocks.padded(query[None])  # [documents, blocks, slots, heads, head_dim]
            # the keys of all blocks lie behind those of the context: [documents, heads, keys, head_dim]
            joined = (
                torch.cat((documents.padded(far), blocks.padded(near[None]).flatten(1, 2)), 1)
                for far, near in ((keys, key), (values, value))
            )
            every_key, every_value = (each.transpose(1, 2).repeat_interleave(groups, 1) for each in joined)
            slots_first = wide.flatten(1, 2).transpose(1, 2)
            mixed = masked_attention(slots_first, every_key, every_value, masks[head.block.layers[layer]])
            parts.append(blocks.packed(mixed.transpose(1, 2).reshape(wide.shape)))
        return torch.cat(parts, 1)[0]

    outputs: Tensor = head(inputs, slots, attend)
    return outputs


def _masks(head: BlockHead, anchors: Tensor, width: int) -> dict[BlockAttention, Tensor]:
    """Which keys each slot sees, by what layers attend to: bool [documents, 1, slots, tokens + slots].

    `anchors` are positions [documents, blocks] in documents that are padded to `width` tokens.
    """
    size, place = head.block.size, torch.arange(width, device=anchors.device)
    slots = (anchors[..., None] + torch.arange(size, device=place.device)).flatten(1)  # [documents, slots]
    start = anchors.repeat_interleave(size, dim=1)[..., None]  # [documents, slots, 1] each slot's anchor
    block = torch.arange(slots.shape[1], device=place.device) // size
    own = (block[:, None] == block).expand(len(slots), -1, -1)
    in_block = torch.cat((torch.zeros_like(start, dtype=torch.bool).expand(-1, -1, width), own), dim=-1)
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
    teachers: Tensor  # int64 [guesses] the places of these tokens in the row
    blocks: Tensor  # int64 [guesses] the number of the block
    steps: Tensor  # int64 [guesses] tokens from the anchor to the one before

    def part(self, where: slice) -> Guesses:
        fields = self.outputs, self.previous, self.teachers, self.blocks, self.steps
        return Guesses(*(each[where] for each in fields))


def guesses_of(head: BlockHead, outputs: Tensor, batch: Batch, anchors: Anchors) -> Guesses:
    """The guesses of blocks with these outputs, where the guessed token belongs to the anchor's document."""
    before = anchors.places[:, None] + torch.arange(head.block.num_drafts, device=outputs.device)
    blocks, steps = torch.nonzero(before + 1 < batch.ends[anchors.places][:, None], as_tuple=True)
    slots = outputs if head.block.sample_from_anchor else outputs[:, 1:]
    teachers = before[blocks, steps]
    return Guesses(slots[blocks, steps], batch.tokens[0, teachers], teachers, blocks, steps)


def block_losses(
    head: BlockHead,
    draft_ids: DraftIds,
    target: TargetStates,
    batch: Batch,
    anchors: Anchors,
    loss: Loss,
    weigh: bool = False,
) -> StepLosses:
    """Losses of the blocks at these anchors, per token ahead; with `weigh`, by D-PACE's weights."""
    outputs = run_blocks(head, target.features, batch, anchors)
    guesses = guesses_of(head, outputs, batch, anchors)
    steps = head.block.num_drafts
    parts = []
    chunk = max(1, LOGITS_AT_ONCE[batch.device.type] // len(draft_ids.ids))
    for start in range(0, len(guesses.steps), chunk):
        part = guesses.part(slice(start, start + chunk))
        teachers, which = torch.unique(part.teachers, return_inverse=True)
        predictions = target_predictions(draft_ids, target, batch, teachers).at(which)
        # the logits of all blocks would not fit into memory: recomputed in the backward pass
        parts.append(checkpoint(_chunk_rows, head, loss, part, predictions, use_reentrant=False))
    losses, matches, chances = torch.cat(parts, 1)  # [guesses] each
    if weigh:
        losses = losses * survival_weights(chances.detach(), guesses, len(anchors.places), steps)
    sums = torch.zeros(2, steps, device=batch.device)
    sums = sums.index_add(1, guesses.steps, torch.stack((losses, matches)))
    number = torch.bincount(guesses.steps, minlength=steps).clamp(min=1)
    return StepLosses(sums[0] / number, (sums[1] / number).detach())


def survival_weights(chances: Tensor, guesses: Guesses, num_blocks: int, num_steps: int) -> Tensor:
    """D-PACE's weight of each guess [guesses]: how much of the accepted length depends on it.

    `chances` [guesses] are those that the head gives to the answered tokens. Smoothed, a + (1 - a) chance,
    their products up to each step estimate that the draft is accepted so far, and the sum of the products
    from a step on is the derivative of the accepted length by the logarithm of the step's chance.
    """
    smoothed = chances.new_zeros(num_blocks, num_steps)
    smoothed[guesses.blocks, guesses.steps] = SMOOTHING + (1 - SMOOTHING) * chances
    accepted = smoothed.cumprod(1)
    weights = accepted.flip(1).cumsum(1).flip(1)
    return weights[guesses.blocks, guesses.steps]


def _chunk_rows(head: BlockHead, loss: Loss, part: Guesses, predictions: TargetPredictions) -> Tensor:
    """Loss, match, and chance of the answered token of each guess: [3, guesses]."""
    logits = head.unselected(part.outputs, part.previous)
    confidence = head.confidence(part.outputs, part.previous)
    selected = head.selected(logits, part.outputs, part.previous)
    return _row_losses_for(logits.device.type)(loss, logits, confidence, selected, predictions)


Selected = tuple[Tensor, Tensor]  # ids [guesses, candidates] of the best guesses, and their scores
RowLosses = Callable[[Loss, Tensor, Tensor | None, Selected | None, TargetPredictions], Tensor]


@cache
def _row_losses_for(device_type: str) -> RowLosses:
    return fused(_row_losses) if device_type == "cuda" else _row_losses


def _row_losses(
    loss: Loss,
    logits: Tensor,
    confidence: Tensor | None,
    selected: Selected | None,
    target: TargetPredictions,
) -> Tensor:
    """The loss of each guess, whether it is the target's best token, and the answered one's chance."""
    logits = logits.float()
    losses = loss(logits, target)
    if confidence is not None:
        distance = (logits.detach().softmax(-1) - target.probabilities).abs().sum(-1)
        accepted = 1 - distance / 2  # the chance that rejection sampling accepts the guess
        losses = losses + F.binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
    best = logits.argmax(-1)
    if selected is not None:
        ids, scores = selected[0], selected[1].float()
        is_answered = ids == target.answered[:, None]  # in no row if it is not among the candidates
        right = scores.masked_fill(~is_answered, 0.0).sum(-1)
        losses = losses + torch.where(is_answered.any(-1), scores.logsumexp(-1) - right, 0.0)
        best = ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
    chances = (-answered_cross_entropy(logits, target)).exp()
    chances = torch.where(target.answered >= 0, chances, 0.0)
    return torch.stack((losses, (best == target.best).float(), chances))
