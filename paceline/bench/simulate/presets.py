"""Known GPUs and models: the figures of their data sheets and configurations, as data."""

from __future__ import annotations

from dataclasses import dataclass

NVLINK, PCIE = 10e-6, 30e-6  # seconds of a small all-reduce over either


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU's data sheet."""

    bandwidth: float  # bytes per second
    flops: float  # dense bf16 operations per second
    memory: float  # bytes
    link: float = 32e9  # bytes per second to the other GPUs, in one direction
    latency: float = PCIE  # seconds of a small all-reduce


GPUS: dict[str, Gpu] = {
    "b200": Gpu(8e12, 2250e12, 180e9, 900e9, NVLINK),
    "h200": Gpu(4.8e12, 989e12, 141e9, 450e9, NVLINK),
    "h100": Gpu(3.35e12, 989e12, 80e9, 450e9, NVLINK),
    "a100": Gpu(2.04e12, 312e12, 80e9, 300e9, NVLINK),
    "mi300x": Gpu(5.3e12, 1307e12, 192e9, 448e9, NVLINK),  # Infinity Fabric
    "l40s": Gpu(0.864e12, 362e12, 48e9),
    "l4": Gpu(0.3e12, 121e12, 24e9),
    "rtx4090": Gpu(1.01e12, 165e12, 24e9),
    "rtx3090": Gpu(0.936e12, 71e12, 24e9),
}


@dataclass(frozen=True)
class ModelSize:
    """What of a model costs time and memory."""

    params: float  # all of them
    layers: int
    hidden: int
    kv_bytes_per_token: float
    kv_heads: int = 8  # the KV cache is split over at most this many GPUs
    bits: float = 16.0  # per weight
    draft_params: float = 0.0  # of the draft head; 0: look-ups, which are free
    active_params: float | None = None  # that one token uses, of a mixture of experts; None: all
    routing: float = 1.0  # fraction of the experts that one token uses

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bits / 8

    @property
    def used_params(self) -> float:
        """Parameters that one token uses."""
        return self.params if self.active_params is None else self.active_params

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a pass over `rows` tokens reads: all but experts that no token is routed to,
        if each token chooses independently."""
        if self.routing == 1.0:
            return self.weight_bytes
        experts = (self.params - self.used_params) / (1 - self.routing)
        return (self.params - experts * (1 - self.routing) ** rows) * self.bits / 8


def _model(
    params: float,
    layers: int,
    hidden: int,
    kv_heads: int,
    head_size: int = 128,
    active: float | None = None,
    routing: float = 1.0,
    bits: float = 16.0,
) -> ModelSize:
    """A model with a KV cache in 16 bits, and a draft head like EAGLE-3's: one decoder layer over two
    hidden states, and logits for 32,000 tokens."""
    head = 16 * hidden**2 + 32_000 * hidden
    kv_bytes = layers * 2 * kv_heads * head_size * 2
    return ModelSize(params, layers, hidden, kv_bytes, kv_heads, bits, head, active, routing)


MODELS: dict[str, ModelSize] = {
    "llama-3.2-1b": _model(1.24e9, 16, 2048, 8, 64),
    "llama-3.2-3b": _model(3.21e9, 28, 3072, 8),
    "llama-3.1-8b": _model(8.03e9, 32, 4096, 8),
    "llama-3.1-70b": _model(70.6e9, 80, 8192, 8),
    "llama-3.3-70b": _model(70.6e9, 80, 8192, 8),
    "llama-3.1-405b": _model(406e9, 126, 16384, 8),
    "mistral-7b": _model(7.25e9, 32, 4096, 8),
    "qwen2.5-7b": _model(7.62e9, 28, 3584, 4),
    "qwen2.5-32b": _model(32.8e9, 64, 5120, 8),
    "qwen2.5-72b": _model(72.7e9, 80, 8192, 8),
    "qwen3-8b": _model(8.19e9, 36, 4096, 8),
    "qwen3-32b": _model(32.8e9, 64, 5120, 8),
    # mixtures of experts
    "mixtral-8x7b": _model(46.7e9, 32, 4096, 8, active=12.9e9, routing=2 / 8),
    "qwen3-30b-a3b": _model(30.5e9, 48, 2048, 4, active=3.3e9, routing=8 / 128),
    "qwen3-235b-a22b": _model(235e9, 94, 4096, 4, active=22e9, routing=8 / 128),
    "gpt-oss-20b": _model(20.9e9, 24, 2880, 8, 64, active=3.6e9, routing=4 / 32, bits=4.25),
    "gpt-oss-120b": _model(117e9, 36, 2880, 8, 64, active=5.1e9, routing=4 / 128, bits=4.25),
    # latent attention: 576 values per layer and token, which every GPU keeps
    "deepseek-v3": _model(671e9, 61, 7168, 1, 288, active=37e9, routing=8 / 256, bits=8),
}
