"""How many pages, and how long a context they allow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.backends.base import DeviceMemory
from paceline.errors import ConfigError
from paceline.kv.pages import pages_for

DEFAULT_TOKENS = 16_384  # room for several requests even when the context is short
DEFAULT_BYTES = 512 * 1024 * 1024
SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True)
class CacheSize:
    """The size of a KV cache."""

    num_pages: int
    max_model_len: int  # most tokens of a request, prompt and output


def size_cache(
    *,
    page_size: int,
    bytes_per_page: int,
    model_context: int,
    max_model_len: int | None,
    memory_bytes: int | None,
    available_bytes: int,
    device: DeviceMemory | None = None,
    utilization: float = 1.0,
) -> CacheSize:
    """The pages to make and the context they allow.

    With `memory_bytes`, exactly what fits in it. Without, on a device, what its utilization leaves. On the
    host, enough for one full context and at least 16k tokens, but at most 512 MB (unless max_model_len asks
    for more) and a quarter of the available memory. Without max_model_len, the context is the model's or
    what fits.
    """
    if max_model_len is not None and max_model_len > model_context:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but this model's context is {model_context}. "
            f"Use at most {model_context}."
        )
    asked = pages_for(max_model_len or 0, page_size)
    remedy = "kv_cache_memory_bytes"
    if memory_bytes is not None:
        num_pages = memory_bytes // bytes_per_page
        source = f"kv_cache_memory_bytes ({memory_bytes:,})"
    elif device is not None:
        used = device.total - device.free
        left = max(0, int(device.total * utilization) - used - device.needed)
        num_pages = left // bytes_per_page
        source = (
            f"gpu_memory_utilization {utilization:g} of the GPU's {device.total:,} bytes "
            f"({used:,} are in use, {device.needed:,} are for buffers)"
        )
        remedy = "gpu_memory_utilization"
    else:
        most = int(available_bytes * SHARE_OF_MEMORY) // bytes_per_page
        comfortable = pages_for(max(max_model_len or model_context, DEFAULT_TOKENS), page_size)
        num_pages = min(most, max(asked, min(comfortable, DEFAULT_BYTES // bytes_per_page)))
        source = f"a quarter of the available memory ({available_bytes:,} bytes)"
    needed = max(asked, 1)
    if num_pages < needed:
        raise ConfigError(
            f"a context of {max_model_len or page_size} tokens needs {needed * bytes_per_page:,} bytes for "
            f"keys and values, more than {source} gives. Lower max_model_len"
            f"{f' to {num_pages * page_size}' if num_pages else ''} or raise {remedy}."
        )
    return CacheSize(num_pages, max_model_len or min(model_context, num_pages * page_size))


def available_memory() -> int:
    """Bytes of memory that programs can still take without swapping, as far as the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
