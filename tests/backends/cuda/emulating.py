"""Compiles kernels of CUDA C++ for the host: see emulated.h."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paceline.backends.cuda.native import nvrtc as native
from paceline.backends.cuda.native import weight_pipeline

HERE, SOURCES = Path(__file__).parent, Path(native.__file__).with_name("source")
# kept between runs, because g++ takes seconds; `make clean` deletes it
CACHE = HERE.parents[2] / ".pytest_cache" / "emulated"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(files: Sequence[str | Path], runs: str, numbers: Mapping[str, object], *options: str) -> Path:
    """The kernel in these files, with what `runs` it, compiled for such numbers. Names are of the backend.

    The file is named by all that was compiled and how, so a changed source is compiled again.
    """
    kernel = [file if isinstance(file, Path) else SOURCES / f"{file}.cu" for file in files]
    defined = "".join(f"#define {name} {number}\n" for name, number in numbers.items())
    text = defined + "".join(own.read_text() for own in (HERE / "emulated.h", *kernel, HERE / runs))
    # where it is fortified, as some compilers have it, longjmp aborts when it leaves a stack for another
    command = ["g++", "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", *options]
    version = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
    program = CACHE / hashlib.sha256("\0".join([version, *command, text]).encode()).hexdigest()
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        source, made = (program.with_suffix(f".{os.getpid()}{end}") for end in (".cpp", ".so"))
        source.write_text(text)
        subprocess.run([*command, "-o", made, source], check=True, timeout=120)
        source.unlink()
        made.rename(program)  # whole or not at all: other processes may compile it too
    return program


class Emulated:
    """A kernel of CUDA C++ as the backend knows it, that runs on the host.

    Its files are those of the backend, `instructions` first; `waiting` threads wait for the kernels before.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        name: str,
        argument: str,
        numbers: Mapping[str, int],
        waiting: int,
        threads: int = weight_pipeline.THREADS,
    ) -> None:
        own: dict[str, object] = {
            "THREADS_OF_PROGRAM": threads,
            "WAITING_THREADS": waiting,
            "SHARED_BYTES": 228 << 10,
            "KERNEL": name,
            "ARGUMENT": argument,
        }
        library = compiled(files[1:], "emulated_pipeline.h", {**numbers, **own}, "-shared", "-fPIC")
        self._library, self.runs = ctypes.CDLL(str(library)), 0

    def launch(self, argument: bytes, grid: Sequence[int], cluster: Sequence[int], threads: int) -> None:
        room = ctypes.create_string_buffer(len(argument) + 64)
        aligned = -(-ctypes.addressof(room) // 64) * 64
        ctypes.memmove(aligned, argument, len(argument))
        ended = self._library.run(ctypes.c_void_p(aligned), *grid[:2], self.runs)
        self.runs += 1  # others rest then, and every other time copies arrive at once
        assert ended, "programs wait for ever"


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """What emulated.h calls a Map."""
    five, four = (lambda own: [*own, *[0] * (5 - len(own))]), [*strides, *[0] * (4 - len(strides))]
    return struct.pack("<Q11i4x4q", address, len(sizes), *five(sizes), *five(box), *four).ljust(128, b"\0")
