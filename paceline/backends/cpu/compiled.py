"""`@compiled`: numba with the options every kernel of this room shares, cached on disk.

The cache folder is named after the sources of this room, because numba looks only at the file of
the function itself: a change of an inlined intrinsic in another file would otherwise run old code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from paceline.home import paceline_home


def _sources_fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(numba.__version__.encode())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where compiled kernels of exactly these sources are kept."""
    return paceline_home() / "kernels" / _sources_fingerprint()


_CACHE_FOLDER = str(cache_folder())


def compiled(
    function: Callable[..., Any] | None = None, *, inline: bool = False, cached: bool = False
) -> Any:
    """A numba function without the GIL and without bounds checks.

    Only the functions called from Python are `cached` on disk, with all they call inside.

    No fast-math: every float operation happens in the order it is written, which is what makes a
    row's result independent of the rows beside it.
    """

    def decorate(python_function: Callable[..., Any]) -> Any:
        before = numba.config.CACHE_DIR
        os.makedirs(_CACHE_FOLDER, exist_ok=True)
        numba.config.CACHE_DIR = _CACHE_FOLDER  # read by numba while it decorates, so set only for that long
        try:
            return numba.njit(
                cache=cached,
                nogil=True,
                boundscheck=False,
                error_model="numpy",
                inline="always" if inline else "never",
            )(python_function)
        finally:
            numba.config.CACHE_DIR = before

    return decorate(function) if function is not None else decorate
