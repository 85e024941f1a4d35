"""What fused_layer.py and logits.py share: kernels that stream weights through a pipeline in shared memory.

They are CUDA C++ for Hopper (source/pipeline.cu): persistent and warp-specialized. One program stays on each
multiprocessor; one thread loads weights and one loads rows by TMA, and two warpgroups multiply (WGMMA).
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch

from paceline.backends.cuda.kernels.matrix import Matrix
from paceline.backends.cuda.kernels.pdl import HOPPER
from paceline.backends.cuda.native import NativeKernel, native_kernel, tensor_map

SHARED_SOURCES = (
    "instructions",
    "pipeline",
    "pipeline_epilogues",
)  # concatenated in this order, followed by the kernel's own file
TILE, STEP = 64, 128  # columns of a tile, and depth of a step, in the layout of weights
DEEP = 64  # depth of a pipeline cell, of one tile
THREADS = 384
MAX_TILES = 64  # of the residual stream: a warp adds up their sums of squares


def supports_pipeline(device: torch.device) -> bool:
    """Whether this device has such kernels."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def is_plain(matrix: Matrix) -> bool:
    """Whether a matrix has the layout that these kernels read."""
    tiling = matrix.tiling
    return tiling.packing == "none" and tiling.step == STEP and matrix.weight.dtype == torch.bfloat16


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors: there is one program on each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def pipeline_kernel(
    file: str, name: str, rows: int, ring: tuple[int, int], device: torch.device
) -> NativeKernel | None:
    """The compiled kernel of this name for this many rows; None if it is not available.

    `ring` is the number of pipeline stages: cells of weights, and slots of rows.
    """
    cells, slots = ring
    numbers = {"ROWS": rows, "CELLS": cells, "ROW_SLOTS": slots}
    held = cells * TILE * DEEP * 2 + slots * rows * DEEP * 2
    given, flags, factors = rows * 256, (2 * cells + 2 * slots + 4) * 8, rows * 4
    shared = -(-(held + given + flags + factors) // 1024) * 1024
    return native_kernel(name, (*SHARED_SOURCES, file), numbers, wgmma_source(rows), shared, device)


def wgmma_source(rows: int, name: str = "multiply", transposed: bool = False) -> str:
    """The source of the WGMMA instruction for 64 columns and this many rows, which names all its registers.

    `transposed`: the columns are contiguous in memory, not the depth.
    """
    count = rows // 2
    sums, names = ", ".join(f'"+f"(d[{i}])' for i in range(count)), ", ".join(f"%{i}" for i in range(count))
    return (
        f"__device__ inline void {name}(float (&d)[{count}], unsigned long long left, "
        "unsigned long long right, int adds) {\n"
        f'    asm volatile("{{ .reg .pred adds; setp.ne.b32 adds, %{count + 2}, 0; "\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{names}}}, "\n'
        f'                 "%{count}, %{count + 1}, adds, 1, 1, {int(transposed)}, 0; }}"\n'
        f'                 : {sums} : "l"(left), "l"(right), "r"(adds));\n}}\n'
    )


def product(matrix: Matrix, rows: torch.Tensor, padded: int, units: int, in_halves: bool) -> bytes:
    """A product as kernels see it: TMA descriptors, and its number of units (programs or clusters).

    Lines of weights come in eights, each next to its counterpart: that of the other half of the tile, where
    the halves are gate and up or parts of a head, else the next eight.
    """
    columns, steps = matrix.tiling.columns, matrix.depth // STEP
    second, next_eight = (columns // 2, 8) if in_halves else (8, 16)
    sizes = STEP, 8, 2, columns // 16, matrix.tiles * steps
    strides = STEP, second * STEP, next_eight * STEP, columns * STEP
    weights = tensor_map(matrix.weight.data_ptr(), sizes, strides, (DEEP, 8, 2, TILE // 16, 1))
    lines = tensor_map(rows.data_ptr(), (matrix.depth, len(rows)), (matrix.depth,), (DEEP, padded))
    return weights + lines + struct.pack("<2i56x", steps, units)


def argument(*parts: bytes) -> bytes:
    """The bytes of a C++ structure with these members, padded to its alignment."""
    whole = b"".join(parts)
    return whole.ljust(-(-len(whole) // 64) * 64, b"\0")
