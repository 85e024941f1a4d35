"""Compiles kernels of CUDA C++ for the host: see emulated.h."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paceline.backends.cuda import native

HERE, SOURCES = Path(__file__).parent, Path(native.__file__).with_name("source")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(
    folder: Path, files: Sequence[str], runs: str, numbers: Mapping[str, object], *options: str
) -> Path:
    """The kernel in these files of the backend, with what `runs` it, compiled for such numbers."""
    kernel = [SOURCES / f"{file}.cu" for file in files]
    defined = "".join(f"#define {name} {number}\n" for name, number in numbers.items())
    source, program = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(
        defined + "".join(own.read_text() for own in (HERE / "emulated.h", *kernel, HERE / runs))
    )
    # where it is fortified, as some compilers have it, longjmp aborts when it leaves a stack for another
    command = ["g++", "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", *options, "-o", program, source]
    subprocess.run(command, check=True, timeout=120)
    return program
