"""Facts about the machine of a measurement."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from paceline.machine import cpu_name, find_gpu, has_amx

PACKAGES = ("paceline", "numpy", "numba", "llvmlite", "tokenizers")


def machine_facts() -> dict[str, object]:
    """CPU, cores, instruction set, memory, load and versions, as JSON values."""
    from paceline.backends.cpu.isa import ISA  # here, because it imports numba
    from paceline.backends.cpu.team import default_threads

    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": default_threads(),
        "isa": ISA.name,
        "amx": has_amx(),
        "gpu": find_gpu().name or None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),  # above 0 before a bench starts: the machine is busy
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
