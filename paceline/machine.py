"""The CPU of this machine, and its GPU if there is one that can be used."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

# names by part number: Arm systems report only numbers
ARM_PARTS = {
    "0xd0c": "Arm Neoverse-N1",
    "0xd40": "Arm Neoverse-V1",
    "0xd49": "Arm Neoverse-N2",
    "0xd4f": "Arm Neoverse-V2",
}

ISA_VARIABLE = "PACELINE_ISA"  # of the environment: the instruction set that CPU kernels are compiled for
EMULATED = "-emulated"  # after the name of an instruction set: its kernels, by plain instructions, for tests
_AVX2 = "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"
# The CPU that numba compiles for, and its features, by family of CPUs and instruction set; none: as it is
NUMBA_TARGETS: dict[str, dict[str, tuple[str, str] | None]] = {
    "x86": {
        "amx": ("sapphirerapids", f"{_AVX512},+avx512vnni,+amx-tile,+amx-int8"),
        "avx512vnni": ("cascadelake", f"{_AVX512},+avx512vnni"),
        "avxvnni": ("haswell", f"{_AVX2},+avxvnni"),
        "avx512": ("skylake-avx512", _AVX512),
        "avx2": ("haswell", _AVX2),
        "portable": ("x86-64", "+sse2"),
    },
    "arm": {"neon": None, "portable": ("generic", "+neon")},
}

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's driver, and of a GPU in Windows' Linux
LEAST_CAPABILITY = (8, 0)  # of a GPU with bfloat16, which the cuda backend computes in


@dataclass(frozen=True)
class Gpu:
    """The first CUDA device, or why none can be used."""

    name: str = ""  # empty: none
    missing: str = ""  # what is missing; empty: nothing
    facts: tuple[tuple[str, str], ...] = ()  # memory, versions

    @property
    def usable(self) -> bool:
        return not self.missing


@cache
def find_gpu() -> Gpu:
    """The GPU that the cuda backend can use. torch, which takes seconds, is imported only beside a driver."""
    if not any(Path(path).exists() for path in GPU_FILES):
        return Gpu(missing="no NVIDIA driver is loaded")
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return Gpu(missing=f"{package} is not installed (pip install 'paceline[gpu]')")
    import torch
    import triton

    if not torch.cuda.is_available():
        return Gpu(missing=f"torch {torch.__version__} sees no CUDA device")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    facts = (
        ("memory", f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB"),
        ("compute capability", ".".join(map(str, capability))),
        ("CUDA", str(torch.version.cuda)),
        ("torch", torch.__version__),
        ("triton", triton.__version__),
    )
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return Gpu(
            name, f"{name} has compute capability {capability[0]}.{capability[1]}, below {least}", facts
        )
    return Gpu(name, facts=facts)


def usable_cores() -> int:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def version_of(package: str) -> str | None:
    """The installed version of a package, which is not imported; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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


@cache
def request_amx() -> bool:
    """Ask Linux for the use of AMX's registers: whether this process, with all its threads, may use them."""
    if not has_amx():
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return answer == 0


def family(machine: str) -> str:
    """The family of CPUs of a machine as Python's platform module names it: x86, arm or ""."""
    name = machine.lower()
    return "x86" if name in ("x86_64", "amd64") else "arm" if name in ("aarch64", "arm64") else ""


def force_isa(name: str) -> None:
    """Make numba compile for a machine that has this instruction set and nothing better.

    Call it before anything is compiled. The CPU backend checks the name, and that this CPU can run it.
    """
    os.environ[ISA_VARIABLE] = name
    target = NUMBA_TARGETS.get(family(platform.machine()), {}).get(name)
    if target is None:
        return
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = target
    if numba := sys.modules.get("numba"):  # it has read its environment already
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = target


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
