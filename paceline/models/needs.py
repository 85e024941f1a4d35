"""What a checkpoint needs to run: the memory of its weights and of its KV cache on each backend."""

from __future__ import annotations

import math

from paceline.models.checkpoint import Checkpoint, Tensor

# bytes that the cpu backend keeps for 32 values of a matrix, by Tensor.kind; everything else becomes int8
CPU_BLOCK_BYTES = {"Q4_0": 20.0, "Q4_1": 20.0, "Q4_K": 18.5}
CPU_INT8_BYTES = 34.0
DTYPE_BYTES = {"torch": ("float32", 4), "cuda": ("bfloat16", 2)}  # by default


def backend_needs(checkpoint: Checkpoint) -> dict[str, object]:
    """For each backend: the gigabytes of weights by default, or why it does not run the model."""
    blocks = checkpoint.config.beyond_llama()
    refused = f"refused: it has no kernels for {', '.join(blocks)}"
    tensors = checkpoint.tensors.values()
    values = sum(math.prod(tensor.shape) for tensor in tensors)
    needs: dict[str, object] = {"cpu": refused if blocks else _gigabytes(sum(map(_cpu_bytes, tensors)))}
    for name, (dtype, size) in DTYPE_BYTES.items():
        runs = name == "torch" or not blocks
        needs[name] = f"{_gigabytes(values * size)} as {dtype}" if runs else refused
    config = checkpoint.config
    return needs | {"kv_values_per_token": len(config.attention_layers) * config.kv_values}


def _cpu_bytes(tensor: Tensor) -> float:
    if len(tensor.shape) < 2:
        return 4.0 * math.prod(tensor.shape)
    return math.prod(tensor.shape) / 32 * CPU_BLOCK_BYTES.get(tensor.kind, CPU_INT8_BYTES)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
