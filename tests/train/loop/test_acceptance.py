"""Replayed chains have the lengths of chains that are drafted token by token."""

from __future__ import annotations

import pytest
import torch

from paceline.models.transformer.model import Transformer
from paceline.train.loop import acceptance
from paceline.train.loop.acceptance import (
    accepted_by_blocks,
    accepted_by_steps,
    by_pass,
    lengths_by_pass,
    tokens_per_pass,
)
from paceline.train.loop.batches import pack
from paceline.train.loop.sequences import target_states
from paceline.train.objectives.eagle3 import unroll
from paceline.train.objectives.losses import DraftIds
from tests import tiny_families
from tests.train.heads import DRAFT_IDS, random_head
from tests.train.objectives.test_block import block_head, output_of
from tests.train.objectives.test_eagle3 import STEPS, drafted

CPU = torch.device("cpu")


def features_of(target: Transformer, row: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """The features of a sequence on its own: [tokens, width]."""
    return target_states(target, pack([row], [0], CPU), layers).features[0]


def random_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(tiny_families.VOCAB_SIZE, (length,), generator=generator).tolist() for length in (12, 9)
    ]


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 1 << 26])
def test_an_eagle3_chain_is_accepted_as_far_as_it_drafts_the_answer(
    target: Transformer, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "LOGITS_AT_ONCE", {"cpu": chunk})
    head, sequences = random_head(target), random_sequences()
    for row in sequences:  # let each sequence go on for some tokens as a chain of the head would
        for last in (4, 7):
            features = features_of(target, row, (1, 2, 3))
            output = drafted(head, features, row[: last + 1], last - 1)[0]
            row[last + 1] = int(DRAFT_IDS[head.logits(output).argmax()])
    batch = pack(sequences, [3, 2], CPU)
    features = target_states(target, batch, (1, 2, 3)).features
    outputs = unroll(head, features, batch, STEPS)
    accepted = accepted_by_steps(outputs, head.logits, DraftIds(DRAFT_IDS, target.head), batch)
    expected = torch.zeros_like(accepted)
    for begin, answer, ids in zip(batch.begins, batch.answers, sequences, strict=True):
        for last in range(answer, len(ids) - 1):
            chain = drafted(head, features_of(target, ids, (1, 2, 3)), ids, last - 1)
            for step, output in enumerate(chain[:STEPS]):
                right = last + 1 + step < len(ids)
                right = right and int(DRAFT_IDS[head.logits(output).argmax()]) == ids[last + 1 + step]
                if not right:
                    break
                expected[0, begin + last] += 1
    assert accepted.tolist() == expected.tolist()
    assert expected.sum() >= 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_is_accepted_as_far_as_it_guesses_the_answer(
    target: Transformer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "BLOCKS_AT_ONCE", 5)
    head, sequences = block_head(name, target), random_sequences()
    layers = head.config.feature_layers
    assert layers is not None

    def guesses(row: list[int], anchor: int) -> list[int]:
        features = features_of(target, row, layers)
        slots = output_of(head, features, torch.tensor(row), anchor)
        slots = slots if head.block.sample_from_anchor else slots[1:]
        before = torch.tensor([*row, 0, 0, 0, 0, 0, 0, 0, 0])[anchor : anchor + head.block.num_drafts]
        return [
            int(DRAFT_IDS[head.guesses(slot[None], token[None])[0].argmax()])
            for slot, token in zip(slots, before, strict=False)
        ]

    for row in sequences:
        for last in (4, 5):
            row[last + 1] = guesses(row, last)[0]
    batch = pack(sequences, [3, 2], CPU)
    features = target_states(target, batch, layers).features
    accepted = accepted_by_blocks(head, features, DraftIds(DRAFT_IDS, target.head), batch)
    for begin, answer, ids in zip(batch.begins, batch.answers, sequences, strict=True):
        for last in range(answer, len(ids) - 1):
            right = [a == b for a, b in zip(guesses(ids, last), ids[last + 1 :], strict=False)]
            expected = right.index(False) if False in right else len(right)
            assert int(accepted[0, begin + last]) == expected
    assert accepted.sum() >= 2


def test_a_pass_gives_what_is_accepted_and_one_token_more() -> None:
    assert by_pass([0, 0, 0]) == [0, 0, 0]
    assert by_pass([2, 1, 0, 1, 0]) == [2, 1]  # the second pass starts after the three tokens of the first
    assert by_pass([]) == []


def test_tokens_per_pass_are_of_the_passes_alone() -> None:
    """Two answers: of four tokens after the first, in two passes, and of two, in one."""
    batch = pack([[7, 1, 2, 3, 4, 5], [7, 8, 1, 2, 3]], [1, 2], CPU)
    accepted = torch.tensor([[0, 2, 9, 9, 0, 0, 0, 0, 2, 9, 0]])
    assert lengths_by_pass(accepted, batch) == [2, 0, 2]
    assert tokens_per_pass(lambda given: accepted, [batch]) == 6 / 3
