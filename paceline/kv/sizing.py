"""The size of the KV cache: available memory, pages, and the context length that they allow."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from paceline.core.forward import DeviceMemory
from paceline.errors import ConfigError
from paceline.kv.pages import pages_for
from paceline.kv.window_pages import window_pages_for
from paceline.machine import total_memory

DEFAULT_TOKENS = 16_384  # at least, so that several requests fit when the model's context is short
DEFAULT_BYTES = 512 * 1024 * 1024  # at most
SHARE_OF_MEMORY = 0.25  # of the available memory, at most
SPARE_ROWS = 128  # of a request in passes and reserved ahead, that its window pages are counted for
NULL_PAGE = 1  # window page that no sequence holds
PROCESS_BYTES = 1 << 30  # address space to compile and run kernels, besides the weights
THREAD_BYTES = 64 << 20  # address space per thread


@dataclass(frozen=True)
class CacheSize:
    """The size of a KV cache."""

    num_pages: int
    max_model_len: int  # tokens of a request, prompt and output
    num_window_pages: int | None = None  # of layers with a sliding window; None: they have the same pages


@dataclass(frozen=True)
class PageBytes:
    """The bytes of a page, of which those of layers with a sliding window are needed for few pages."""

    all_layers: int  # of drafters too
    windowed: int = 0  # of these, the layers in the window group
    most_windows: int = 0  # window pages that all requests together can hold

    @classmethod
    def of(
        cls, all_layers: int, windowed: int, window: int | None, page_size: int, requests: int, rows: int
    ) -> PageBytes:
        """Those of a target with a window group, if `window` is not None, and `rows` rows in a pass.

        Two prefill chunks may be in flight, and a request's drafts may have spare pages.
        """
        if window is None:
            return cls(all_layers)
        each = window_pages_for(window, SPARE_ROWS, page_size)
        chunks = 2 * window_pages_for(1, rows, page_size)
        return cls(all_layers, windowed, NULL_PAGE + requests * each + chunks)

    def total(self, num_pages: int) -> int:
        """The bytes of this number of pages, with the window pages beside them."""
        rest = self.all_layers - self.windowed
        return num_pages * rest + self.windowed * min(num_pages, self.most_windows)

    def fitting(self, memory: int) -> int:
        """The number of pages whose total fits into this memory."""
        alike = memory // self.all_layers
        if not self.windowed or alike <= self.most_windows:
            return alike
        return (memory - self.windowed * self.most_windows) // (self.all_layers - self.windowed)

    def num_window_pages(self, num_pages: int) -> int | None:
        """How many of them have window pages at a time; None: all."""
        return self.most_windows if self.windowed and self.most_windows < num_pages else None


def size_cache(
    *,
    page_size: int,
    page_bytes: PageBytes,
    model_context: int,
    max_model_len: int | None,
    memory_bytes: int | None,
    available_bytes: int,
    device: DeviceMemory | None = None,
    utilization: float = 1.0,
    states_bytes: int = 0,
) -> CacheSize:
    """The number of pages and the context length that they allow.

    With `memory_bytes`: what fits in it. Without, on a device: what `utilization` of its memory leaves. On
    the host: one full context and at least 16k tokens, but at most 512 MB (unless max_model_len asks for
    more) and a quarter of the available memory. Without max_model_len, the context is the model's, or what
    fits. `states_bytes` of the host's or the device's memory are for the states of recurrent layers.
    """
    if device is not None:
        used = device.total - device.free
        available_bytes = max(0, int(device.total * utilization) - used - device.needed)
    if states_bytes > available_bytes:
        raise ConfigError(
            f"the recurrent layers' states of all requests need {states_bytes:,} bytes, but "
            f"{available_bytes:,} bytes of memory are available. Lower max_num_seqs"
            f"{'' if device is None else ' or raise gpu_memory_utilization'}."
        )
    available_bytes -= states_bytes
    if max_model_len is not None and max_model_len > model_context:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but this model's context is {model_context}. "
            f"Use at most {model_context}."
        )
    asked_pages = pages_for(max_model_len or 0, page_size)
    remedy = "kv_cache_memory_bytes"
    if memory_bytes is not None:
        if device is None and memory_bytes > available_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes is {memory_bytes:,}, but {available_bytes:,} bytes of memory are "
                "available. Lower it, or leave it out."
            )
        num_pages = page_bytes.fitting(memory_bytes)
        source = f"kv_cache_memory_bytes ({memory_bytes:,})"
    elif device is not None:
        num_pages = page_bytes.fitting(available_bytes)
        needed_bytes = device.needed + states_bytes
        source = (
            f"gpu_memory_utilization {utilization:g} of the GPU's {device.total:,} bytes "
            f"({used:,} are in use, {needed_bytes:,} are for buffers)"
        )
        remedy = "gpu_memory_utilization"
    else:
        max_pages = page_bytes.fitting(int(available_bytes * SHARE_OF_MEMORY))
        default_pages = pages_for(max(max_model_len or model_context, DEFAULT_TOKENS), page_size)
        num_pages = min(max_pages, max(asked_pages, min(default_pages, page_bytes.fitting(DEFAULT_BYTES))))
        source = f"a quarter of the available memory ({available_bytes:,} bytes)"
    needed = max(asked_pages, 1)
    if num_pages < needed:
        raise ConfigError(
            f"a context of {max_model_len or page_size} tokens needs {page_bytes.total(needed):,} bytes for "
            f"keys and values, more than {source} gives. Lower max_model_len"
            f"{f' to {num_pages * page_size}' if num_pages else ''} or raise {remedy}."
        )
    longest = max_model_len or min(model_context, num_pages * page_size)
    return CacheSize(num_pages, longest, page_bytes.num_window_pages(num_pages))


def available_memory() -> int:
    """Bytes of memory that this process can still use without swapping, as reported by the system."""
    free = total_memory()
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    limit = _left_of_limit()
    return free if limit is None else min(free, limit)


def check_memory_limit(model: Path, threads: int) -> None:
    """ConfigError if the process's address-space limit is too low to load this model.

    Checked before loading, because a compiler that runs out of memory kills the process.
    """
    left = _left_of_limit()
    files = [model] if model.is_file() else model.glob("*.safetensors")
    needed = 2 * sum(file.stat().st_size for file in files) + PROCESS_BYTES + threads * THREAD_BYTES
    if left is not None and left < needed:
        raise ConfigError(
            f"the memory limit of this process leaves {left:,} bytes, but {model.name} needs about "
            f"{needed:,}. Raise the limit (`ulimit -v`), or use a smaller model or fewer threads."
        )


def _left_of_limit() -> int | None:
    """Bytes of address space that the process may still allocate; None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        taken = 0
    return max(0, limit - taken)
