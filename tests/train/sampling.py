"""Answers of a target without an engine, to train heads on in tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.transformer import Transformer
from paceline.train.sequences import target_states


def sampled(
    target: Transformer, prompts: list[list[int]], temperature: float, ends: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """An answer to each prompt, sampled by Gumbel-max: all sequences are recomputed for every token."""
    generator = torch.Generator().manual_seed(0)
    texts = [list(prompt) for prompt in prompts]
    growing = list(range(len(prompts)))
    for _ in range(max_tokens):
        width = max(len(texts[row]) for row in growing)
        tokens = torch.tensor([texts[row] + [0] * (width - len(texts[row])) for row in growing])
        final = target_states(target, tokens, (0,)).final
        last = torch.stack([final[place, len(texts[row]) - 1] for place, row in enumerate(growing)])
        logits = last @ target.head.T
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        for row, token in zip(growing, (logits - temperature * noise).argmax(-1).tolist(), strict=True):
            texts[row].append(token)
        growing = [row for row in growing if texts[row][-1] not in ends]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
