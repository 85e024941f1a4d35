"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

# Arm systems tell part numbers instead of names
ARM_PARTS = {
    "0xd0c": "Arm Neoverse-N1",
    "0xd40": "Arm Neoverse-V1",
    "0xd49": "Arm Neoverse-N2",
    "0xd4f": "Arm Neoverse-V2",
}
PACKAGES = ("paceline", "numpy", "numba", "llvmlite", "tokenizers")


def machine_facts() -> dict[str, object]:
    """CPU, cores, instruction set, memory, load and versions, ready for JSON."""
    from paceline.backends.cpu.isa import ISA  # here, because it brings numba
    from paceline.backends.cpu.team import default_threads

    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": default_threads(),
        "isa": ISA.name,
        "amx": has_amx(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(
            os.getloadavg()[0], 2
        ),  # above 0 before a bench starts: the machine is not quiet
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def cpu_name(cpuinfo: str | None = None) -> str:
    """The processor's name from the text of /proc/cpuinfo, or what Python knows of it."""
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    if named := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE):
        return named[1].strip()
    if part := re.search(r"^CPU part\s*:\s*(\w+)", text, re.MULTILINE):
        return ARM_PARTS.get(part[1], f"Arm part {part[1]}")
    return platform.processor() or platform.machine()


def has_amx(cpuinfo: str | None = None) -> bool:
    """Whether the processor multiplies int8 matrices in tiles (AMX), by the text of /proc/cpuinfo."""
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    return re.search(r"^flags\s*:.*\bamx_int8\b", text, re.MULTILINE) is not None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
