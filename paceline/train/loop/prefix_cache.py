"""PrefixCache: the target's states of batches whose prompts begin alike, each common start computed once.

Prompts of one application share a system prompt and examples, often most of their tokens. As in the engine's
prefix caching, a later sequence attends to the keys and values of the start that it has in common with an
earlier one:

    an earlier prompt    s s s s s a b c
    a batch              s s s s s | d e f g      computed: d e f g, over the keys of s s s s s
                         s s s s s | h i j k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.transformer.model import Transformer
from paceline.train.loop.attention import causal_attention
from paceline.train.loop.batches import Batch
from paceline.train.loop.sequences import TargetStates, best_tokens, run_layers

MAX_PROMPTS = 4  # kept; each takes the memory of its keys, values and features


@dataclass(frozen=True)
class Prompt:
    """A prompt that was computed, by layer: keys and values [1, tokens, kv_heads, head_dim]."""

    tokens: Tensor  # int64 [tokens]
    features: Tensor  # [1, tokens, features * hidden]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def common(self, batch: Batch) -> int:
        """The number of tokens with which this prompt and all prompts of the batch begin."""
        width = min(len(self.tokens), *batch.answers)
        starts = torch.stack([batch.tokens[0, begin : begin + width] for begin in batch.begins])
        return int((starts == self.tokens[:width]).all(0).long().cumprod(0).sum())


class PrefixCache:
    """States of batches as `target_states` gives them, but for rounding; before the answers no final ones."""

    def __init__(self, target: Transformer, feature_layers: Sequence[int]) -> None:
        self._target, self._layers = target, tuple(feature_layers)
        self._prompts: list[Prompt] = []  # the least recently used first

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TargetStates:
        """The states of a batch."""
        target, (prompt, start) = self._target, self._longest(batch)
        rest, where = batch.part(range(len(batch.sizes)), start)
        keys, values = list[Tensor](), list[Tensor]()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = []
            for group in rest.groups:
                wide_key, wide_value = group.padded(key), group.padded(value)
                if prompt is not None:
                    wide_key, wide_value = (
                        torch.cat((known[layer][:, :start].expand(len(new), -1, -1, -1), new), 1)
                        for known, new in ((prompt.keys, wide_key), (prompt.values, wide_value))
                    )
                if group is rest.groups[0]:
                    keys.append(wide_key)
                    values.append(wide_value)
                mixed = causal_attention(
                    group.padded(query), wide_key, wide_value, target.config.window(layer)
                )
                parts.append(group.packed(mixed))
            return torch.cat(parts, 1)

        last, wanted = run_layers(target, rest.tokens, batch.positions[where], attend, self._layers)
        found = torch.cat(wanted, -1)
        features = found.new_zeros(1, len(batch.positions), found.shape[-1])
        final = last.new_zeros(1, len(batch.positions), last.shape[-1])
        features[:, where], final[:, where] = found, target.norm(last)
        if prompt is not None:
            features[:, batch.positions < start] = prompt.features[:, :start].repeat(1, len(batch.sizes), 1)
        first = batch.answers[0]
        if start < first / 2:  # no kept prompt stands for this one
            self._keep(Prompt(batch.tokens[0, :first], features, keys, values), first)
        return TargetStates(features, final, best_tokens(target, final, (batch.since_answer >= 0)[None]))

    def _longest(self, batch: Batch) -> tuple[Prompt | None, int]:
        """The kept prompt that has most tokens in common with the batch, and their number; None: none has."""
        common = [prompt.common(batch) for prompt in self._prompts]
        start = max(common, default=0)
        if not start:
            return None, 0
        found = self._prompts.pop(common.index(start))
        self._prompts.append(found)
        return found, start

    def _keep(self, prompt: Prompt, size: int) -> None:
        """Keep a copy of the first `size` tokens of a batch's first sequence."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor[:1, :size].clone()

        keys, values = ([copied(layer) for layer in each] for each in (prompt.keys, prompt.values))
        kept = Prompt(prompt.tokens.clone(), copied(prompt.features), keys, values)
        self._prompts = [*self._prompts, kept][-MAX_PROMPTS:]
