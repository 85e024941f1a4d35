"""Kernels that stream weights through a ring of shared memory: what those in between.py and logits.py share.

They are CUDA C++ (source/stream.cu and what follows it) for Hopper: one program stays on each multiprocessor,
one thread of it asks for weights, one for rows, and two groups of warps multiply.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch

from paceline.backends.cuda.kernels.launching import HOPPER
from paceline.backends.cuda.kernels.matrix import Matrix
from paceline.backends.cuda.native import NativeKernel, native_kernel, tensor_map

COMMON = ("instructions", "stream", "stream_ends")  # with a third file, in this order, they are one source
TILE, STEP = 64, 128  # columns of a tile, and of the depth, as weights must lie
DEEP = 64  # of the depth: what a cell of the ring holds, of one tile
THREADS = 384
MOST_TILES = 64  # of the residual stream: a warp adds up their squares


def streams_on(device: torch.device) -> bool:
    """Whether there are such kernels for this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def is_plain(matrix: Matrix) -> bool:
    """Whether weights lie as such kernels read them."""
    tiling = matrix.tiling
    return tiling.packing == "none" and tiling.step == STEP and matrix.weight.dtype == torch.bfloat16


@lru_cache
def programs_of(device: torch.device) -> int:
    """One on each multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def streaming_kernel(
    file: str, name: str, rows: int, ring: tuple[int, int], device: torch.device
) -> NativeKernel | None:
    """The kernel of this name for so many rows, compiled; None if it cannot be had.

    `ring` is how many cells of weights, and slots of rows, are on their way or at hand.
    """
    cells, slots = ring
    numbers = {"ROWS": rows, "CELLS": cells, "ROW_SLOTS": slots}
    held = cells * TILE * DEEP * 2 + slots * rows * DEEP * 2
    given, flags, factors = rows * 256, (2 * cells + 2 * slots + 4) * 8, rows * 4
    shared = -(-(held + given + flags + factors) // 1024) * 1024
    return native_kernel(name, (*COMMON, file), numbers, multiplication(rows), shared, device)


def multiplication(rows: int, name: str = "multiply", turned: bool = False) -> str:
    """The instruction that multiplies 64 columns by so many rows: it names each of its registers.

    `turned`: the columns lie side by side in memory, not what is summed over.
    """
    count = rows // 2
    sums, names = ", ".join(f'"+f"(d[{i}])' for i in range(count)), ", ".join(f"%{i}" for i in range(count))
    return (
        f"__device__ inline void {name}(float (&d)[{count}], unsigned long long left, "
        "unsigned long long right, int adds) {\n"
        f'    asm volatile("{{ .reg .pred adds; setp.ne.b32 adds, %{count + 2}, 0; "\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{names}}}, "\n'
        f'                 "%{count}, %{count + 1}, adds, 1, 1, {int(turned)}, 0; }}"\n'
        f'                 : {sums} : "l"(left), "l"(right), "r"(adds));\n}}\n'
    )


def product(matrix: Matrix, rows: torch.Tensor, padded: int, units: int, in_halves: bool) -> bytes:
    """A product as kernels see it: its operands, and how many programs or clusters have a part of it.

    Lines of weights come in eights, each beside its counterpart: of the other half of the tile, if halves are
    gates and ups or parts of a head, else beside the next eight.
    """
    columns, steps = matrix.tiling.columns, matrix.depth // STEP
    second, next_eight = (columns // 2, 8) if in_halves else (8, 16)
    sizes = STEP, 8, 2, columns // 16, matrix.tiles * steps
    strides = STEP, second * STEP, next_eight * STEP, columns * STEP
    weights = tensor_map(matrix.weight.data_ptr(), sizes, strides, (DEEP, 8, 2, TILE // 16, 1))
    lines = tensor_map(rows.data_ptr(), (matrix.depth, len(rows)), (matrix.depth,), (DEEP, padded))
    return weights + lines + struct.pack("<2i56x", steps, units)


def argument(*parts: bytes) -> bytes:
    """A structure of these parts: as large as C++ makes it, which aligns it."""
    whole = b"".join(parts)
    return whole.ljust(-(-len(whole) // 64) * 64, b"\0")
