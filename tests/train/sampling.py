"""Answers of a target without an engine, to train heads on in tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.transformer.model import Transformer
from paceline.train.loop.batches import pack
from paceline.train.loop.sequences import target_states


def sampled(
    target: Transformer, prompts: list[list[int]], temperature: float, ends: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """An answer to each prompt, sampled by Gumbel-max: all sequences are recomputed for every token."""
    generator = torch.Generator().manual_seed(0)
    texts = [list(prompt) for prompt in prompts]
    growing = list(range(len(prompts)))
    for _ in range(max_tokens):
        batch = pack([texts[row] for row in growing], [0] * len(growing), target.embedding.device)
        last = [begin + size - 1 for begin, size in zip(batch.begins, batch.sizes, strict=True)]
        logits = target_states(target, batch, (0,)).final[0, last] @ target.head.T
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        for row, token in zip(growing, (logits - temperature * noise).argmax(-1).tolist(), strict=True):
            texts[row].append(token)
        growing = [row for row in growing if texts[row][-1] not in ends]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
