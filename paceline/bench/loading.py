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
from paceline.config import EngineConfig, SchedulerOptions
from paceline.home import paceline_home

DEVICE_KV_BYTES = 6 << 30  # KV cache on a GPU, for each of the compared engines
LEARNED_COSTS = "costs"  # folder in PACELINE_HOME where the controller stores what it has learned


@dataclass(frozen=True)
class Settings:
    """The settings that a backend chose."""

    quantization: str  # the format of the weights; never "auto"
    threads: int | None  # None: the backend has no threads of its own


def settings(backend: Backend) -> Settings:
    """The weight format and the threads of a backend."""
    return Settings(backend.weight_format, getattr(backend, "threads", None))


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
