"""Kernels run on a GPU if there is one, else in Triton's interpreter, on tiny shapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.large import LARGE


@pytest.fixture(scope="session", autouse=True)
def interpreter_is_quick() -> Iterator[None]:
    """Save most of the interpreter's time.

    It patches Triton's language for each launch, and each call in it; no kernel is compiled in a process that
    interprets, so the patches can stay. It computes sums and products of integers a second time, to find
    overflows; shapes of tests are far from those, compiled kernels have no such check, and `make test-large`
    has it. It makes a table of all types for each question about one.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", _patched_once(interpreter))
        patches.setattr(interpreter, "_get_np_dtype", _dtype_looked_up(interpreter))
        patches.setattr(builder, "options", replace(builder.options, sanitize_overflow=LARGE))
        yield


def _dtype_looked_up(interpreter: Any) -> Callable[[Any], Any]:
    of_number, pointer = cache(interpreter._get_np_dtype), interpreter.tl.pointer_type
    of_pointer = interpreter._get_np_dtype(pointer(interpreter.tl.int8))

    def dtype_of(kind: Any) -> Any:
        return of_pointer if isinstance(kind.scalar, pointer) else of_number(kind.scalar)

    return dtype_of


def _patched_once(interpreter: Any) -> Callable[[Any], Any]:
    patch, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope()
    languages = interpreter.tl, interpreter.tl.core
    seen: set[int] = set()  # ids of the globals of functions, which stay
    patched: set[str] = set()  # languages

    def patch_rest(function: Any) -> Any:
        own = function.__globals__
        if id(own) not in seen:
            names = {one.__name__ for one in languages if any(value is one for value in own.values())}
            if not names <= patched:
                patch(function)
            patched.update(names)
            seen.add(id(own))
        return nothing_to_restore

    return patch_rest


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """bfloat16 on a GPU, unless PACELINE_TEST_DTYPE says float16; the interpreter knows no bfloat16."""
    usual = "bfloat16" if torch.cuda.is_available() else "float16"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[os.getenv("PACELINE_TEST_DTYPE", usual)]
