"""How numba compiles the functions of the rooms. The cpu backend keeps its kernels in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """A numba function, kept on disk, that runs without the GIL. No fast-math: bits are promised."""
    return cast(Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: Function) -> Function:
    """A numba function that becomes part of the compiled functions that call it."""
    return cast(Function, numba.njit(inline="always", error_model="numpy")(function))
