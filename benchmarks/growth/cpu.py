"""A model on the compiled CPU backend, and what the CPU gives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.growth.floor import Floor, model_products
from benchmarks.growth.measure import BackendPasses
from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.weights.packing import packed_shape
from paceline.check.kernels import CASES, multiply, random_tensor
from paceline.config import USUAL_ROWS_PER_PASS
from paceline.models.checkpoint import Checkpoint
from paceline.models.files.layout import expected_tensors
from paceline.models.gguf.reader import GgufTensor
from paceline.models.registry import load_with_tokenizer, resolve

REPETITIONS = 7
BANDWIDTH_BYTES = 1 << 28  # far more than caches hold
PEAK_ROWS = 512  # rows of a product whose matrix stays in the cache
PEAK_COPIES = 8  # of a small matrix: rounding activations to int8 is then a small part of the product
PEAK_CASE = CASES["int4 (Q4_1)"]


def cpu_subject(model: str, quantization: str, threads: int | None) -> BackendPasses:
    """The model as an engine would load it."""
    checkpoint, _ = load_with_tokenizer(resolve(model))
    max_rows = USUAL_ROWS_PER_PASS
    backend = CpuBackend.load(checkpoint, quantization=quantization, threads=threads, max_rows=max_rows)
    row, output, key = model_products(checkpoint.config)
    floor = Floor(
        weight_bytes=weight_bytes(checkpoint, backend.quantization),
        kv_bytes=backend.bytes_per_page() / backend.page_size,
        row_products=row,
        output_products=output,
        key_products=key,
        bandwidth=bandwidth(backend.threads),
        products_per_second=backend.threads * products_per_second(),
        max_rows=max_rows,
    )
    config = checkpoint.config
    return BackendPasses(backend, config.vocab_size, config.max_position, floor)


def weight_bytes(checkpoint: Checkpoint, quantization: str) -> int:
    """Bytes of packed matrices that every pass reads. Of an embedding of its own a pass reads rows only."""
    embedding = "model.embed_tokens.weight"
    names = [
        name
        for name, shape in expected_tensors(checkpoint.config)
        if len(shape) == 2 and (name != embedding or checkpoint.config.tie_embeddings)
    ]
    return sum(math.prod(packed_shape(checkpoint.tensors[name], quantization)) for name in names)


def bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read together."""
    data = np.ones(BANDWIDTH_BYTES // 8, dtype=np.int64)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:
        return data.nbytes / _best(lambda: list(pool.map(np.max, parts)))


def products_per_second() -> float:
    """Multiply-adds per second of one thread's 4-bit kernel, with a matrix that stays in the cache.

    A product of 2n rows less one of n rows: packing the matrix takes the same time in both.
    """
    random = np.random.default_rng(0)
    small = random_tensor(PEAK_CASE.kind, random)
    outputs, depth = PEAK_COPIES * small.shape[0], small.shape[1]
    tensor = GgufTensor((outputs, depth), small.kind, np.tile(small.blocks(), (PEAK_COPIES, 1)))
    rows = random.standard_normal((2 * PEAK_ROWS, depth), dtype=np.float32)
    seconds = [
        _best(lambda part=part: multiply(tensor, PEAK_CASE.quantization, part))  # type: ignore[misc]
        for part in (rows[:PEAK_ROWS], rows)
    ]
    return PEAK_ROWS * outputs * depth / (seconds[1] - seconds[0])


def _best(job: Callable[[], object]) -> float:
    job()
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return min(times)
