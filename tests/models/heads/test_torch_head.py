"""The torch networks of heads against the formulas, written down independently in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.models.transformer.attention import attend
from tests.models.heads.tiny_heads import CONFIGS, TARGET_HIDDEN, VOCAB, PlainHead, random_shared, torch_head

LENGTH = 9
AHEAD = 3


def causal(query, key, value):
    length = len(query)
    return attend(query, key, value, torch.ones(length, length, dtype=torch.bool).tril())


def sequence(config):
    rng = np.random.default_rng(8)
    features = rng.standard_normal((LENGTH, config.feature_width), dtype=np.float32)
    return features, rng.integers(0, VOCAB, LENGTH + AHEAD)


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_slots_over_features_then_over_own_states_are_those_of_the_formulas(name):
    config, shared = CONFIGS[name], random_shared()
    features, tokens = sequence(config)
    plain = PlainHead(config, shared)
    outputs = []
    for i in range(LENGTH):
        outputs.append(plain.slot(plain.fuse(features[i].astype(float)), tokens[i], i, list(range(i))))
    for i in range(LENGTH, LENGTH + AHEAD):
        outputs.append(plain.slot(plain.feed_back(outputs[-1]), tokens[i], i, list(range(i))))
    expected = np.array([plain.logits(output) for output in outputs])

    head = torch_head(config, shared)
    states = head.fuse(torch.from_numpy(features))
    for _ in range(AHEAD + 1):
        count = len(states)
        output = head(states, torch.from_numpy(tokens[:count]), torch.arange(count), causal)
        states = torch.cat((states, head.feed_back(output[-1:])))
    logits = head.logits(output).numpy()
    assert logits.shape == (LENGTH + AHEAD, config.draft_vocab_size)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


def test_every_flag_changes_the_output():
    """Or the test above could not tell a flag that is ignored."""
    seen = set()
    for name in ("eagle3", "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"):
        config, shared = CONFIGS[name], random_shared()
        plain = PlainHead(config, shared)
        feature = np.arange(config.feature_width) / 7 % 3
        first = plain.slot(plain.fuse(feature), 5, 0, [])
        seen.add(round(float(plain.logits(plain.slot(plain.feed_back(first), 6, 1, [0]))[0]), 6))
    assert len(seen) == 5


def test_a_batch_of_sequences_is_trained_through_its_own_attention():
    config, shared = CONFIGS["all flags"], random_shared()
    head = torch_head(config, shared)
    features = torch.randn(2, LENGTH, config.feature_width, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    positions = torch.arange(LENGTH).expand(2, -1)

    def one_by_one(query, key, value):
        return torch.stack([causal(*rows) for rows in zip(query, key, value, strict=True)])

    output = head(head.fuse(features), tokens, positions, one_by_one)
    alone = head(head.fuse(features[1]), tokens[1], positions[1], causal)
    torch.testing.assert_close(output[1], alone)
    assert features.shape[-1] == 3 * TARGET_HIDDEN
    head.logits(head.feed_back(output)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert shared.embedding.grad is None
