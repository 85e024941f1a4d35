"""Scoring: the variants of attention scores (scale, soft cap, sinks, latents, chunks) by model family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG2_E = 1.4426950408889634  # weights are powers of two


@dataclass(frozen=True)
class Scoring:
    """How a layer computes attention scores from query-key products. The defaults are llama's."""

    factor: float = 0.0  # scale of products; 0: 1 / sqrt(head_dim)
    cap: float = 0.0  # soft cap: cap * tanh(score / cap); 0: none
    sinks: torch.Tensor | None = None  # [heads] attention sinks: a score without a value in each softmax
    rope: int = 0  # keys are [this many RoPE numbers | latent], and the latent is the value; 0: no latents
    chunk: int = 0  # chunked attention: rows attend within chunks of this many positions; 0: none
    groups: int = 0  # groups of query heads, each with its own programs; 0: one for each KV head

    @property
    def is_native(self) -> bool:
        """Whether CUDA C++ kernels compute such scores."""
        return not self.cap and self.sinks is None and self.shares_prefixes

    @property
    def shares_prefixes(self) -> bool:
        """Whether the shared-prefix kernel supports such scores."""
        return not (self.rope or self.chunk or self.groups)

    def scale(self, dim: int) -> float:
        """The scale of products (with a cap: of their tanh) for softmax weights in base 2."""
        return (self.cap or self._factor(dim)) * LOG2_E

    def softcap(self, dim: int) -> float:
        """The scale of products within the tanh, in base 2; 0: no cap."""
        return 2 * LOG2_E * self._factor(dim) / self.cap if self.cap else 0.0

    def _factor(self, dim: int) -> float:
        return float(self.factor or dim**-0.5)


LLAMA_SCORING = Scoring()
