"""Triton's interpreter without most of what it spends around numpy's work: the same values, much sooner.

numpy takes a microsecond for an operation on a small block, the interpreter a hundred: for each value it
makes a type, the type's name, a tuple of the sizes and a constant of each, and checks them. Here blocks of
one shape share these parts, numbers are converted once for all operations, and operands of other shapes than
the result are left as they are: numpy broadcasts them itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_plain_block_type = core.block_type.__init__
_plain_equal = core.dtype.__eq__
_plain_broadcast = TritonSemantic.broadcast_impl_value
_plain_computation_type = TritonSemantic.computation_type_impl
_plain_operands = TritonSemantic.binary_op_type_checking_impl
_plain_handle = interpreter.TensorHandle.__init__
_plain_binary = interpreter.InterpreterBuilder.binary_op
_plain_unwrap = core._unwrap_if_constexpr

# types of numbers, by their ids: to compare types takes long. Halves are divided as floats
_WHOLE = (core.int1, core.int8, core.int16, core.int32, core.int64)
_WHOLE += (core.uint8, core.uint16, core.uint32, core.uint64)
_KINDS = {id(kind): kind for kind in (*_WHOLE, core.float16, core.bfloat16, core.float32, core.float64)}
_DIVISIBLE = _KINDS.keys() - {id(core.float16), id(core.bfloat16)}
_OFFSETS = frozenset(map(id, _WHOLE))
_BOOL, _TENSOR = np.dtype(np.bool_), core.tensor

# what is replaced: where it is, its name, the interpreter's own
PLAIN = (
    (core.block_type, "__init__", _plain_block_type),
    (core.tensor, "__init__", core.tensor.__init__),
    (core.dtype, "__eq__", _plain_equal),
    (TritonSemantic, "broadcast_impl_value", _plain_broadcast),
    (TritonSemantic, "computation_type_impl", _plain_computation_type),
    (TritonSemantic, "binary_op_type_checking_impl", _plain_operands),
    (interpreter.TensorHandle, "__init__", _plain_handle),
    (interpreter.InterpreterBuilder, "binary_op", _plain_binary),
    (core, "_unwrap_if_constexpr", _plain_unwrap),
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
    quick = _block_type, _tensor, _equal, _broadcast, _computation_type_looked_up(), _operands, _handle
    quick += _binary, _unwrap
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


def _handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and type(dtype) is not core.pointer_type:
        self.__post_init__()


def _binary(self: Any, lhs: Any, rhs: Any, operation: Any) -> Any:
    kind = lhs.dtype.scalar
    if lhs.data.dtype is _BOOL or type(kind) is core.pointer_type:
        return _plain_binary(self, lhs, rhs, operation)
    output = operation(lhs.data, rhs.data)
    if output.itemsize > 1 and output.itemsize * 8 > kind.primitive_bitwidth:
        output = output.astype(interpreter._get_np_dtype(kind))
    return interpreter.TensorHandle(output, kind)


def _unwrap(own: Any) -> Any:
    kind = type(own)
    if kind is core.constexpr:
        return own.value
    return own if kind is core.tensor or kind is int else _plain_unwrap(own)


def _operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Of two values of one type, a value and a number, a pointer and an offset; else the plain ones."""
    kinds, are_values = _DIVISIBLE if div_or_mod else _KINDS, (type(lhs) is _TENSOR, type(rhs) is _TENSOR)
    if are_values == (True, True):
        is_moved = allow_lhs_ptr and type(lhs.dtype) is core.pointer_type and id(rhs.dtype) in _OFFSETS
        if is_moved or (lhs.dtype is rhs.dtype and id(lhs.dtype) in kinds):
            return _together(self, lhs, rhs)
    elif any(are_values) and arithmetic_check:
        value, number = (lhs, rhs) if are_values[0] else (rhs, lhs)
        if type(number) in (int, float, bool) and id(value.dtype) in kinds:
            constant = _constant(self, number, math.copysign(1.0, number), id(value.dtype), div_or_mod)
            if constant is not None:
                return _together(self, *((lhs, constant) if are_values[0] else (constant, rhs)))
    return _plain_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


@lru_cache(1 << 12, typed=True)
def _constant(semantic: Any, number: float, sign: float, kind: int, div_or_mod: bool) -> Any:
    """A number as a value of this type, if an operation with such a value is of this type too."""
    own = _KINDS[kind]
    if (
        semantic.computation_type_impl(own, False, semantic.to_tensor_type(number), True, div_or_mod)
        is not own
    ):
        return None
    return semantic._cast_to_computation_type(number, own)


def _together(semantic: Any, lhs: Any, rhs: Any) -> Any:
    """Operands with the shape of the result in their types: numpy, which has the numbers, broadcasts them."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    if not rhs.type.is_block():
        return lhs, core.tensor(rhs.handle, _block_of(rhs.dtype, lhs.type.shape))
    if not lhs.type.is_block():
        return core.tensor(lhs.handle, _block_of(lhs.dtype, rhs.type.shape)), rhs
    left, right = lhs.type.shape, rhs.type.shape
    shape = _shape_of_both(*left.values, 0, *right.values)
    if shape is None:
        return _plain_broadcast(semantic, lhs, rhs)  # says what is wrong
    return tuple(
        own if own.type.shape is shape else core.tensor(own.handle, _block_of(own.dtype, shape))
        for own in (lhs, rhs)
    )


@cache
def _shape_of_both(*sizes: int) -> Any:
    """The shape that two blocks are broadcast to, or None. A 0 is between the sizes of one and the other."""
    border = sizes.index(0)
    try:
        return _block_shape(*np.broadcast_shapes(sizes[:border], sizes[border + 1 :]))[0]
    except ValueError:
        return None


_blocks: dict[tuple[int, int], tuple[Any, Any]] = {}  # by the ids of a type and a shape: types, and shapes


def _block_of(kind: Any, shape: Any) -> Any:
    """The type of blocks of this shape."""
    known = _blocks.get((id(kind), id(shape)))
    if known is not None:
        return known[0]
    made = core.block_type(kind, shape.values)
    if id(kind) in _KINDS:
        _blocks[id(kind), id(shape)] = made, shape  # which stays, and keeps its id
    return made
