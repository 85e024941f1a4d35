"""The CPU of this machine."""

from __future__ import annotations

import platform
import re
from pathlib import Path

# names by part number: Arm systems report only numbers
ARM_PARTS = {
    "0xd0c": "Arm Neoverse-N1",
    "0xd40": "Arm Neoverse-V1",
    "0xd49": "Arm Neoverse-N2",
    "0xd4f": "Arm Neoverse-V2",
}


def cpu_name(cpuinfo: str | None = None) -> str:
    """The CPU's name, from the text of /proc/cpuinfo or from Python's platform module."""
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    if named := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE):
        return named[1].strip()
    if part := re.search(r"^CPU part\s*:\s*(\w+)", text, re.MULTILINE):
        return ARM_PARTS.get(part[1], f"Arm part {part[1]}")
    return platform.processor() or platform.machine()


def has_amx(cpuinfo: str | None = None) -> bool:
    """Whether the CPU has AMX (int8 matrix tiles), by the text of /proc/cpuinfo."""
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    return re.search(r"^flags\s*:.*\bamx_int8\b", text, re.MULTILINE) is not None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
