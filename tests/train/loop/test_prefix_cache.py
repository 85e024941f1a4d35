"""Common starts of prompts are computed once, and the states are those of the whole sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models.registry import load_checkpoint
from paceline.models.transformer.model import Transformer
from paceline.train.loop import prefix_cache
from paceline.train.loop.batches import Batch, pack
from paceline.train.loop.prefix_cache import MAX_PROMPTS, PrefixCache
from paceline.train.loop.sequences import load_target, run_layers, target_states
from tests import tiny, tiny_families

LAYERS = (0, 1, 2)


def batch_of(*prompts: list[int], answer: int = 6) -> Batch:
    """These prompts, each with an answer of its own."""
    generator = torch.Generator().manual_seed(sum(map(sum, prompts)))
    sequences = [
        prompt + torch.randint(tiny_families.VOCAB_SIZE, (answer,), generator=generator).tolist()
        for prompt in prompts
    ]
    return pack(sequences, [len(prompt) for prompt in prompts], torch.device("cpu"))


def batches() -> list[Batch]:
    system, other = list(range(20, 32)), list(range(60, 70))
    return [
        batch_of([*system, 1, 2]),
        batch_of([*system, 3], [*system, 4, 5, 6]),  # of other lengths, in one batch
        batch_of([*other, 8]),
        batch_of([*system, 1], [*other, 1]),  # which have nothing in common
        batch_of([*other, 9, 9]),
        batch_of([*system, 1, 2]),  # the whole prompt is known
        batch_of([*system, 1, 2, 3, 4]),
        batch_of(system[:5]),
    ]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3", "mixtral"])
def test_states_are_those_of_the_whole_sequences(family: str, folder_of: Path) -> None:
    folder = tiny.save_checkpoint(family, folder_of / f"prefix-{family}")
    model = load_target(load_checkpoint(folder), torch.device("cpu"), torch.float32)
    states = PrefixCache(model, LAYERS)
    for batch in batches():
        found, wanted = states(batch), target_states(model, batch, LAYERS)
        torch.testing.assert_close(found.features, wanted.features, rtol=1e-4, atol=1e-5)
        answered = batch.since_answer >= 0
        torch.testing.assert_close(found.final[:, answered], wanted.final[:, answered], rtol=1e-4, atol=1e-4)
        assert torch.equal(found.best, wanted.best)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that the target computes."""
    numbers: list[int] = []

    def counted(model, tokens, positions, attend, wanted):  # type: ignore[no-untyped-def]
        numbers.append(tokens.numel())
        return run_layers(model, tokens, positions, attend, wanted)

    monkeypatch.setattr(prefix_cache, "run_layers", counted)
    return numbers


def test_the_target_computes_a_common_start_once(target: Transformer, computed: list) -> None:
    states = PrefixCache(target, LAYERS)
    for batch in batches():
        states(batch)
    assert computed == [20, 7 + 9, 17, 19 + 17, 8, 6, 8, 6]


def test_the_prompts_that_were_not_used_for_long_are_forgotten(target: Transformer, computed: list) -> None:
    states = PrefixCache(target, LAYERS)
    first, *others = ([10 * start + place for place in range(10)] for start in range(MAX_PROMPTS + 1))
    for prompt in (first, *others[:-1], first, others[-1]):
        states(batch_of(prompt))
    computed.clear()
    for prompt in (first, others[0]):
        states(batch_of([*prompt, 1]))
    assert computed == [7, 17]
