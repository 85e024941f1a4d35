"""Every CPU gives the same bits: kernels for lesser and other machines are held to those of this one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backends.cpu.primitives.isa import ISA, host_features, select, usable
from paceline.errors import ConfigError
from paceline.machine import EMULATED, ISA_VARIABLE
from tests.backends.cpu.bits import digests
from tests.large import repeated

ROOT = Path(__file__).parents[3]
X86 = platform.machine().lower() in ("x86_64", "amd64")
HERE = [isa.name for isa in usable(host_features(), platform.machine()) if isa is not ISA]
# Compiling all kernels takes a minute for each. Every machine has "portable", to which all are held.
FIRST = [name for name in HERE if name == "portable"]
OTHERS = [name for name in HERE if name not in FIRST]
# What this machine lacks, by plain instructions.
ELSEWHERE = [name + EMULATED for name in ("neon", "amx", "avxvnni")]


def in_another_process(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A Python command with kernels for this instruction set."""
    environment = {**os.environ, ISA_VARIABLE: isa}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )


@pytest.mark.parametrize("isa", [*FIRST, *repeated(*OTHERS, *ELSEWHERE)])
def test_another_instruction_set_gives_the_same_bits(isa: str) -> None:
    done = in_another_process(isa, "-m", "tests.backends.cpu.bits")
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert there["isa"] == isa
    assert there["digests"] == digests()


FEATURES = {
    "amx": {"avx2", "fma", "f16c", "avx512bw", "avx512vl", "avx512vnni", "amx-tile", "amx-int8"},
    "avx512vnni": {"avx2", "fma", "f16c", "avx512bw", "avx512vl", "avx512vnni", "avxvnni"},
    "avxvnni": {"avx2", "fma", "f16c", "avxvnni"},
    "avx512": {"avx2", "fma", "f16c", "avx512bw", "avx512vl"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": {"avx2", "fma"},
}


@pytest.mark.parametrize("isa", FEATURES)
def test_the_best_instruction_set_is_chosen(isa: str) -> None:
    assert select(frozenset(FEATURES[isa]), "x86_64").name == isa
    assert select(frozenset({*FEATURES[isa], "dotprod"}), "aarch64").name == "neon"
    assert select(frozenset(FEATURES[isa]), "riscv64").name == "portable"


@pytest.mark.skipif(not X86, reason="asks for what x86 lacks")
@pytest.mark.parametrize(
    ("isa", "message"),
    [
        ("neon", "this CPU lacks dotprod; use one of .*portable, or leave it out"),
        ("sse9", "use one of amx, avx512vnni, avxvnni, avx512, avx2, neon, portable"),
    ],
)
def test_an_instruction_set_that_is_not_there_is_refused_with_the_remedy(isa: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select(frozenset(), "x86_64", isa)


def test_a_variable_that_numba_has_not_seen_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"came too late: numba already compiles for {ISA.name}"):
        select(ISA.needs, platform.machine(), "portable")


def test_the_command_line_refuses_before_it_compiles() -> None:
    done = in_another_process("", "-m", "paceline", "check", "--isa", "sse9")
    assert done.returncode == 2
    # a note that kernels are not cached yet may come before
    assert done.stderr.splitlines()[-1].startswith(
        "error: PACELINE_ISA is 'sse9'; use one of amx, avx512vnni"
    )
