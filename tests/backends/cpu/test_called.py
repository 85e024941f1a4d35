"""Functions that compiled code calls are linked into callers, without machine code of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numba
import pytest

from paceline.backends.cpu.primitives.called import called
from paceline.kernel_cache import jitted

WRAPPERS = ("cpython", "cfunc")  # in the names that numba gives them


def doubled(number: Any) -> Any:
    return 2 * number


def made(folder: Path) -> tuple[Any, Any]:
    """A function that compiled code calls, and one that calls it, cached in this folder."""
    inner = called(doubled, nogil=True)

    def caller(number: Any) -> Any:
        return inner(number) + 1

    return inner, jitted(caller, folder)


def test_it_is_linked_into_its_callers_without_wrappers(tmp_path: Path) -> None:
    inner, caller = made(tmp_path)
    assert (caller(3), caller(1.5)) == (7, 4.0)
    assert len(inner.overloads) == 2
    for compiled in inner.overloads.values():
        assert not any(name in compiled.library.get_llvm_str() for name in WRAPPERS)


def test_callees_are_optimized_in_the_caller_with_machine_code_alone(tmp_path: Path) -> None:
    inner = called(doubled)

    def between(number: Any) -> Any:
        return inner(number) + 1

    middle = called(between)

    def caller(number: Any) -> Any:
        return middle(number) + 1

    outer = jitted(caller, tmp_path)
    assert outer(3) == 8
    (text,) = (compiled.library.get_llvm_str() for compiled in middle.overloads.values())
    (name,) = (compiled.fndesc.llvm_func_name for compiled in inner.overloads.values())
    assert re.search(f"^declare .*{name}", text, re.MULTILINE)
    assert not re.search(f"^define .*{name}", text, re.MULTILINE)
    assert "alloca" in text  # not optimized
    (text,) = (compiled.library.get_llvm_str() for compiled in outer.overloads.values())
    assert not re.search(f"call .*{name}", text)  # inlined


@pytest.mark.parametrize("make", [called, jitted])
def test_it_is_compiled_once_for_literals_and_other_integers(tmp_path: Path, make: Any) -> None:
    inner = make(doubled) if make is called else make(doubled, tmp_path)

    def caller(number: Any) -> Any:
        return inner(number) + inner(3) + inner(number=4)

    assert jitted(caller, tmp_path)(5) == 24
    assert len(inner.overloads) == 1


def test_numba_itself_compiles_for_each_literal() -> None:
    inner = numba.njit(doubled)

    @numba.njit
    def caller(number: Any) -> Any:
        return inner(number) + inner(3)

    assert caller(5) == 16
    assert len(inner.overloads) == 2


def test_numba_itself_makes_wrappers() -> None:
    plain = numba.njit(doubled)
    plain(3)
    (text,) = (compiled.library.get_llvm_str() for compiled in plain.overloads.values())
    assert all(name in text for name in WRAPPERS)


@pytest.mark.parametrize("first", ["Python", "compiled code"])
def test_python_may_call_it_too(tmp_path: Path, first: str) -> None:
    inner, caller = made(tmp_path)
    calls = [lambda: inner(3) == 6, lambda: caller(3) == 7, lambda: inner(3) == 6]
    assert all(call() for call in (calls if first == "Python" else calls[1:]))
