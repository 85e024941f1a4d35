"""The cache folder of the cpu backend's compiled kernels, without importing (and compiling) that backend.

The folder's name is a fingerprint of all sources that kernels are compiled from. numba's own check sees only
the file of a function itself, so a change of an inlined function in another file would run stale code.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba

from paceline.kernel_cache import kernels_folder
from paceline.machine import EMULATED, ISA_VARIABLE, has_amx, request_amx


def cache_folder() -> Path:
    """Where compiled kernels of exactly these sources are kept."""
    return kernels_folder(_sources_fingerprint())


def _sources_fingerprint() -> str:
    digest = hashlib.sha256()
    backends = Path(__file__).parent
    verify = backends.parent / "verify"
    called = [verify / name for name in ("floats.py", "kernels.py", "noise.py")]
    called.append(backends / "head_chains.py")
    for path in [*sorted((backends / "cpu").rglob("*.py")), *called]:
        digest.update(path.read_bytes())
    digest.update(numba.__version__.encode())
    asked = os.environ.get(ISA_VARIABLE, "")
    if asked.endswith(EMULATED):  # all others differ in numba's target, which is in its cache key
        digest.update(asked.encode())
    if has_amx() and not request_amx():  # numba's target lists AMX nevertheless
        digest.update(b"without AMX")
    return digest.hexdigest()[:16]
