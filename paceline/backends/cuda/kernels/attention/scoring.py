"""How attention scores follow from the products of queries and keys, where families differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG2_E = 1.4426950408889634  # weights are powers of two


@dataclass(frozen=True)
class Scoring:
    """How a layer's scores follow from the products of queries and keys. The defaults are llama's."""

    factor: float = 0.0  # of products; 0: 1 / sqrt(head_dim)
    cap: float = 0.0  # scores are cap * tanh(score / cap); 0: no cap
    sinks: torch.Tensor | None = None  # [heads] a score that takes a share of attention and has no value
    rope: int = 0  # keys are this many rotated numbers, then a latent, which is the value; 0: no latents
    chunk: int = 0  # rows see the positions since the last multiple of it; 0: all
    groups: int = 0  # of query heads, each with programs of its own; 0: one for each KV head

    @property
    def is_native(self) -> bool:
        """Whether CUDA C++ kernels compute such scores."""
        return not self.cap and self.sinks is None and self.shares_prefixes

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows with a common prefix can read it once, by kernels/attention/shared_prefix.py."""
        return not (self.rope or self.chunk or self.groups)

    def scale(self, dim: int) -> float:
        """The factor of products, or of their tanh, so that weights are powers of two."""
        return (self.cap or self._factor(dim)) * LOG2_E

    def softcap(self, dim: int) -> float:
        """The factor of products in exp2 of a tanh, or 0."""
        return 2 * LOG2_E * self._factor(dim) / self.cap if self.cap else 0.0

    def _factor(self, dim: int) -> float:
        return float(self.factor or dim**-0.5)


LLAMA_SCORING = Scoring()
