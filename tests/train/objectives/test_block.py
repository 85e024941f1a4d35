"""Blocks of all anchors at once, and their loss, equal those of each block run on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.models.heads.torch_block import BlockHead, block_mask
from paceline.models.heads.torch_head import Shared
from paceline.models.transformer.attention import attend
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop.batches import Batch, pack
from paceline.train.loop.sequences import target_states
from paceline.train.objectives import block as block_module
from paceline.train.objectives.block import Anchors, block_losses, random_anchors, run_blocks
from paceline.train.objectives.block_objective import block_config, equalize_features, new_block_head
from paceline.train.objectives.losses import LOSSES, DraftIds, cross_entropy, l1_mixture
from paceline.train.options import BlockOptions, DFlash2Options, DSparkOptions, JetSpecOptions
from tests import tiny_families
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, random_tensors
from tests.train.heads import DRAFT_IDS, by_document, random_batch

NAMES = ("dflash", "jetspec", "windows", "dspark", "dflash2")
ANCHORS = ([5, 3], [2, 9, 4], [7])  # of each document


def block_head(name: str, target: Transformer) -> BlockHead:
    """A random head for a tiny target; it predicts DRAFT_IDS."""
    config = replace(BLOCK_CONFIGS[name], draft_vocab_size=len(DRAFT_IDS), own_lm_head=True)
    head = BlockHead(config, Shared(target.embedding, target.head, target.norm.weight, target.norm.eps))
    head.load_state_dict({key: torch.from_numpy(values) for key, values in random_tensors(config).items()})
    return head


@pytest.fixture
def batch() -> Batch:
    return random_batch()


def anchors_of(batch: Batch, chosen: Sequence[Sequence[int]] = ANCHORS) -> Anchors:
    return Anchors.of(batch, [np.array(each, dtype=np.int64) for each in chosen])


def each_block(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """The number, the document and the anchor of each block."""
    pairs = ((document, anchor) for document, anchors in enumerate(ANCHORS) for anchor in anchors)
    return ((number, *pair) for number, pair in enumerate(pairs))


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


@pytest.mark.usefixtures("free_padding")
@pytest.mark.parametrize("name", NAMES)
def test_every_block_equals_one_run_on_its_own(target: Transformer, batch: Batch, name: str) -> None:
    head = block_head(name, target)
    features = target_states(target, batch, head.config.feature_layers).features
    outputs = run_blocks(head, features, batch, anchors_of(batch))
    rows, tokens = by_document(batch, features), by_document(batch, batch.tokens)
    for number, document, anchor in each_block(batch):
        expected = output_of(head, rows[document], tokens[document], anchor)
        torch.testing.assert_close(outputs[number], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 1 << 26])
@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("weigh", [False, True])
def test_the_loss_in_chunks_of_any_size_equals_the_plain_one(
    target: Transformer, batch: Batch, name: str, weigh: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "LOGITS_AT_ONCE", {"cpu": chunk})
    head, loss = block_head(name, target), l1_mixture if name == "dspark" else cross_entropy
    states = target_states(target, batch, head.config.feature_layers)
    ids = DraftIds(DRAFT_IDS, target.head)
    result = block_losses(head, ids, states, batch, anchors_of(batch), loss, weigh)
    losses: list[list[float]] = [[] for _ in range(head.block.num_drafts)]
    matches: list[list[float]] = [[] for _ in range(head.block.num_drafts)]
    rows = [by_document(batch, each) for each in (states.features, batch.tokens, states.final)]
    for _, document, anchor in each_block(batch):
        features, tokens, final = (each[document] for each in rows)
        outputs = output_of(head, features, tokens, anchor)
        values, chances = [], []
        for step in range(min(head.block.num_drafts, len(tokens) - 1 - anchor)):
            output = outputs[step if name == "dspark" else step + 1]
            before, answered = tokens[anchor + step], int(tokens[anchor + step + 1])
            scores = final[anchor + step] @ target.head.T
            wanted, logits = scores[DRAFT_IDS].softmax(-1), head.unselected(output, before).detach()
            value = -float((wanted * logits.log_softmax(-1)).sum())
            right = DRAFT_IDS.tolist().index(answered) if answered in DRAFT_IDS else None
            if name == "dspark":
                distance = float((wanted - logits.softmax(-1)).abs().sum())
                estimate, accepted = head.confidence(output, before).sigmoid().item(), 1 - distance / 2
                entropy = (
                    accepted * torch.tensor(estimate).log()
                    + (1 - accepted) * torch.tensor(1 - estimate).log()
                )
                value = 0.1 * value + 0.9 * distance - float(entropy)
            best = head.guesses(output, before).detach()  # -inf for all but a selector's candidates
            if name == "dflash2" and right is not None and best[right] > -torch.inf:
                value -= float(best.log_softmax(-1)[right])
            values.append(value)
            chances.append(0.0 if right is None else float(logits.softmax(-1)[right]))
            matches[step].append(float(DRAFT_IDS[best.argmax()] == scores.argmax()))
        smoothed = np.cumprod([0.5 + 0.5 * chance for chance in chances])
        for step, value in enumerate(values):
            losses[step].append(value * (smoothed[step:].sum() if weigh else 1.0))
    assert result.losses.tolist() == pytest.approx([sum(each) / len(each) for each in losses], rel=1e-4)
    assert result.matches.tolist() == pytest.approx([sum(each) / len(each) for each in matches])


def test_tokens_from_the_anchor_on_do_not_change_a_block(target: Transformer, batch: Batch) -> None:
    head = block_head("dspark", target)
    features = target_states(target, batch, head.config.feature_layers).features
    last = [max(anchors) for anchors in ANCHORS]
    is_later = batch.positions >= torch.tensor(last).repeat_interleave(torch.tensor(batch.sizes))
    changed = torch.where(is_later[None, :, None], 9.0, features)
    anchors = anchors_of(batch, [[anchor] for anchor in last])
    before = run_blocks(head, features, batch, anchors)
    torch.testing.assert_close(run_blocks(head, changed, batch, anchors), before)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.usefixtures("free_padding")
def test_a_document_learns_nothing_from_the_others_in_its_row(target: Transformer, number: int) -> None:
    head, batch = block_head("dspark", target), random_batch()
    anchors = [each if place == number else [] for place, each in enumerate(ANCHORS)]
    gradients = []
    for add in (0, 1):
        ids = list(by_document(batch, batch.tokens))
        ids = [each if place == number else (each + add) % 100 for place, each in enumerate(ids)]
        changed = replace(batch, tokens=torch.cat(ids)[None])
        states = target_states(target, changed, head.config.feature_layers)
        head.zero_grad()
        draft_ids, given = DraftIds(DRAFT_IDS, target.head), anchors_of(changed, anchors)
        losses = block_losses(head, draft_ids, states, changed, given, l1_mixture).losses
        losses.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().sum() > 0


def test_anchors_are_before_answered_tokens_and_the_same_each_time(batch: Batch) -> None:
    anchors = random_anchors(batch, 0.5, seed=3)
    assert torch.equal(anchors.places, random_anchors(batch, 0.5, seed=3).places)
    assert not torch.equal(anchors.places, random_anchors(batch, 0.5, seed=4).places)
    documents = zip(batch.begins, batch.answers, batch.sizes, anchors.counts, strict=True)
    for (begin, answer, size, count), places in zip(
        documents, anchors.places.split(list(anchors.counts)), strict=True
    ):
        chosen = [place - begin for place in places.tolist()]
        assert len(chosen) == len(set(chosen)) == count == -(-(size - answer) // 2)
        assert all(max(1, answer - 1) <= anchor < size - 1 for anchor in chosen)


def test_recipes_give_the_heads_of_their_papers(target: Transformer) -> None:
    made = {
        options.recipe: block_config(target.config, options, mask=7, name=None)
        for options in (
            BlockOptions(),
            JetSpecOptions(),
            DSparkOptions(layers=2, features=9),
            DFlash2Options(convolution_group=4),
        )
    }
    assert {recipe: config.kind for recipe, config in made.items()} == {
        "dflash": "dflash",
        "jetspec": "dflash",
        "dspark": "dspark",
        "dflash2": "dflash",
    }
    assert [made[recipe].block.num_drafts for recipe in made] == [7, 7, 7, 7]
    assert [made[recipe].block.layers[0].causal for recipe in made] == [False, True, False, False]
    assert made["dspark"].block.markov_rank == 256
    assert made["dspark"].block.confidence
    layers = made["dspark"].feature_layers
    assert sorted(set(layers)) == list(layers)
    assert max(layers) <= target.config.num_layers
    head = new_block_head(
        made["dspark"], target, np.arange(8192)[: tiny_families.VOCAB_SIZE].astype(np.int32), 0
    )
    assert head.guesses(torch.zeros(60), torch.tensor(3)).abs().sum() == 0, "a new Markov head adds something"


def test_a_new_dflash2_head_is_a_dflash_head_and_all_of_it_learns(target: Transformer, batch: Batch) -> None:
    options = DFlash2Options(layers=2, features=2, block_size=4, convolution_group=4, selector_rank=8)
    sizes = {"draft_vocab_size": len(DRAFT_IDS)}
    ids = DRAFT_IDS.numpy().astype(np.int32)
    config = replace(block_config(target.config, options, 7, None), **sizes)
    head = new_block_head(config, target, ids, 0)
    plain = BlockOptions(layers=2, features=2, block_size=4)
    without = new_block_head(replace(block_config(target.config, plain, 7, None), **sizes), target, ids, 0)
    without.load_state_dict({name: head.state_dict()[name] for name in without.state_dict()})
    states, anchors = target_states(target, batch, config.feature_layers), anchors_of(batch)
    run = [run_blocks(each, states.features, batch, anchors) for each in (head, without)]
    torch.testing.assert_close(run[0], run[1])
    tokens = torch.arange(3, 3 + 4).expand(len(run[0]), -1)
    selected = head.selected(head.unselected(run[0], tokens), run[0], tokens)
    assert selected is not None
    torch.testing.assert_close(selected[1], without.guesses(run[1], tokens).topk(16).values)
    loss = LOSSES[options.loss]
    draft_ids = DraftIds(DRAFT_IDS, target.head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(2):  # a codebook that begins with zeros gives the other no gradient in the first step
        head.zero_grad()
        block_losses(head, draft_ids, states, batch, anchors, loss).losses.sum().backward()
        optimizer.step()
    assert [name for name, each in head.named_parameters() if not each.grad.abs().sum() > 0] == []


def test_convolutions_must_divide_the_targets_hidden_size(target: Transformer) -> None:
    with pytest.raises(ConfigError, match="hidden size is 60: give a --convolution-group that divides it"):
        block_config(target.config, DFlash2Options(), 7, None)


def test_a_new_heads_norms_give_every_dimension_of_the_features_the_same_size(
    target: Transformer, examples: Examples
) -> None:
    config = block_config(target.config, DSparkOptions(layers=1, features=2), 3, None)
    config = replace(config, draft_vocab_size=len(DRAFT_IDS))
    head = new_block_head(config, target, DRAFT_IDS.numpy(), 0)
    equalize_features(head, target, examples)
    text = pack([examples.tokens[:256]], [0], torch.device("cpu"))
    features = target_states(target, text, config.layers_of(target.config.num_layers)).features
    sizes = head.fc_norm(features[0, 1:]).square().mean(0).sqrt()
    assert sizes.quantile(0.05) > 0.5
    assert sizes.quantile(0.95) < 2
