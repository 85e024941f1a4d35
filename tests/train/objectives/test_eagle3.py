"""The unrolled steps and their loss equal a plain draft of each slot, token by token."""

from __future__ import annotations

import pytest
import torch

from paceline.models.heads.torch_head import Attend, Head
from paceline.models.transformer.attention import attend
from paceline.models.transformer.model import Transformer
from paceline.train.loop.batches import Batch, pack
from paceline.train.loop.sequences import TargetStates, target_states
from paceline.train.objectives import losses as losses_module
from paceline.train.objectives.eagle3 import step_losses, unroll
from paceline.train.objectives.losses import DraftIds
from tests.large import in_turn
from tests.train.heads import DRAFT_IDS, by_document, random_batch, random_head

STEPS = 4
P_EAGLE = {"num_layers": 3, "mask_token_id": 5, "fc_norm": True}
FLAGS = {
    "plain": {},
    "norms of features and output": {"fc_norm": True, "norm_output": True},
    "norms before": {"norm_before_fc": True, "norm_before_residual": True},
    "two layers": {"num_layers": 2},
    "p-eagle": P_EAGLE,
}


def drafted(head: Head, features: torch.Tensor, tokens: list[int], slot: int) -> list[torch.Tensor]:
    """Outputs of one draft that starts at a slot, as an engine runs it: with a cache, one slot per pass."""
    caches = [over_cache() for _ in range(head.config.num_layers)]
    mask = head.config.mask_token_id
    outputs = []
    for index in range(slot + STEPS):
        if index + 1 >= len(tokens):
            break
        state = head.fuse(features[index : index + 1]) if index <= slot else head.feed_back(outputs[-1])
        token, position = torch.tensor([tokens[index + 1]]), torch.tensor([index])
        if mask is not None and index > slot:
            state, token = head.fuse(head.get_parameter("mask_hidden")[0]), torch.tensor([mask])
        outputs.append(head(state, token, position, *caches))
    return [output[0] for output in outputs[slot:]]


def over_cache() -> Attend:
    """The attention of a layer, to all slots that it was asked for before."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend_to_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        seen = torch.ones(1, len(keys), dtype=torch.bool)
        return attend(query, torch.cat(keys), torch.cat(values), seen)

    return attend_to_all


@pytest.mark.parametrize(
    ("free_padding", "flags"), in_turn({"0": 0, "128": 128}, FLAGS), indirect=["free_padding"]
)
@pytest.mark.usefixtures("free_padding")
def test_every_step_of_every_slot_equals_a_draft_run_on_its_own(
    target: Transformer, flags: dict[str, int]
) -> None:
    head = random_head(target, **flags)
    batch = random_batch()
    features = target_states(target, batch, (1, 2, 3)).features
    steps = [by_document(batch, outputs) for outputs in unroll(head, features, batch, STEPS)]
    rows = zip(by_document(batch, features), by_document(batch, batch.tokens), strict=True)
    for row, (feature, tokens) in enumerate(rows):
        for slot in range(len(tokens) - 1):
            for step, output in enumerate(drafted(head, feature, tokens.tolist(), slot)):
                torch.testing.assert_close(steps[step][row][slot], output, rtol=1e-4, atol=1e-4)


def plain_losses(
    target: Transformer, head: Head, batch: Batch, states: TargetStates
) -> tuple[list[float], list[float]]:
    """Mean cross-entropy and fraction of matches per step, over drafts that start in the answers."""
    losses: list[list[float]] = [[] for _ in range(STEPS)]
    matches: list[list[float]] = [[] for _ in range(STEPS)]
    parts = (by_document(batch, each) for each in (batch.tokens, states.features, states.final))
    for answer, tokens, features, final in zip(batch.answers, *parts, strict=True):
        for slot in range(answer - 1, len(tokens) - 2):
            outputs = drafted(head, features, tokens.tolist(), slot)
            for step in range(STEPS):
                if slot + 2 + step >= len(tokens):  # nothing was answered there
                    break
                scores = final[slot + 1 + step] @ target.head.T
                wanted = scores[DRAFT_IDS].softmax(-1)
                guesses = head.logits(outputs[step])
                losses[step].append(-float((wanted * guesses.detach().log_softmax(-1)).sum()))
                matches[step].append(float(DRAFT_IDS[guesses.argmax()] == scores.argmax()))
    return [sum(each) / len(each) for each in losses], [sum(each) / len(each) for each in matches]


@pytest.mark.parametrize(("chunk", "flags"), [(1, {}), (700, {}), (1 << 26, {}), (700, P_EAGLE)])
def test_the_loss_in_chunks_of_any_size_equals_the_plain_one(
    target: Transformer, monkeypatch: pytest.MonkeyPatch, chunk: int, flags: dict[str, int]
) -> None:
    monkeypatch.setattr(losses_module, "LOGITS_AT_ONCE", {"cpu": chunk})
    head = random_head(target, **flags)
    batch = random_batch()
    states = target_states(target, batch, (1, 2, 3))
    result = step_losses(head, DraftIds(DRAFT_IDS, target.head), states, batch, STEPS)
    losses, matches = plain_losses(target, head, batch, states)
    assert result.losses.tolist() == pytest.approx(losses, rel=1e-4)
    assert result.matches.tolist() == pytest.approx(matches)


def test_draft_ids_may_be_in_any_order(target: Transformer) -> None:
    ids = DraftIds(torch.tensor([9, 4, 7]), target.head)
    assert ids.inverse[[9, 4, 7, 0]].tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.usefixtures("free_padding")
def test_a_document_learns_nothing_from_the_others_in_its_row(target: Transformer, number: int) -> None:
    """The other documents are replaced, and have nothing answered, so that they give no losses."""
    head, batch = random_head(target), random_batch()
    outputs, gradients = [], []
    for add in (0, 1):
        tokens = [ids.clone() for ids in by_document(batch, batch.tokens)]
        answers = [size - 1 for size in batch.sizes]
        answers[number] = batch.answers[number]
        tokens = [ids if place == number else (ids + add) % 100 for place, ids in enumerate(tokens)]
        changed = pack([ids.tolist() for ids in tokens], answers, torch.device("cpu"))
        states = target_states(target, changed, (1, 2, 3))
        head.zero_grad()
        outputs.append(by_document(changed, unroll(head, states.features, changed, 1)[0])[number][:-1])
        losses = step_losses(head, DraftIds(DRAFT_IDS, target.head), states, changed, STEPS).losses
        losses.sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in head.parameters()]))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize("flags", [{}, P_EAGLE])
def test_the_weights_of_the_target_get_no_gradient(target: Transformer, flags: dict[str, int]) -> None:
    head = random_head(target, **flags)
    batch = random_batch()
    states = target_states(target, batch, (1, 2, 3))
    step_losses(head, DraftIds(DRAFT_IDS, target.head), states, batch, STEPS).losses.sum().backward()
    assert target.embedding.grad is None
    assert {name for name, parameter in head.named_parameters() if parameter.grad is None} == set()
