"""Helpers that emit LLVM IR for any instruction set: types, vectors, calls."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def splat(builder: ir.IRBuilder, value: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    mask = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, mask)


def part(builder: ir.IRBuilder, vector: Any, start: int, count: int) -> Any:
    """Lanes start..start + count of a vector."""
    lanes = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)


def join(builder: ir.IRBuilder, parts: list[Any]) -> Any:
    """The concatenation of vectors of equal length; their number is a power of two."""
    while len(parts) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


class _VolatileLoad(ir.instructions.LoadInstr):  # type: ignore[misc]
    """A load that LLVM does not merge with others or move out of a loop."""

    def descr(self, buf: list[str]) -> None:
        parts: list[str] = []
        super().descr(parts)
        buf.append("".join(parts).replace("load", "load volatile", 1))


def load_as_written(builder: ir.IRBuilder, pointer: Any, kind: ir.Type) -> Any:
    """The value at a pointer, by a separate load instruction: see Isa.single_loads."""
    value = _VolatileLoad(builder.block, pointer, typ=kind)
    value.align = 4
    builder._insert(value)
    return value
