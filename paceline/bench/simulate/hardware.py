"""Prices computed from the figures of a GPU and a model (roofline), for machines that are not here.

A pass reads all weights and the KV cache of its requests, and computes two operations per weight and row;
the slower of both counts. No kernel reaches a data sheet's figures: the fractions reached are below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.bench.simulate.prices import Call, PassSize
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number

BANDWIDTH_SHARE = 0.85  # reached by a pass over few rows, if all parameters were read (an embedding is not)
COMPUTE_SHARE = 0.6  # reached by matrix products with hundreds of rows
MEMORY_SHARE = 0.9  # of memory, for weights and KV cache
STEP_OVERHEAD = 1e-3  # seconds per step besides its matrix products
REQUEST_OVERHEAD = 9e-6  # seconds per request in it
LEVEL_OVERHEAD = 0.16e-3  # seconds of one more pass of a draft head
HEAD_SHARE = 0.04  # parameters of a one-layer draft head, relative to the target's


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU's data sheet."""

    bandwidth: float  # bytes per second
    flops: float  # dense bf16 operations per second
    memory: float  # bytes


GPUS: dict[str, Gpu] = {
    "h200": Gpu(4.8e12, 989e12, 141e9),
    "h100": Gpu(3.35e12, 989e12, 80e9),
    "a100": Gpu(2.04e12, 312e12, 80e9),
    "l40s": Gpu(0.864e12, 362e12, 48e9),
    "l4": Gpu(0.3e12, 121e12, 24e9),
    "rtx4090": Gpu(1.01e12, 165e12, 24e9),
    "rtx3090": Gpu(0.936e12, 71e12, 24e9),
}


@dataclass(frozen=True)
class ModelSize:
    """What of a model costs time and memory."""

    params: float
    bits: float = 16.0  # per weight
    kv_bytes_per_token: float = 0.0
    draft_params: float = 0.0  # of the draft head; 0: look-ups, which are free

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bits / 8


def model_size(
    params: float,
    bits: float = 16.0,
    layers: int | None = None,
    kv_bytes_per_token: float | None = None,
    draft_params: float | None = None,
) -> ModelSize:
    """A model of this size. What is not given has the usual value: layers as in models that are 128 times
    as wide as deep, 8 KV heads of 128 in 16 bits, a one-layer draft head."""
    check_number(ConfigError, "--params", params, 1e6, 1e14, remedy="Give the count, such as 8e9.")
    check_number(ConfigError, "--bits", bits, 1, 32)
    if layers is None:
        layers = max(1, round((params / (12 * 128**2)) ** (1 / 3)))
    check_integer(ConfigError, "--layers", layers, 1, 10_000)
    kv_bytes = layers * 2 * 8 * 128 * 2 if kv_bytes_per_token is None else kv_bytes_per_token
    check_number(ConfigError, "--kv-bytes-per-token", kv_bytes, 0, 1e9)
    head = HEAD_SHARE * params if draft_params is None else draft_params
    check_number(ConfigError, "--draft-params", head, 0, 1e14)
    return ModelSize(params, bits, kv_bytes, head)


def find_gpu(name: str | None, bandwidth: float | None, flops: float | None, memory: float | None) -> Gpu:
    """The named GPU with the given figures replaced; without a name, all figures must be given."""
    if name is not None and name not in GPUS:
        raise ConfigError(
            f"--gpu {name!r} is not known. Use one of {', '.join(GPUS)}, or "
            "give --bandwidth, --flops and --memory."
        )
    given = {"bandwidth": bandwidth, "flops": flops, "memory": memory}
    replaced = {key: value for key, value in given.items() if value is not None}
    for key, value in replaced.items():
        check_number(
            ConfigError, f"--{key}", value, 1e6, 1e18, remedy="Bytes and operations are plain counts."
        )
    if name is None and len(replaced) < len(given):
        missing = next(key for key in given if key not in replaced)
        raise ConfigError(f"--{missing} is missing: give --bandwidth, --flops and --memory, or name a --gpu.")
    return replace(GPUS[name], **replaced) if name is not None else Gpu(**replaced)


@dataclass(frozen=True)
class RooflinePrices:
    """Prices of a model on a GPU."""

    gpu: Gpu
    model: ModelSize
    overhead: float = STEP_OVERHEAD

    def pass_seconds(self, size: PassSize) -> float:
        read = self.model.weight_bytes + size.contexts * self.model.kv_bytes_per_token
        return self._slower(read, 2 * self.model.params * size.rows)

    def overhead_seconds(self, size: PassSize) -> float:
        return self.overhead + REQUEST_OVERHEAD * size.requests

    def draft_seconds(self, call: Call) -> float:
        if self.model.draft_params == 0:
            return 0.0
        level = self._slower(2 * self.model.draft_params, 2 * self.model.draft_params * call.requests)
        return call.levels * (level + LEVEL_OVERHEAD)

    def kv_tokens(self) -> int:
        """Tokens whose KV cache fits beside the weights."""
        weights = self.model.weight_bytes + 2 * self.model.draft_params
        free = MEMORY_SHARE * self.gpu.memory - weights
        if free <= 0:
            raise ConfigError(
                f"the weights take {weights / 1e9:.1f} GB, and the GPU has {self.gpu.memory / 1e9:.1f} GB. "
                "Use fewer --bits, another --gpu, or the --memory of several together."
            )
        return int(free / max(1.0, self.model.kv_bytes_per_token))

    def _slower(self, read: float, operations: float) -> float:
        reading = read / (BANDWIDTH_SHARE * self.gpu.bandwidth)
        return max(reading, operations / (COMPUTE_SHARE * self.gpu.flops))
