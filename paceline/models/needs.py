"""What a checkpoint needs to run: kernels for its blocks, memory for its weights and its KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import RECURRENT_WORDS, ModelConfig
from paceline.models.quantizations import BLOCKS, INT8, NATIVE, QUANTIZATIONS, is_packed

# of families whose layers all attend
ATTENTION_BLOCKS = frozenset(
    (
        "gelu_tanh activations",
        "clamped_silu activations",
        "LayerNorm",
        "post norms",
        "sandwich norms",
        "parallel norms",
        "a joint QK norm",
        "layers with different RoPE",
        "partial RoPE",
        "a scaled attention",
        "soft-capped scores",
        "attention sinks",
        "scaled residuals",
        "a sigmoid router",
        "a softmax router",
        "scaled experts",
        "shared experts",
        "experts with biases",
    )
)
# of families with recurrent layers
HYBRID_BLOCKS = frozenset((*RECURRENT_WORDS.values(), "gated attention", "gated shared experts"))
KNOWN_BLOCKS = (
    ATTENTION_BLOCKS
    | HYBRID_BLOCKS
    | {"relu2 activations", "layers of one block", "attention beside a recurrence", "tiled value heads"}
    | {"latent attention", "scaled queries", "chunked attention", "norms without weights"}
    | {"experts with scaled inputs", "experts with norms of their own"}
    | {"layers with different heads", "layers with different MLPs"}
    | {"layers that share keys and values", "scaled layers", "per-layer embeddings"}
)
# Blocks that a backend has kernels for, as ModelConfig.beyond_llama names them; torch has all
BACKEND_BLOCKS = {"cpu": KNOWN_BLOCKS | {"experts in a latent space"}, "cuda": KNOWN_BLOCKS}

NO_LIMIT: Mapping[str, int] = MappingProxyType({})
CACHED_BYTES = {"cpu": 2, "torch": 4, "cuda": 2}  # of a value of the KV cache, by default


@dataclass(frozen=True)
class Need:
    """What one way of running a model needs, or why it is refused."""

    backend: str
    quantization: str
    weights_bytes: int
    cache_bytes: int  # keys and values, and states of recurrent layers, of all requests
    refused: str = ""  # why; empty: it runs

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes


def missing_blocks(config: ModelConfig, backend: str) -> list[str]:
    """The blocks of a model that a backend has no kernels for, in words."""
    blocks = config.beyond_llama()
    return [block for block in blocks if block not in BACKEND_BLOCKS.get(backend, blocks)]


def model_needs(
    checkpoint: Checkpoint, context: int, requests: int, window_tokens: Mapping[str, int] = NO_LIMIT
) -> list[Need]:
    """The memory that every backend and quantization needs for this number of requests and tokens of each.

    `window_tokens`: the most tokens of all requests that a backend keeps in layers of the window group.
    """
    config, needs = checkpoint.config, list[Need]()
    states = requests * state_bytes(config)
    for backend, quantizations in QUANTIZATIONS.items():
        blocks = missing_blocks(config, backend)
        why = f"it has no kernels for {', '.join(blocks)}" if blocks else ""
        for quantization in quantizations:
            # without quantization, the cpu backend caches float32 too
            size = 4 if (backend, quantization) == ("cpu", "none") else CACHED_BYTES[backend]
            tokens = requests * context
            in_windows = min(tokens, window_tokens.get(backend, tokens)) * window_values(config)
            rest = tokens * (cached_values(config) - window_values(config))
            cached = (rest + in_windows) * size + states
            weights = _weights_bytes(checkpoint, backend, quantization)
            needs.append(Need(backend, quantization, weights, cached, why))
    return needs


def cached_values(config: ModelConfig) -> int:
    """The values that a token has in the KV cache."""
    return sum(config.kv_values(layer) for layer in config.kv_layers)


def window_values(config: ModelConfig) -> int:
    """Of these, the values in layers of the window group."""
    return sum(config.kv_values(config.kv_layers[index]) for index in config.window_layers)


def state_bytes(config: ModelConfig) -> int:
    """The bytes of a request's states of recurrent layers; they are float32 on every backend."""
    if config.recurrent is None:
        return 0
    return 4 * len(config.recurrent_layers) * config.recurrent.state_values(config.hidden_size)


def block_kind(tensor: Tensor) -> str:
    """How a file keeps a matrix, as BLOCKS names it, also where a tensor gives its values as float32."""
    return tensor.stored.kind if tensor.stored.kind in ("MXFP4", "FP8", "FP8 in blocks") else tensor.kind


def _weights_bytes(checkpoint: Checkpoint, backend: str, quantization: str) -> int:
    """The bytes of all weights: only the cpu backend quantizes embedding and LM head."""
    size, plain, total = QUANTIZATIONS[backend][quantization], QUANTIZATIONS[backend]["none"], 0.0
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) < 2 or not (is_packed(name) or backend == "cpu"):
            size_of_value = plain
        elif size == NATIVE:
            size_of_value = BLOCKS[backend].get(block_kind(tensor), INT8)
        else:
            size_of_value = size
        total += math.prod(tensor.shape) * size_of_value
    return int(total)
