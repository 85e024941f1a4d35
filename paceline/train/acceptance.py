"""What a head in training would draft: replayed chains, counted against the answers on record.

A guess counts only if all guesses before it were right, and then a chain has read the true tokens. So feeding
the true tokens, which runs all drafts of a sequence at once, gives exactly the lengths of chains that are
drafted one after the other; test_acceptance.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.models.heads.torch_block import BlockHead
from paceline.train.batches import Batch
from paceline.train.block import run_blocks
from paceline.train.losses import DraftIds, Scores
from paceline.train.sequences import LOGITS_AT_ONCE

BLOCKS_AT_ONCE = 32  # per sequence

Accepted = Callable[[Batch], Tensor]  # accepted guesses of a chain after each token: int64 [batch, tokens]


def draft_starts(batch: Batch) -> Tensor:
    """Where a draft may start, by its last known token: bool [batch, tokens].

    The first answered token is sampled without a draft, and after the last one there is nothing to guess.
    """
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return (place >= batch.answers[:, None]) & (place < batch.lengths[:, None] - 1)


def accepted_by_steps(outputs: Sequence[Tensor], scores: Scores, draft_ids: DraftIds, batch: Batch) -> Tensor:
    """Accepted guesses of a chain after each last known token: int64 [batch, tokens], 0 where none starts.

    `outputs` are those of each step [batch, tokens, hidden]: step k of slot i guesses token i + 2 + k.
    """
    flat = [output.flatten(0, 1) for output in outputs]

    def guess(starts: Tensor) -> Tensor:
        students = torch.stack([output[(starts - 1).clamp(min=0)] for output in flat])
        return scores(students).argmax(-1)

    return _accepted(guess, len(outputs), draft_ids, batch)


def accepted_by_blocks(head: BlockHead, features: Tensor, draft_ids: DraftIds, batch: Batch) -> Tensor:
    """The same, of a head that guesses a block at once: each last known token is the anchor of one."""
    steps, width = head.block.num_drafts, batch.tokens.shape[1]
    guessed = torch.zeros(steps, *batch.tokens.shape, dtype=torch.int64, device=batch.tokens.device)
    for first in range(int(batch.answers.min()), width, BLOCKS_AT_ONCE):
        anchors = torch.arange(first, min(first + BLOCKS_AT_ONCE, width), device=batch.tokens.device)
        outputs = run_blocks(head, features, batch.tokens, anchors.expand(len(batch.tokens), -1))
        slots = outputs if head.block.sample_from_anchor else outputs[:, :, 1:]
        before = (anchors[:, None] + torch.arange(steps, device=anchors.device)).clamp(max=width - 1)
        logits = head.guesses(slots.flatten(0, 2), batch.tokens[:, before].flatten())
        best = logits.argmax(-1).view(len(batch.tokens), len(anchors), steps)
        guessed[:, :, anchors] = best.permute(2, 0, 1)
    return _accepted(lambda starts: guessed.flatten(1)[:, starts], steps, draft_ids, batch)


def _accepted(guess: Callable[[Tensor], Tensor], steps: int, draft_ids: DraftIds, batch: Batch) -> Tensor:
    """Count the leading right guesses; `guess` gives draft ids [steps, starts] of chains that start there."""
    tokens, width = batch.tokens, batch.tokens.shape[1]
    lengths = torch.zeros(tokens.numel(), dtype=torch.int64, device=tokens.device)
    starts = torch.nonzero(draft_starts(batch).flatten()).flatten()
    ahead = torch.arange(1, steps + 1, device=tokens.device)[:, None]
    chunk = max(1, LOGITS_AT_ONCE[tokens.device.type] // (steps * len(draft_ids.ids)))
    for part in torch.split(starts, chunk):
        wanted = part + ahead  # [steps, starts] places of the guessed tokens
        inside = part % width + ahead < batch.lengths[part // width]
        true = tokens.flatten()[wanted.clamp(max=tokens.numel() - 1)]
        right = (draft_ids.ids[guess(part)] == true) & inside
        lengths[part] = right.long().cumprod(0).sum(0)
    return lengths.view(tokens.shape)


def tokens_per_pass(accepted: Accepted, batches: Iterable[Batch]) -> float:
    """Tokens of a verification of the answers in these batches; 1 is plain decoding."""
    tokens = verified = 0
    for batch in batches:
        tokens += int((batch.lengths - 1 - batch.answers).sum())
        verified += len(lengths_by_pass(accepted, batch))
    return tokens / max(1, verified)


def lengths_by_pass(accepted: Accepted, batch: Batch) -> list[int]:
    """Accepted guesses of every pass that the answers of a batch take."""
    ends = zip(batch.answers.tolist(), batch.lengths.tolist(), strict=True)
    rows = zip(accepted(batch).tolist(), ends, strict=True)
    return [length for row, (answer, end) in rows for length in by_pass(row[answer : end - 1])]


def by_pass(accepted: Sequence[int]) -> list[int]:
    """Accepted guesses of each pass, from the number of right guesses after each start.

    A pass starts after the tokens of the one before. Where many drafts are accepted, few passes start, so a
    mean over all tokens would be too high.
    """
    found: list[int] = []
    place = 0
    while place < len(accepted):
        found.append(accepted[place])
        place += accepted[place] + 1
    return found
