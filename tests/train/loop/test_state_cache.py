"""States that are kept: those of the target, rounded a little, and computed once."""

from __future__ import annotations

import pytest
import torch

from paceline.models.transformer.model import Transformer
from paceline.train.loop.batches import Batch, pack
from paceline.train.loop.sequences import TargetStates, target_states
from paceline.train.loop.state_cache import StateCache
from tests import tiny_families

LAYERS = (1, 2, 3)
LENGTHS = (12, 7, 10)
STARTS = (0, 12, 19)  # where the sequences are among all tokens


def batch_of(rows: list[int]) -> Batch:
    tokens = torch.randint(tiny_families.VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(2))
    sequences = [tokens[row, : LENGTHS[row]].tolist() for row in rows]
    return pack(sequences, [0] * len(rows), torch.device("cpu"), [STARTS[row] for row in rows])


def agree(found: TargetStates, wanted: TargetStates, tolerance: float) -> bool:
    """Whether each token's hidden states differ by at most this share of the largest of their values."""
    pairs = zip((found.features, found.final), (wanted.features, wanted.final), strict=True)
    return torch.equal(found.best, wanted.best) and all(
        float(((a - b).abs().amax(-1) / b.abs().amax(-1)).max()) <= tolerance for a, b in pairs
    )


def test_states_are_kept_and_put_together_again_for_other_batches(target: Transformer) -> None:
    states = StateCache(target, LAYERS, sum(LENGTHS), gigabytes=1)
    for rows in ([0, 1], [2, 0], [1, 2], [2]):  # new ones only, new beside kept, and only kept ones
        batch = batch_of(rows)
        wanted = target_states(target, batch, LAYERS)
        assert agree(states(batch), wanted, 0.04)


def test_the_target_computes_an_example_once(target: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(model: Transformer, batch: Batch, layers: tuple[int, ...]) -> TargetStates:
        computed.append(len(batch.sizes))
        return target_states(model, batch, layers)

    monkeypatch.setattr("paceline.train.loop.state_cache.target_states", counted)
    states = StateCache(target, LAYERS, sum(LENGTHS), gigabytes=1)
    for rows in ([0, 1], [2, 0], [1, 2, 0]):
        states(batch_of(rows))
    assert computed == [2, 1]


def test_without_memory_states_are_those_of_the_target(target: Transformer) -> None:
    states = StateCache(target, LAYERS, sum(LENGTHS))
    for batch in (batch_of([0, 1]), batch_of([0, 1])):
        assert agree(states(batch), target_states(target, batch, LAYERS), 0.0)
