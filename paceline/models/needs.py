"""What a checkpoint needs to run: kernels for its blocks, memory for its weights and its KV cache."""

from __future__ import annotations

import math

from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import ModelConfig

# Blocks that a backend has kernels for, as ModelConfig.beyond_llama names them; torch has all
BACKEND_BLOCKS = {
    "cpu": frozenset(
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
    ),
    "cuda": frozenset(),
}

# bytes that the cpu backend keeps for 32 values of a matrix, by Tensor.kind; everything else becomes int8
CPU_BLOCK_BYTES = {"Q4_0": 20.0, "Q4_1": 20.0, "Q4_K": 18.5}
CPU_INT8_BYTES = 34.0
DTYPE_BYTES = {"torch": ("float32", 4), "cuda": ("bfloat16", 2)}  # by default


def missing_blocks(config: ModelConfig, backend: str) -> list[str]:
    """The blocks of a model that a backend has no kernels for, in words."""
    blocks = config.beyond_llama()
    return [block for block in blocks if block not in BACKEND_BLOCKS.get(backend, blocks)]


def backend_needs(checkpoint: Checkpoint) -> dict[str, object]:
    """For each backend: the gigabytes of weights by default, or why it does not run the model."""
    config = checkpoint.config
    tensors = checkpoint.tensors.values()
    values = sum(math.prod(tensor.shape) for tensor in tensors)
    sizes = {"cpu": _gigabytes(sum(map(_cpu_bytes, tensors)))}
    sizes |= {name: f"{_gigabytes(values * size)} as {dtype}" for name, (dtype, size) in DTYPE_BYTES.items()}
    needs: dict[str, object] = {
        name: f"refused: it has no kernels for {', '.join(blocks)}" if blocks else size
        for name, size in sizes.items()
        for blocks in [missing_blocks(config, name)]
    }
    needs["kv_values_per_token"] = sum(config.kv_values(layer) for layer in config.kv_layers)
    if config.recurrent is not None:
        state_values = config.recurrent.state_values(config.hidden_size)  # float32 on every backend
        needs["state_bytes_per_request"] = 4 * len(config.recurrent_layers) * state_values
    return needs


def _cpu_bytes(tensor: Tensor) -> float:
    if len(tensor.shape) < 2:
        return 4.0 * math.prod(tensor.shape)
    return math.prod(tensor.shape) / 32 * CPU_BLOCK_BYTES.get(tensor.kind, CPU_INT8_BYTES)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
