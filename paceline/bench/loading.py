"""Models loaded for a measurement, with the settings chosen for them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.backends.base import Backend
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.build import Loaded, build_engine
from paceline.config import USUAL_ROWS_PER_PASS, EngineConfig, SchedulerOptions
from paceline.home import paceline_home
from paceline.models.registry import load_with_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer

DEVICE_KV_BYTES = 6 << 30  # KV cache on a GPU, for each of the compared engines
LEARNED_COSTS = "costs"  # folder in PACELINE_HOME where the controller stores what it has learned
TORCH = "torch"  # used like a quantization: the reference backend in float32


@dataclass(frozen=True)
class Settings:
    """The settings that a backend chose."""

    quantization: str  # the format of the weights; never "auto"
    threads: int | None  # None: the backend has no threads of its own


def settings(backend: Backend) -> Settings:
    """The weight format and the threads of a backend."""
    return Settings(backend.weight_format, getattr(backend, "threads", None))


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


def bench_config(
    model: str,
    quantization: str,
    threads: int | None,
    max_num_seqs: int,
    speculative_config: Any = "off",
    backend: str = "cpu",
    device: str = "",
) -> EngineConfig:
    """A configuration without prefix caching, so that every round computes its prompts again."""
    defaults = SchedulerOptions()
    on_device = {"device": device or "cuda", "kv_cache_memory_bytes": DEVICE_KV_BYTES}
    return EngineConfig.from_options(
        model=model,
        backend=backend,
        **(on_device if "cuda" in (backend, device) else {}),
        quantization=quantization,
        threads=threads,
        enable_prefix_caching=False,
        max_num_seqs=max(max_num_seqs, defaults.max_num_seqs),
        speculative_config=speculative_config,
    )


def load_engine_for_bench(model: str, quantization: str, threads: int | None, max_num_seqs: int) -> Loaded:
    """The model's engine, without prefix caching."""
    return build_engine(bench_config(model, quantization, threads, max_num_seqs))


@contextmanager
def empty_memory() -> Iterator[None]:
    """A context in which controllers know nothing of earlier runs, and what they learn is deleted."""
    home, before = paceline_home(), os.environ.get("PACELINE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        for entry in home.iterdir() if home.is_dir() else ():
            if entry.name != LEARNED_COSTS:
                (Path(folder) / entry.name).symlink_to(entry.resolve())
        os.environ["PACELINE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["PACELINE_HOME"]
            else:
                os.environ["PACELINE_HOME"] = before
