"""ModelConfig: the architecture of a model, as every backend reads it.

Families differ only by the fields below; there is one transformer, not one per family.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and, for llama 3.x, its frequency scaling."""

    theta: float = 10000.0
    scaling: str = "none"  # none | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # GGUF files carry llama3 scaling as ready divisors, one per frequency; empty when absent
    frequency_divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: every layer listed in `layers` has experts instead of one MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool  # divide the chosen experts' probabilities by their sum
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """Everything a backend must know to run a model."""

    family: str  # llama | mistral | qwen2 | mimo | qwen3 | qwen3_moe | mixtral
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before rope
    sliding_windows: tuple[int | None, ...] = ()  # one per layer; () means full attention everywhere
    moe: MoeConfig | None = None

    def window(self, layer: int) -> int | None:
        """The number of last positions, its own included, that a token of `layer` attends to; None: all."""
        return self.sliding_windows[layer] if self.sliding_windows else None
