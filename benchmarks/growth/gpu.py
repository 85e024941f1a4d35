"""A model of random weights on the cuda backend, and what the GPU gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.gpu.drafts import Drafting
from benchmarks.gpu.measure import bandwidth, measure_ours, random_weights, timed, weight_bytes
from benchmarks.gpu.plan import SHAPES, Setting
from benchmarks.growth.floor import Floor, Load, model_products
from benchmarks.growth.measure import BackendPasses
from paceline.backends.cuda.backend import CudaBackend
from paceline.backends.cuda.decode.draft_shape import chain_shape
from paceline.backends.cuda.weights.model_weights import Weights, load_weights
from paceline.config import ROWS_PER_PASS
from paceline.errors import BackendError, ConfigError

LONGEST = 65536  # tokens of context: random weights do not care
STEPS = 32  # of a decode loop that is timed
SIDE = 8192  # rows and columns of the product that tells the peak


class GpuPasses(BackendPasses):
    """Decode steps in captured graphs, as the engine runs them; trees and prompts as passes of their own."""

    def __init__(self, weights: Weights, floor: Floor) -> None:
        max_rows = ROWS_PER_PASS["cuda"]
        backend = CudaBackend(weights, max_rows=max_rows)
        super().__init__(backend, weights.config.vocab_size, weights.config.max_position, floor)
        self._weights = weights

    def job(self, load: Load) -> Callable[[], float]:
        """A function that runs the load once and returns its seconds."""
        if load.is_prompt or load.rows > 1:
            return super().job(load)
        setting = Setting(prompt_tokens=load.context, output_tokens=STEPS)
        plain = Drafting(chain_shape(0), None, 0)
        return lambda: 1e-3 * measure_ours(self._weights, load.requests, setting, plain)[0]


def gpu_subject(shape: str) -> GpuPasses:
    """A model of this shape with random bfloat16 weights."""
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; choose from {', '.join(SHAPES)}.")
    if not torch.cuda.is_available():
        raise BackendError("--shape needs a CUDA device, and torch sees none: run it where there is one.")
    device = torch.device("cuda")
    config = replace(SHAPES[shape], max_position=LONGEST)
    weights = load_weights(config, random_weights(config, device))
    row, output, key = model_products(config)
    floor = Floor(
        weight_bytes=weight_bytes(weights),
        kv_bytes=2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim,
        row_products=row,
        output_products=output,
        key_products=key,
        bandwidth=bandwidth(device),
        products_per_second=products_per_second(device),
        max_rows=ROWS_PER_PASS["cuda"],
    )
    return GpuPasses(weights, floor)


def products_per_second(device: torch.device) -> float:
    """Multiply-adds per second of the library's bfloat16 product of two large matrices."""
    matrix = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    best = 1e-3 * min(timed(lambda: matrix @ matrix) for _ in range(10))
    return SIDE**3 / best
