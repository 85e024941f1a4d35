"""Backends and engines loaded for a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.backends.base import Backend
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.bench.loading import bench_config
from paceline.build import Loaded, build_engine
from paceline.config import USUAL_ROWS_PER_PASS
from paceline.models.registry import load_with_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer

TORCH = "torch"  # used like a quantization: the reference backend in float32


@dataclass(frozen=True)
class LoadedBackend:
    """A backend without an engine."""

    backend: Backend
    tokenizer: Tokenizer
    max_position: int  # the model's context length


def load_backend_for_bench(
    model: str, quantization: str, threads: int | None, max_rows: int = 1
) -> LoadedBackend:
    """The model's backend as an engine would load it, for passes of at least `max_rows`."""
    path = resolve(model)
    if quantization == TORCH:
        options = BackendOptions(backend="torch", threads=threads)
    else:
        options = BackendOptions(backend="cpu", quantization=quantization, threads=threads)
    checkpoint, tokenizer = load_with_tokenizer(path)
    rows = max(max_rows, USUAL_ROWS_PER_PASS)
    backend = load_backend(checkpoint, options, rows)
    return LoadedBackend(backend, tokenizer, checkpoint.config.max_position)


def load_engine_for_bench(model: str, quantization: str, threads: int | None, max_num_seqs: int) -> Loaded:
    """The model's engine, without prefix caching."""
    return build_engine(bench_config(model, quantization, threads, max_num_seqs))
