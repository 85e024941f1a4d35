"""Numba functions for compiled code to call: they are linked into their callers, without machine code.

Numba makes machine code of every function, with one wrapper for Python and another for C. The 200 functions
inside `run_passes` need neither. It also links all callees of a function into it and optimizes them there,
once for each level of calls. Without all that `run_passes` compiles in a quarter of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numba
from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, _LowerResult
from numba.core.compiler_machinery import AnalysisPass, register_pass
from numba.core.typed_passes import NativeLowering

from paceline.kernel_cache import IntegerDispatcher


def called(function: Callable[..., Any], **options: Any) -> Any:
    """A numba function to call from compiled code. A call from Python compiles it again, as numba does."""
    return _Called(function, {}, {"nopython": True, **options}, _LinkedCompiler)


class _Called(IntegerDispatcher):
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
    """The LLVM module of one function as it was lowered: only the caller with machine code optimizes it.

    Numba would link each function's callees into it and optimize them again, once for each level of calls.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._finalized = False  # as numba names it

    def add_llvm_module(self, module: Any) -> None:
        """Add a module as it is: the caller optimizes it."""
        self._final_module.link_in(module)

    def finalize(self) -> None:
        """Ready to be linked into a caller."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """The function and all that it calls, each once, for a caller with machine code."""
        module = self._own_module()
        for library in self._all_called():
            self._reload_init.update(library._reload_init)
            linked = isinstance(library, _LinkedLibrary)
            called_module = library._own_module() if linked else library._get_module_for_linking().clone()
            module.link_in(called_module)
        return module

    def _own_module(self) -> Any:
        """A copy of the module whose functions several modules may define."""
        module = self._final_module.clone()
        for function in module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = Linkage.linkonce_odr
        return module

    def _all_called(self) -> list[Any]:
        """The libraries of all functions that this one calls, also indirectly."""
        found: dict[Any, None] = {}
        pending = list(self._linking_libraries)
        while pending:
            library = pending.pop()
            if library not in found:
                found[library] = None
                if isinstance(library, _LinkedLibrary):
                    pending += library._linking_libraries
        return list(found)


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
