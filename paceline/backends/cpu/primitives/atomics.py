"""Atomic int64 operations at an address, by which the threads of a team synchronize."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from paceline.backends.cpu.primitives.emit import I32, call
from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.primitives.simd import operation, pointer_at

_I64 = ir.IntType(64)


@operation(types.int64, types.int64, types.int64)
def atomic_add(builder, address, value):  # type: ignore[no-untyped-def]
    """Add to the int64 at an address; returns the value before."""
    return builder.atomic_rmw("add", pointer_at(builder, address, _I64), value, "seq_cst")


@operation(types.int64, types.int64)
def atomic_load(builder, address):  # type: ignore[no-untyped-def]
    """The int64 at an address, with acquire semantics."""
    return builder.load_atomic(pointer_at(builder, address, _I64), "seq_cst", 8)


@operation(types.void, types.int64, types.int64)
def atomic_store(builder, address, value):  # type: ignore[no-untyped-def]
    """Write the int64 at an address, with release semantics."""
    builder.store_atomic(value, pointer_at(builder, address, _I64), "seq_cst", 8)


@operation(types.void, types.int64)
def relax(builder, _count):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spin loop."""
    if ISA.family == "x86":
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif ISA.family == "arm":
        call(builder, "llvm.aarch64.isb", ir.VoidType(), I32(15))  # takes about as long as x86's pause
