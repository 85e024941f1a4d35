"""Numba functions for compiled code to call: they are linked into their callers, without machine code.

Numba makes machine code of every function, with one wrapper for Python and another for C, and carries the
wrappers along into every caller's module. Nobody needs them for the 230 functions inside `run_passes`:
without them it compiles in two thirds of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, _LowerResult
from numba.core.compiler_machinery import AnalysisPass, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering


def called(function: Callable[..., Any], **options: Any) -> Any:
    """A numba function to call from compiled code. A call from Python compiles it again, as numba does."""
    return _Called(function, {}, {"nopython": True, **options}, _LinkedCompiler)


class _Called(CPUDispatcher):  # type: ignore[misc]
    def add_overload(self, compiled: Any) -> None:
        """Keep it for callers: Python cannot call what has no machine code."""
        self.overloads[tuple(compiled.signature.args)] = compiled

    def _compile_for_args(self, *args: Any, **named: Any) -> Any:
        return self._for_python._compile_for_args(*args, **named)

    @cached_property
    def _for_python(self) -> Any:
        options = {name: value for name, value in self.targetoptions.items() if name != "nopython"}
        return numba.njit(**options)(self.py_func)


class _LinkedLibrary(JITCodeLibrary):  # type: ignore[misc]
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._finalized = False  # as numba names it

    def _finalize_final_module(self) -> None:
        """Optimized, and ready to be linked into others: numba would also make machine code."""
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=True)
class _Link(AnalysisPass):  # type: ignore[misc]
    """Tells callers of the lowered function. Numba does so only where it makes machine code."""

    _name = "paceline_link"

    def __init__(self) -> None:  # abstract in numba
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        lowered, name = state.cr, object()  # callers find it by this object
        state.targetctx.insert_user_function(name, lowered.fndesc, [state.library])
        state.cr = _LowerResult(lowered.fndesc, lowered.call_helper, cfunc=name, env=lowered.env)
        return False


class _LinkedCompiler(Compiler):  # type: ignore[misc]
    def __init__(self, typing: Any, target: Any, library: Any, args: Any, *rest: Any) -> None:
        super().__init__(typing, target, _LinkedLibrary(target.codegen(), "linked"), args, *rest)
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True

    def define_pipelines(self) -> list[Any]:
        (pipeline,) = super().define_pipelines()
        pipeline.add_pass_after(_Link, NativeLowering)
        pipeline.finalize()
        return [pipeline]
