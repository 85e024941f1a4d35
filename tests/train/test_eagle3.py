"""The unrolled steps and their loss equal a plain draft of each slot, token by token."""

from __future__ import annotations

import pytest
import torch

from paceline.models.attention import attend
from paceline.models.heads.torch_head import Head
from paceline.models.transformer import Transformer
from paceline.train import losses as losses_module
from paceline.train.eagle3 import step_losses, unroll
from paceline.train.losses import DraftIds
from paceline.train.sequences import TargetStates, target_states
from tests import tiny_families
from tests.train.heads import DRAFT_IDS, random_head

STEPS = 4
FLAGS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
]


def drafted(head: Head, features: torch.Tensor, tokens: list[int], slot: int) -> list[torch.Tensor]:
    """Outputs of one draft that starts at a slot, as an engine runs it: with a cache, one slot per pass."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def over_cache(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        mask = torch.ones(1, len(keys), dtype=torch.bool)
        return attend(query, torch.cat(keys), torch.cat(values), mask)

    outputs = []
    for index in range(slot + STEPS):
        if index + 1 >= len(tokens):
            break
        state = head.fuse(features[index : index + 1]) if index <= slot else head.feed_back(outputs[-1])
        token, position = torch.tensor([tokens[index + 1]]), torch.tensor([index])
        outputs.append(head(state, token, position, over_cache))
    return [output[0] for output in outputs[slot:]]


def batch(target: Transformer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TargetStates]:
    """Tokens, first answered tokens, lengths and target states of three padded sequences."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(tiny_families.VOCAB_SIZE, (3, 12), generator=generator)
    answers, lengths = torch.tensor([3, 1, 8]), torch.tensor([12, 7, 10])
    return tokens, answers, lengths, target_states(target, tokens, (1, 2, 3))


@pytest.mark.parametrize("flags", FLAGS)
def test_every_step_of_every_slot_equals_a_draft_run_on_its_own(
    target: Transformer, flags: dict[str, bool]
) -> None:
    head = random_head(target, **flags)
    tokens, _, lengths, states = batch(target)
    steps = unroll(head, states.features, tokens, STEPS)
    for row, length in enumerate(lengths.tolist()):
        for slot in range(length - 1):
            alone = drafted(head, states.features[row], tokens[row, :length].tolist(), slot)
            for step, output in enumerate(alone):
                torch.testing.assert_close(steps[step][row, slot], output, rtol=1e-4, atol=1e-4)


def plain_losses(
    target: Transformer, head: Head, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, TargetStates]
) -> tuple[list[float], list[float]]:
    """Mean cross-entropy and fraction of matches per step, over drafts that start in the answers."""
    tokens, answers, lengths, states = parts
    losses: list[list[float]] = [[] for _ in range(STEPS)]
    matches: list[list[float]] = [[] for _ in range(STEPS)]
    for row, length in enumerate(lengths.tolist()):
        for slot in range(int(answers[row]) - 1, length - 2):
            outputs = drafted(head, states.features[row], tokens[row, :length].tolist(), slot)
            for step in range(STEPS):
                if slot + 2 + step >= length:  # nothing was answered there
                    break
                scores = states.final[row, slot + 1 + step] @ target.head.T
                wanted = scores[DRAFT_IDS].softmax(-1)
                guesses = head.logits(outputs[step])
                losses[step].append(-float((wanted * guesses.detach().log_softmax(-1)).sum()))
                matches[step].append(float(DRAFT_IDS[guesses.argmax()] == scores.argmax()))
    return [sum(each) / len(each) for each in losses], [sum(each) / len(each) for each in matches]


@pytest.mark.parametrize("chunk", [1, 700, 1 << 26])
def test_the_loss_in_chunks_of_any_size_equals_the_plain_one(
    target: Transformer, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(losses_module, "LOGITS_AT_ONCE", {"cpu": chunk})
    head = random_head(target)
    parts = batch(target)
    tokens, answers, lengths, states = parts
    result = step_losses(head, DraftIds(DRAFT_IDS, target.head), states, tokens, answers, lengths, STEPS)
    losses, matches = plain_losses(target, head, parts)
    assert result.losses.tolist() == pytest.approx(losses, rel=1e-4)
    assert result.matches.tolist() == pytest.approx(matches)


def test_draft_ids_may_be_in_any_order(target: Transformer) -> None:
    ids = DraftIds(torch.tensor([9, 4, 7]), target.head)
    assert ids.inverse[[9, 4, 7, 0]].tolist() == [0, 1, 2, -1]


def test_padding_changes_neither_loss_nor_gradient(target: Transformer) -> None:
    head = random_head(target)
    tokens, answers, lengths, states = batch(target)
    gradients = []
    for fill in (0, 9):
        filled = torch.where(torch.arange(12) < lengths[:, None], tokens, fill)
        states = target_states(target, filled, (1, 2, 3))
        head.zero_grad()
        ids = DraftIds(DRAFT_IDS, target.head)
        step_losses(head, ids, states, filled, answers, lengths, STEPS).losses.sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in head.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    assert gradients[0].abs().sum() > 0


def test_the_weights_of_the_target_get_no_gradient(target: Transformer) -> None:
    head = random_head(target)
    tokens, answers, lengths, states = batch(target)
    ids = DraftIds(DRAFT_IDS, target.head)
    step_losses(head, ids, states, tokens, answers, lengths, STEPS).losses.sum().backward()
    assert target.embedding.grad is None
    assert {name for name, parameter in head.named_parameters() if parameter.grad is None} == set()
