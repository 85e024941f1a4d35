"""Triton's interpreter without most of what it spends around numpy's work: the same values in half the time.

numpy takes a microsecond for an operation on a small block, the interpreter a hundred: for each value it
makes a type, the type's name, a tuple of the sizes and a constant of each, and checks them. Here blocks of
one shape share these parts, and blocks that share a shape are not broadcast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_plain_block_type = core.block_type.__init__
_plain_equal = core.dtype.__eq__
_plain_broadcast = TritonSemantic.broadcast_impl_value
_plain_computation_type = TritonSemantic.computation_type_impl

# what is replaced: where it is, its name, the interpreter's own
PLAIN = (
    (core.block_type, "__init__", _plain_block_type),
    (core.tensor, "__init__", core.tensor.__init__),
    (core.dtype, "__eq__", _plain_equal),
    (TritonSemantic, "broadcast_impl_value", _plain_broadcast),
    (TritonSemantic, "computation_type_impl", _plain_computation_type),
)


def make_quick(patches: pytest.MonkeyPatch, sanitize_overflow: bool) -> None:
    """Replace these parts of the interpreter.

    It patches Triton's language for each launch, and each call in it; no kernel is compiled in a process that
    interprets, so the patches can stay. It makes a table of all types for each question about one. With
    `sanitize_overflow` it computes sums and products of integers a second time, to find overflows.
    """
    builder = interpreter.interpreter_builder
    patches.setattr(builder, "options", replace(builder.options, sanitize_overflow=sanitize_overflow))
    patches.setattr(interpreter, "_patch_lang", _patched_once())
    patches.setattr(interpreter, "_patch_attr", _patch_attribute)
    patches.setattr(interpreter, "_get_np_dtype", _dtype_looked_up())
    quick = _block_type, _tensor, _equal, _broadcast, _computation_type_looked_up()
    for (where, name, _), own in zip(PLAIN, quick, strict=True):
        patches.setattr(where, name, own)


def _patched_once() -> Callable[[Any], Any]:
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


def _patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A built-in function always gets the interpreter's semantic: nothing has to ask whether it has one."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    @functools.wraps(member)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _dtype_looked_up() -> Callable[[Any], Any]:
    of_number, pointer = cache(interpreter._get_np_dtype), interpreter.tl.pointer_type
    of_pointer = interpreter._get_np_dtype(pointer(interpreter.tl.int8))

    def dtype_of(kind: Any) -> Any:
        return of_pointer if isinstance(kind.scalar, pointer) else of_number(kind.scalar)

    return dtype_of


@cache
def _block_shape(*sizes: int) -> tuple[Any, int, str]:
    """A block's shape, checked, its number of elements, and the shape as text."""
    made = object.__new__(core.block_type)
    _plain_block_type(made, core.int1, list(sizes))
    return made.shape, made.numel, str(made.shape)


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
    self.element_ty = element_ty
    self.shape, self.numel, text = _block_shape(*sizes)
    self.name = f"<{text}, {element_ty.name}>"


@cache
def _constant_shape(*sizes: int) -> tuple[Any, Any]:
    """A tensor's shape and its number of elements, as constants."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constant_shape(*(type.shape.values if type.is_block() else ()))


def _equal(self: Any, other: Any) -> bool:
    return self is other or bool(_plain_equal(self, other))


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    return (lhs, rhs) if lhs.shape is rhs.shape else _plain_broadcast(self, lhs, rhs)


def _computation_type_looked_up() -> Callable[..., Any]:
    known = dict[tuple[str, bool, str, bool, bool], Any]()

    def look_up(self: Any, a_ty: Any, a_scalar: bool, b_ty: Any, b_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_scalar, b_ty.name, b_scalar, div_or_mod
        if key not in known:
            known[key] = _plain_computation_type(self, a_ty, a_scalar, b_ty, b_scalar, div_or_mod)
        return known[key]

    return look_up
