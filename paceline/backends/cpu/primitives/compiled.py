"""`@compiled`: numba with the options every kernel of this room shares, cached on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paceline.backends.cpu.primitives.called import called
from paceline.backends.cpu_kernels import cache_folder
from paceline.kernel_cache import c_function, jitted

# emit(builder, arguments): append LLVM IR at the builder's position
Emit = Callable[[ir.IRBuilder, list[Any]], None]


_CACHE_FOLDER = cache_folder()


def compiled(function: Callable[..., Any] | None = None, *, cached: bool = False) -> Any:
    """A numba function without the GIL and without bounds checks.

    `cached`: stored on disk with everything that it calls; for functions called from Python. LLVM decides
    what is inlined: numba's own inlining would compile an inlined function again at each call.
    No fast-math: float operations happen in the order in which they are written. Batch invariance needs that.
    """

    def decorate(python_function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {
            "nogil": True,
            "boundscheck": False,
            "error_model": "numpy",
        }
        if cached:
            return jitted(python_function, _CACHE_FOLDER, **options)
        return called(python_function, **options)

    return decorate(function) if function is not None else decorate


def kernel(*arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """A C function of these numba types, cached on disk, for compiled code to call by its `.address`.

    A function called by address is compiled once. Called by name it would be compiled again in every caller,
    and the register tiles are most of the code.
    """

    def decorate(python_function: Callable[..., Any]) -> Any:
        return c_function(python_function, types.void(*arguments), _CACHE_FOLDER)

    return decorate


def switch(keys: int, arguments: tuple[Any, ...], table: dict[tuple[int, ...], Emit]) -> Any:
    """An intrinsic f(*keys, *arguments) that runs the code that `table` emits for these keys."""
    sizes = [max(key[index] for key in table) + 1 for index in range(keys)]

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        number = args[0]  # all keys as one number, so that LLVM makes a jump table
        for argument, size in zip(args[1:keys], sizes[1:], strict=True):
            number = builder.add(builder.mul(number, ir.Constant(number.type, size)), argument)
        end = builder.append_basic_block("end")
        jumps = builder.switch(number, end)
        for key, emit in table.items():
            value = functools.reduce(
                lambda total, pair: total * pair[1] + pair[0], zip(key, sizes, strict=True), 0
            )
            block = builder.append_basic_block("case")
            jumps.add_case(ir.Constant(number.type, value), block)
            builder.position_at_end(block)
            emit(builder, args[keys:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return make_intrinsic("switch", types.void(*[types.int64] * keys, *arguments), codegen)


def make_intrinsic(name: str, signature: Any, codegen: Any) -> Any:
    """A numba intrinsic with a fixed signature: numba needs a Python function with named parameters."""
    names = ", ".join(f"argument{index}" for index in range(len(signature.args)))
    scope: dict[str, Any] = {"answer": (signature, codegen)}
    exec(f"def {name}(typingctx, {names}):\n    return answer", scope)
    return intrinsic(scope[name])
