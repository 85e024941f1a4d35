"""What a head in training would draft: replayed chains, counted against the answers on record.

A guess counts only if all guesses before it were right, and then a chain has read the true tokens. So feeding
the true tokens, which runs all drafts of a sequence at once, gives exactly the lengths of chains that are
drafted one after the other; test_acceptance.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.models.heads.torch_block import BlockHead
from paceline.train.loop.batches import Batch
from paceline.train.loop.sequences import LOGITS_AT_ONCE
from paceline.train.objectives.block import Anchors, run_blocks
from paceline.train.objectives.losses import DraftIds, Scores

BLOCKS_AT_ONCE = 32  # per document

Accepted = Callable[[Batch], Tensor]  # accepted guesses of a chain after each token: int64 [1, tokens]


def accepted_by_steps(outputs: Sequence[Tensor], scores: Scores, draft_ids: DraftIds, batch: Batch) -> Tensor:
    """Accepted guesses of a chain after each last known token: int64 [1, tokens], 0 where none starts.

    `outputs` are those of each step [1, tokens, hidden]: step k of slot i guesses token i + 2 + k. A draft
    starts after an answered token that another one follows: the first answered one is sampled without.
    """

    def guess(starts: Tensor) -> Tensor:
        students = torch.stack([output[0, (starts - 1).clamp(min=0)] for output in outputs])
        return scores(students).argmax(-1)

    return _accepted(guess, len(outputs), draft_ids, batch)


def accepted_by_blocks(head: BlockHead, features: Tensor, draft_ids: DraftIds, batch: Batch) -> Tensor:
    """The same, of a head that guesses a block at once: each last known token is the anchor of one."""
    steps, width = head.block.num_drafts, batch.tokens.shape[1]
    guessed = torch.zeros(steps, width, dtype=torch.int64, device=batch.device)
    documents = list(zip(batch.answers, batch.sizes, strict=True))
    longest = max(size - 1 - answer for answer, size in documents)
    for first in range(0, longest, BLOCKS_AT_ONCE):
        chosen = [
            np.arange(answer + first, min(answer + first + BLOCKS_AT_ONCE, size - 1))
            for answer, size in documents
        ]
        anchors = Anchors.of(batch, chosen)
        outputs = run_blocks(head, features, batch, anchors)
        slots = outputs if head.block.sample_from_anchor else outputs[:, 1:]
        before = anchors.places[:, None] + torch.arange(steps, device=batch.device)
        logits = head.guesses(slots.flatten(0, 1), batch.tokens[0, before.clamp(max=width - 1)].flatten())
        guessed[:, anchors.places] = logits.argmax(-1).view(-1, steps).T
    return _accepted(lambda starts: guessed[:, starts], steps, draft_ids, batch)


def _accepted(guess: Callable[[Tensor], Tensor], steps: int, draft_ids: DraftIds, batch: Batch) -> Tensor:
    """Count the leading right guesses; `guess` gives draft ids [steps, starts] of chains that start there."""
    tokens, device = batch.tokens[0], batch.device
    lengths = torch.zeros(len(tokens), dtype=torch.int64, device=device)
    ahead = torch.arange(1, steps + 1, device=device)[:, None]
    chunk = max(1, LOGITS_AT_ONCE[device.type] // (steps * len(draft_ids.ids)))
    for part in torch.split(batch.taught, chunk):
        wanted = part + ahead  # [steps, starts] places of the guessed tokens
        true = tokens[wanted.clamp(max=len(tokens) - 1)]
        right = (draft_ids.ids[guess(part)] == true) & (wanted < batch.ends[part])
        lengths[part] = right.long().cumprod(0).sum(0)
    return lengths[None]


def tokens_per_pass(accepted: Accepted, batches: Iterable[Batch]) -> float:
    """Tokens of a verification of the answers in these batches; 1 is plain decoding."""
    tokens = verified = 0
    for batch in batches:
        tokens += len(batch.taught)
        verified += len(lengths_by_pass(accepted(batch), batch))
    return tokens / max(1, verified)


def lengths_by_pass(accepted: Tensor, batch: Batch) -> list[int]:
    """Accepted guesses of every pass that the answers of a batch take; `accepted` is as Accepted gives it."""
    row = accepted[0].tolist()
    documents = zip(batch.begins, batch.answers, batch.sizes, strict=True)
    return [
        length
        for begin, answer, size in documents
        for length in by_pass(row[begin + answer : begin + size - 1])
    ]


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
