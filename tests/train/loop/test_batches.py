"""The examples of a run: which are trained on, which are held out, and their batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.train.data.examples import Examples
from paceline.train.loop.batches import (
    collate,
    epoch_batches,
    segment_shares,
    split,
)


def test_an_epoch_has_every_example_once_and_no_batch_is_too_large(examples: Examples) -> None:
    chosen, held_out = split(examples, 0.1, seed=0)
    assert sorted([*chosen, *held_out]) == list(range(len(examples)))
    for epoch in range(2):
        batches = epoch_batches(examples, chosen, 96, 0, epoch)
        assert sorted(np.concatenate(batches)) == chosen.tolist()
        for indices in batches:
            assert collate(examples, indices, torch.device("cpu")).tokens.numel() <= 96
    first, second = (np.concatenate(epoch_batches(examples, chosen, 96, 0, epoch)) for epoch in range(2))
    assert first.tolist() != second.tolist()


def test_weights_say_how_often_an_epoch_has_the_examples_of_a_segment(examples: Examples) -> None:
    segments = ["chat" if index % 2 else "code" for index in range(len(examples))]
    mixed = replace(examples, segments=segments)
    shares = segment_shares(mixed, {"chat": 2.5})
    chosen = np.arange(len(examples))
    epochs = [np.concatenate(epoch_batches(mixed, chosen, 96, 0, epoch, shares)) for epoch in range(8)]
    counts = np.array([np.bincount(epoch, minlength=len(examples)) for epoch in epochs])
    assert (counts[:, ::2] == 1).all()
    assert set(counts[:, 1::2].flat) == {2, 3}
    assert abs(counts[:, 1::2].mean() - 2.5) < 0.2
    rare = segment_shares(mixed, {"chat": 1e-6, "code": 1e-9})
    assert [len(batch) for batch in epoch_batches(mixed, chosen, 96, 0, 0, rare)] == [1]
    with pytest.raises(ConfigError, match="has the segments chat, code"):
        segment_shares(mixed, {"chats": 2.0})


def test_at_least_one_prompt_is_held_out_unless_disabled(examples: Examples) -> None:
    assert len(np.unique(examples.prompts[split(examples, 0.001, seed=0)[1]])) == 1
    assert not len(split(examples, 0.0, seed=0)[1])


def test_all_answers_to_a_prompt_are_held_out_or_none(examples: Examples) -> None:
    chosen, held_out = split(examples, 0.2, seed=3)
    assert len(held_out) > 2
    assert not set(examples.prompts[chosen]) & set(examples.prompts[held_out])
