"""States that are kept: those of the target, rounded a little, and computed once."""

from __future__ import annotations

import pytest
import torch

from paceline.models.transformer import Transformer
from paceline.train.batches import Batch
from paceline.train.sequences import TargetStates, target_states
from paceline.train.state_cache import StateCache
from tests import tiny_families

LAYERS = (1, 2, 3)
LENGTHS = (12, 7, 10)
STARTS = (0, 12, 19)  # where the sequences are among all tokens


def batch_of(rows: list[int]) -> Batch:
    tokens = torch.randint(tiny_families.VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(2))[
        rows
    ]
    lengths = torch.tensor([LENGTHS[row] for row in rows])
    return Batch(
        tokens[:, : int(lengths.max())], torch.ones_like(lengths), lengths, [STARTS[row] for row in rows]
    )


def agree(found: TargetStates, wanted: TargetStates, lengths: torch.Tensor, tolerance: float) -> bool:
    """Whether each token's hidden states differ by at most this share of the largest of their values."""
    pairs = zip((found.features, found.final), (wanted.features, wanted.final), strict=True)
    inside = torch.arange(found.final.shape[1]) < lengths[:, None]
    return all(
        float(((a - b).abs().amax(-1) / b.abs().amax(-1))[inside].max()) <= tolerance for a, b in pairs
    )


def test_states_are_kept_and_put_together_again_for_other_batches(target: Transformer) -> None:
    states = StateCache(target, LAYERS, sum(LENGTHS), gigabytes=1)
    for rows in ([0, 1], [2, 0], [1, 2], [2]):  # new ones only, new beside kept, and only kept ones
        batch = batch_of(rows)
        wanted = target_states(target, batch.tokens, LAYERS)
        assert agree(states(batch), wanted, batch.lengths, 0.04)


def test_the_target_computes_an_example_once(target: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(
        model: Transformer, tokens: torch.Tensor, layers: tuple[int, ...], answers: torch.Tensor
    ) -> TargetStates:
        computed.append(len(tokens))
        return target_states(model, tokens, layers, answers)

    monkeypatch.setattr("paceline.train.state_cache.target_states", counted)
    states = StateCache(target, LAYERS, sum(LENGTHS), gigabytes=1)
    for rows in ([0, 1], [2, 0], [1, 2, 0]):
        states(batch_of(rows))
    assert computed == [2, 1]


def test_without_memory_states_are_those_of_the_target(target: Transformer) -> None:
    states = StateCache(target, LAYERS, sum(LENGTHS))
    for batch in (batch_of([0, 1]), batch_of([0, 1])):
        assert agree(states(batch), target_states(target, batch.tokens, LAYERS), batch.lengths, 0.0)
