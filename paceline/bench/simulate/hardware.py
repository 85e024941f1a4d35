"""Costs computed from the figures of GPUs and a model (roofline), for machines that are not here.

A pass reads all weights and the KV cache of its requests, and computes two operations per weight and row;
the slower of both counts. With tensor parallelism every GPU does its share of both, and each layer ends with
two all-reduces. No kernel reaches a data sheet's figures: the fractions reached are below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from paceline.bench.simulate.costs import Call, PassSize
from paceline.bench.simulate.presets import GPUS, MODELS, Gpu, ModelSize
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number

BANDWIDTH_SHARE = 0.85  # reached by a pass over few rows, if all parameters were read (an embedding is not)
COMPUTE_SHARE = 0.6  # reached by matrix products with hundreds of rows
LINK_SHARE = 0.7  # reached by large all-reduces
MEMORY_SHARE = 0.9  # of memory, for weights and KV cache
STEP_OVERHEAD = 1e-3  # seconds per step besides its matrix products
REQUEST_OVERHEAD = 9e-6  # seconds per request in it
LEVEL_OVERHEAD = 0.16e-3  # seconds of one more pass of a draft head
HEAD_SHARE = 0.04  # parameters of a one-layer draft head, relative to the target's, if only its size is known
PARAMS = 8e9  # of a model that is not named
MAX_GPUS = 8  # of one machine; networks between machines are not priced


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
    if layers is None:
        layers = max(1, round((params / (12 * 128**2)) ** (1 / 3)))
    check_integer(ConfigError, "--layers", layers, 1, 10_000)
    size = ModelSize(params, layers, 128 * layers, layers * 2 * 8 * 128 * 2, draft_params=HEAD_SHARE * params)
    return _replaced(size, bits, kv_bytes_per_token, draft_params)


def find_model(
    name: str | None,
    params: float | None,
    bits: float | None,
    layers: int | None,
    kv_bytes_per_token: float | None,
    draft_params: float | None,
) -> ModelSize:
    """The named model with the given figures replaced; without a name, one of the usual shape."""
    if name is None:
        size = PARAMS if params is None else params
        return model_size(size, 16.0 if bits is None else bits, layers, kv_bytes_per_token, draft_params)
    if name.lower() not in MODELS:
        near = get_close_matches(name.lower(), MODELS, n=1)
        raise ConfigError(
            f"--model {name!r} is not known{f': did you mean {near[0]!r}?' if near else '.'} Use one of "
            f"{', '.join(MODELS)}; or leave it out and give --params, --layers and --bits."
        )
    for flag, value in (("--params", params), ("--layers", layers)):
        if value is not None:
            raise ConfigError(f"{flag} is part of --model {name}: leave one of them out.")
    return _replaced(MODELS[name.lower()], bits, kv_bytes_per_token, draft_params)


def _replaced(
    size: ModelSize, bits: float | None, kv_bytes_per_token: float | None, draft_params: float | None
) -> ModelSize:
    limits = {"bits": (1, 32), "kv_bytes_per_token": (0, 1e9), "draft_params": (0, 1e14)}
    given = {"bits": bits, "kv_bytes_per_token": kv_bytes_per_token, "draft_params": draft_params}
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if value is not None:
            changes[key] = check_number(ConfigError, "--" + key.replace("_", "-"), value, *limits[key])
    return replace(size, **changes)


def find_gpu(
    name: str | None, bandwidth: float | None, flops: float | None, memory: float | None
) -> tuple[int, Gpu]:
    """The number of GPUs and the named one (4xh100), with the given figures replaced; without a name, all
    figures must be given."""
    match = re.fullmatch(r"(?:(\d+)x)?(\w+)", (name or "").lower())
    if name is not None and (match is None or match[2] not in GPUS):
        raise ConfigError(
            f"--gpu {name!r} is not known. Use one of {', '.join(GPUS)}, or several as in 4xh100; or "
            "give --bandwidth, --flops and --memory."
        )
    given = {"bandwidth": bandwidth, "flops": flops, "memory": memory}
    replaced = {key: value for key, value in given.items() if value is not None}
    for key, value in replaced.items():
        check_number(
            ConfigError, f"--{key}", value, 1e6, 1e18, remedy="Bytes and operations are plain counts."
        )
    if match is None:
        if len(replaced) < len(given):
            missing = next(key for key in given if key not in replaced)
            raise ConfigError(
                f"--{missing} is missing: give --bandwidth, --flops and --memory, or name a --gpu."
            )
        return 1, Gpu(**replaced)
    count = check_integer(ConfigError, "--gpu", int(match[1] or 1), 1, MAX_GPUS, "One machine is priced.")
    return count, replace(GPUS[match[2]], **replaced)


@dataclass(frozen=True)
class RooflineCosts:
    """Costs of a model on one or several GPUs."""

    gpu: Gpu
    model: ModelSize
    overhead: float = STEP_OVERHEAD
    num_gpus: int = 1  # tensor parallel

    def pass_seconds(self, size: PassSize) -> float:
        model = self.model
        read = model.read_bytes(size.rows) / self.num_gpus + size.contexts * self._kv_bytes_per_gpu
        compute = 2 * model.used_params * size.rows / self.num_gpus
        return self._slower(read, compute) + self._communication(model.layers, size.rows)

    def overhead_seconds(self, size: PassSize) -> float:
        return self.overhead + REQUEST_OVERHEAD * size.requests

    def draft_seconds(self, call: Call) -> float:
        if self.model.draft_params == 0:
            return 0.0
        params = self.model.draft_params / self.num_gpus
        level = self._slower(2 * params, 2 * params * call.requests) + self._communication(1, call.requests)
        return call.levels * (level + LEVEL_OVERHEAD)

    def kv_tokens(self) -> int:
        """Tokens whose KV cache fits beside the weights."""
        weights = self.model.weight_bytes + 2 * self.model.draft_params
        free = MEMORY_SHARE * self.gpu.memory - weights / self.num_gpus
        if free <= 0:
            have = f"{self.num_gpus} GPUs have" if self.num_gpus > 1 else "the GPU has"
            raise ConfigError(
                f"the weights take {weights / 1e9:.1f} GB, and {have} "
                f"{self.num_gpus * self.gpu.memory / 1e9:.1f} GB. Use fewer --bits, a larger --gpu, or "
                "several, such as --gpu 4xh100."
            )
        return int(free / max(1.0, self._kv_bytes_per_gpu))

    @property
    def _kv_bytes_per_gpu(self) -> float:
        """Bytes of a token's KV cache on each GPU: a head is not split."""
        return self.model.kv_bytes_per_token / min(self.num_gpus, self.model.kv_heads)

    def _communication(self, layers: int, rows: int) -> float:
        """Seconds of two all-reduces per layer, over the hidden states of all rows in 16 bits. In a ring each
        GPU sends, and receives, almost twice what is reduced."""
        if self.num_gpus == 1:
            return 0.0
        sent = 2 * (self.num_gpus - 1) / self.num_gpus * 2 * self.model.hidden * rows
        return 2 * layers * (self.gpu.latency + sent / (LINK_SHARE * self.gpu.link))

    def _slower(self, read: float, operations: float) -> float:
        reading = read / (BANDWIDTH_SHARE * self.gpu.bandwidth)
        return max(reading, operations / (COMPUTE_SHARE * self.gpu.flops))
