"""The target over padded sequences, and its batched sampler, agree with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models.registry import load_checkpoint
from paceline.models.transformer import Transformer
from paceline.train.sampler import Sampler
from paceline.train.sequences import load_target, target_states
from tests import tiny, tiny_families

LENGTHS = (13, 5, 9)


def padded(seed: int = 0) -> tuple[list[list[int]], torch.Tensor]:
    """Sequences of different lengths, and the same right-padded with tokens that would show."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        torch.randint(tiny_families.VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    return sequences, torch.tensor([row + [7] * (max(LENGTHS) - len(row)) for row in sequences])


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3", "mixtral"])
def test_states_of_padded_sequences_equal_those_of_each_alone(family: str, folder_of: Path) -> None:
    folder = tiny.save_checkpoint(family, folder_of / family)
    model = load_target(load_checkpoint(folder), torch.device("cpu"), torch.float32)
    sequences, tokens = padded()
    states = target_states(model, tokens, (0, 1, 2))
    reference = tiny.random_model(family)
    for row, ids in enumerate(sequences):
        output = reference(torch.tensor([ids]), output_hidden_states=True)
        wanted = torch.cat(output.hidden_states[:3], dim=-1)[0]
        torch.testing.assert_close(states.features[row, : len(ids)], wanted, rtol=1e-4, atol=1e-4)
        logits = states.final[row, : len(ids)] @ model.head.T
        torch.testing.assert_close(logits, output.logits[0], rtol=1e-4, atol=1e-3)


def greedy(model: Transformer, prompt: list[int], max_tokens: int, eos: int) -> list[int]:
    """The reference: the whole sequence is recomputed for every token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        final = target_states(model, torch.tensor([ids]), (0,)).final[0, -1]
        ids.append(int((final @ model.head.T).argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


def test_greedy_answers_of_a_batch_equal_those_of_each_prompt_alone(target: Transformer) -> None:
    prompts, _ = padded()
    long = greedy(target, prompts[0], 20, eos=-1)
    eos = long[6]  # so that one answer ends early, and the batch is made smaller
    answers = Sampler(target, [eos]).answer(prompts, [0.0] * 3, [0] * 3, 20)
    assert answers == [greedy(target, prompt, 20, eos) for prompt in prompts]
    assert answers[0][-1] == eos


def test_a_compacted_batch_continues_with_the_right_rows(target: Transformer) -> None:
    prompts, _ = padded()
    first = [greedy(target, prompt, 1, -1)[0] for prompt in prompts]
    assert len(set(first)) == 3
    answers = Sampler(target, first[:2]).answer(prompts, [0.0] * 3, [0] * 3, 8)
    assert answers[:2] == [[first[0]], [first[1]]]
    assert answers[2][:1] == [first[2]]
    assert answers[2] == _until(greedy(target, prompts[2], 8, -1), first[:2])


def _until(ids: list[int], ends: list[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids


def test_the_same_seed_gives_the_same_answers_and_another_does_not(target: Transformer) -> None:
    prompts, _ = padded()
    answers = [Sampler(target, []).answer(prompts, [1.0] * 3, [seed] * 3, 12) for seed in (1, 1, 2)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_tokens_are_drawn_with_the_probabilities_of_the_temperature(target: Transformer) -> None:
    prompt = padded()[0][1]
    final = target_states(target, torch.tensor([prompt]), (0,)).final[0, -1]
    wanted = (final @ target.head.T / 2.0).softmax(-1)
    answers = Sampler(target, []).answer([prompt] * 4000, [2.0] * 4000, [3] * 4000, 1)
    counts = torch.bincount(torch.tensor(answers).flatten(), minlength=tiny_families.VOCAB_SIZE)
    assert (counts / 4000 - wanted).abs().sum() < 0.25  # total variation of 4000 draws is about 0.1
