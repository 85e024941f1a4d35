"""A machine with less than this one runs the same passes and gives the same bits."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.cpu.bits import digests

# What numba is told to compile for. The portable pass keeps keys and values as floats, not as halves,
# so that it is the same only where nothing is quantized.
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx,+bmi,+bmi2,+popcnt"}
PORTABLE = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}
MACHINES = {"avx2": (AVX2, ("native", "int8", "none")), "portable": (PORTABLE, ("none",))}


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="forces an x86 machine")
@pytest.mark.parametrize("isa", MACHINES)
def test_another_instruction_set_gives_the_same_bits(isa: str) -> None:
    machine, quantizations = MACHINES[isa]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.backends.cpu.bits"]
    done = subprocess.run(command, cwd=root, env={**os.environ, **machine}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    there, here = json.loads(done.stdout), digests()
    assert there["isa"] == isa
    same = {name for name in here if here[name] == there["digests"][name]}
    assert same >= {name for name in here if name.endswith(quantizations)}
