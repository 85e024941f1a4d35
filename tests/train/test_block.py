"""Blocks of all anchors at once, and their loss, equal those of each block run on its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.models.attention import attend
from paceline.models.heads.torch_block import BlockHead, block_mask
from paceline.models.heads.torch_head import Shared
from paceline.models.transformer import Transformer
from paceline.train import block as block_module
from paceline.train.batches import Batch
from paceline.train.block import block_losses, random_anchors, run_blocks
from paceline.train.block_objective import block_config, equalize_features, new_block_head
from paceline.train.examples import Examples
from paceline.train.losses import DraftIds, cross_entropy, l1_mixture
from paceline.train.options import BlockOptions, DSparkOptions, JetSpecOptions
from paceline.train.sequences import target_states
from tests import tiny_families
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, random_tensors
from tests.train.heads import DRAFT_IDS

NAMES = ("dflash", "jetspec", "windows", "dspark")
ANCHORS = torch.tensor([[2, 9, 4], [5, 3, -1], [7, -1, -1]])


def block_head(name: str, target: Transformer) -> BlockHead:
    """A random head for a tiny target; it predicts DRAFT_IDS."""
    config = replace(BLOCK_CONFIGS[name], draft_vocab_size=len(DRAFT_IDS), own_lm_head=True)
    head = BlockHead(config, Shared(target.embedding, target.head, target.norm.weight, target.norm.eps))
    head.load_state_dict({key: torch.from_numpy(values) for key, values in random_tensors(config).items()})
    return head


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(tiny_families.VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(1))
    return Batch(tokens, torch.tensor([3, 1, 8]), torch.tensor([12, 7, 10]))


@torch.no_grad()
def output_of(head: BlockHead, features: torch.Tensor, tokens: torch.Tensor, anchor: int) -> torch.Tensor:
    """The outputs of one block [slots, hidden], from the features of the tokens before its anchor alone."""
    context, before = head.context(features[:anchor]), torch.arange(anchor)
    slots = anchor + torch.arange(head.block.size)
    in_block = torch.arange(anchor + head.block.size) >= anchor
    distance = slots[:, None] - torch.cat((before, slots))

    def attend_in_layer(layer, query, key, value):
        keys, values = head.keys_values(layer, context, before)
        mask = block_mask(head, layer, distance, in_block.expand(distance.shape))
        return attend(query, torch.cat((keys, key)), torch.cat((values, value)), mask)

    masks = [head.block.mask_token_id] * (head.block.size - 1)
    return head(torch.tensor([int(tokens[anchor]), *masks]), slots, attend_in_layer)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_equals_one_run_on_its_own(target: Transformer, batch: Batch, name: str) -> None:
    head = block_head(name, target)
    features = target_states(target, batch.tokens, head.config.feature_layers).features
    outputs = run_blocks(head, features, batch.tokens, ANCHORS)
    for row, anchors in enumerate(ANCHORS.tolist()):
        for number, anchor in enumerate(anchors):
            if anchor >= 0:
                expected = output_of(head, features[row], batch.tokens[row], anchor)
                torch.testing.assert_close(outputs[row, number], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 1 << 26])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_loss_in_chunks_of_any_size_equals_the_plain_one(
    target: Transformer, batch: Batch, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "LOGITS_AT_ONCE", {"cpu": chunk})
    head, loss = block_head(name, target), l1_mixture if name == "dspark" else cross_entropy
    states = target_states(target, batch.tokens, head.config.feature_layers)
    result = block_losses(head, DraftIds(DRAFT_IDS, target.head), states, batch, ANCHORS, loss)
    losses: list[list[float]] = [[] for _ in range(head.block.num_drafts)]
    matches: list[list[float]] = [[] for _ in range(head.block.num_drafts)]
    for row, anchors in enumerate(ANCHORS.tolist()):
        for anchor in [anchor for anchor in anchors if anchor >= 0]:
            outputs = output_of(head, states.features[row], batch.tokens[row], anchor)
            for step in range(head.block.num_drafts):
                if anchor + step + 1 >= batch.lengths[row]:
                    break
                output = outputs[step if name == "dspark" else step + 1]
                before = batch.tokens[row, anchor + step]
                scores = states.final[row, anchor + step] @ target.head.T
                wanted, logits = scores[DRAFT_IDS].softmax(-1), head.guesses(output, before).detach()
                value = -float((wanted * logits.log_softmax(-1)).sum())
                if name == "dspark":
                    distance = float((wanted - logits.softmax(-1)).abs().sum())
                    estimate, accepted = head.confidence(output, before).sigmoid().item(), 1 - distance / 2
                    entropy = (
                        accepted * torch.tensor(estimate).log()
                        + (1 - accepted) * torch.tensor(1 - estimate).log()
                    )
                    value = 0.1 * value + 0.9 * distance - float(entropy)
                losses[step].append(value)
                matches[step].append(float(DRAFT_IDS[logits.argmax()] == scores.argmax()))
    assert result.losses.tolist() == pytest.approx([sum(each) / len(each) for each in losses], rel=1e-4)
    assert result.matches.tolist() == pytest.approx([sum(each) / len(each) for each in matches])


def test_tokens_from_the_anchor_on_do_not_change_a_block(target: Transformer, batch: Batch) -> None:
    head = block_head("dspark", target)
    features = target_states(target, batch.tokens, head.config.feature_layers).features
    changed = torch.where(torch.arange(12)[None, :, None] >= ANCHORS.amax(1)[:, None, None], 9.0, features)
    for row, anchor in enumerate(ANCHORS.amax(1).tolist()):
        anchors = torch.full((3, 1), anchor)
        before = run_blocks(head, features, batch.tokens, anchors)[row]
        torch.testing.assert_close(run_blocks(head, changed, batch.tokens, anchors)[row], before)


def test_anchors_are_before_answered_tokens_and_the_same_each_time(batch: Batch) -> None:
    anchors = random_anchors(batch, 0.5, seed=3)
    assert torch.equal(anchors, random_anchors(batch, 0.5, seed=3))
    assert not torch.equal(anchors, random_anchors(batch, 0.5, seed=4))
    for row, (answer, length) in enumerate(zip([3, 1, 8], [12, 7, 10], strict=True)):
        chosen = [anchor for anchor in anchors[row].tolist() if anchor >= 0]
        assert len(chosen) == len(set(chosen)) == -(-(length - answer) // 2)
        assert all(max(1, answer - 1) <= anchor < length - 1 for anchor in chosen)


def test_recipes_give_the_heads_of_their_papers(target: Transformer) -> None:
    made = {
        options.recipe: block_config(target.config, options, mask=7, name=None)
        for options in (BlockOptions(), JetSpecOptions(), DSparkOptions(layers=2, features=9))
    }
    assert {recipe: config.kind for recipe, config in made.items()} == {
        "dflash": "dflash",
        "jetspec": "dflash",
        "dspark": "dspark",
    }
    assert [made[recipe].block.num_drafts for recipe in made] == [7, 7, 7]
    assert [made[recipe].block.layers[0].causal for recipe in made] == [False, True, False]
    assert made["dspark"].block.markov_rank == 256
    assert made["dspark"].block.confidence
    layers = made["dspark"].feature_layers
    assert sorted(set(layers)) == list(layers)
    assert max(layers) <= target.config.num_layers
    head = new_block_head(
        made["dspark"], target, np.arange(8192)[: tiny_families.VOCAB_SIZE].astype(np.int32), 0
    )
    assert head.guesses(torch.zeros(60), torch.tensor(3)).abs().sum() == 0, "a new Markov head adds something"


def test_padding_changes_neither_loss_nor_gradient(target: Transformer, batch: Batch) -> None:
    head = block_head("dspark", target)
    gradients = []
    for fill in (0, 9):
        filled = torch.where(torch.arange(12) < batch.lengths[:, None], batch.tokens, fill)
        states = target_states(target, filled, head.config.feature_layers)
        head.zero_grad()
        part = replace(batch, tokens=filled)
        losses = block_losses(
            head, DraftIds(DRAFT_IDS, target.head), states, part, ANCHORS, l1_mixture
        ).losses
        losses.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    assert gradients[0].abs().sum() > 0


def test_a_new_heads_norms_give_every_dimension_of_the_features_the_same_size(
    target: Transformer, examples: Examples
) -> None:
    config = block_config(target.config, DSparkOptions(layers=1, features=2), 3, None)
    config = replace(config, draft_vocab_size=len(DRAFT_IDS))
    head = new_block_head(config, target, DRAFT_IDS.numpy(), 0)
    equalize_features(head, target, examples)
    tokens = torch.from_numpy(examples.tokens[:256]).long()[None]
    features = target_states(target, tokens, config.layers_of(target.config.num_layers)).features
    sizes = head.fc_norm(features[0, 1:]).square().mean(0).sqrt()
    assert sizes.quantile(0.05) > 0.5
    assert sizes.quantile(0.95) < 2
