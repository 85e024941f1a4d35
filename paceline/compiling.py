"""Numba options of compiled functions outside the cpu backend, which has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.extending import intrinsic

from paceline.kernel_cache import jitted, kernels_folder

_FOLDER = kernels_folder("rooms")
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """A numba function, cached on disk, that releases the GIL. No fast-math: results are bit-exact."""
    return cast(Function, jitted(function, _FOLDER, nogil=True, error_model="numpy"))


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(typing: Any, address: Any) -> Any:
    """In compiled code: an address as the pointer that numba.carray takes."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code


def inlined(function: Function) -> Function:
    """A numba function that is inlined into the compiled functions that call it."""
    return cast(Function, numba.njit(inline="always", error_model="numpy")(function))
