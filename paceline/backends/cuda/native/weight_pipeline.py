"""The weight-streaming pipeline of the kernels in fused_layer.py and logits.py.

It is CUDA C++ for Hopper (source/pipeline.cu): persistent and warp-specialized, with one program per
multiprocessor. One thread loads weights and one loads rows by TMA; two warpgroups multiply (WGMMA).
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch

from paceline.backends.cuda.kernels.pdl import HOPPER
from paceline.backends.cuda.kernels.products.matrix import Matrix
from paceline.backends.cuda.native.nvrtc import NativeKernel, native_kernel, tensor_map
from paceline.backends.cuda.passes.compiling import cached_kernel

SHARED_SOURCES = (
    "instructions",
    "activations",
    "pipeline",
    "pipeline_products",
    "pipeline_epilogues",
)  # concatenated in this order, followed by the kernel's own file
TILE = 64  # columns of a tile
STEPS = {"none": 128, "e4m3": 128, "int4": 256}  # {packing: depth of a step} in the layout of weights
DTYPES = {"none": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int4": torch.int32}  # of weights
LINE = 64  # 2-byte numbers of a line of a pipeline cell; a cell has TILE lines
THREADS = 384  # of a program
MAX_TILES = 64  # most tiles of the residual stream: one warp adds up their sums of squares


def supports_pipeline(device: torch.device) -> bool:
    """Whether this device can run such kernels."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def can_stream(matrix: Matrix, packing: str = "none") -> bool:
    """Whether a matrix is packed like this, and has the layout that these kernels read."""
    tiling, dtype = matrix.tiling, matrix.weight.dtype
    return tiling.packing == packing and tiling.step == STEPS[packing] and dtype == DTYPES[packing]


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors, which is that of programs."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cached_kernel
def pipeline_kernel(
    file: str,
    name: str,
    rows: int,
    ring: tuple[int, int],
    device: torch.device,
    packing: str = "none",
    loaded: int | None = None,
) -> NativeKernel | None:
    """The compiled kernel of this name for this many rows and packing; None if it is not available.

    `ring`: pipeline stages, as (cells of weights, slots of rows). `loaded`: rows to load, by default all.
    """
    cells, slots = ring
    is_fp8, is_int4 = packing == "e4m3", packing == "int4"
    held = cells * TILE * LINE * 2 + slots * rows * LINE * 2 * (4 if is_int4 else 1)
    scales = rows * 8 * (slots if is_fp8 else 1) + TILE * 16 * (cells if is_int4 else 1)
    given, flags, factors = rows * 256, (2 * cells + 2 * slots + 4) * 8, rows * 4
    shared = -(-(held + scales + given + flags + factors) // 1024) * 1024
    numbers = pipeline_numbers(rows, ring, packing, loaded)
    files = *SHARED_SOURCES, file
    return native_kernel(name, files, numbers, pipeline_multiply(rows, packing), shared, device)


def pipeline_numbers(
    rows: int, ring: tuple[int, int], packing: str, loaded: int | None = None
) -> dict[str, int]:
    """The constants that source/pipeline.cu needs."""
    sizes = {"ROWS": rows, "LOADED": loaded or rows, "CELLS": ring[0], "ROW_SLOTS": ring[1]}
    return sizes | {name.upper(): int(packing == name) for name in ("e4m3", "int4")}


def pipeline_multiply(rows: int, packing: str) -> str:
    """The source of the instruction that multiplies such weights."""
    if packing == "int4":
        return wgmma_source(rows, "multiply_from_registers", from_registers=True)
    return wgmma_source(rows, kind="e4m3" if packing == "e4m3" else "bf16")


def wgmma_source(
    rows: int,
    name: str = "multiply",
    transposed: bool = False,
    kind: str = "bf16",
    from_registers: bool = False,
) -> str:
    """The source of the WGMMA instruction for 64 columns and this many rows, which names all its registers.

    `from_registers`: the columns are in four registers of each thread, not in shared memory. `transposed`:
    the columns, or with `from_registers` the rows, are contiguous in memory, not the depth; only in bfloat16.
    """
    count, words = rows // 2, 4 if from_registers else 1
    deep = 32 if kind == "e4m3" else 16
    layouts = "" if kind == "e4m3" else f", {int(transposed)}" + ("" if from_registers else ", 0")
    sums, names = ", ".join(f'"+f"(d[{i}])' for i in range(count)), ", ".join(f"%{i}" for i in range(count))
    left = "const unsigned int (&left)[4]" if from_registers else "unsigned long long left"
    inputs = ", ".join(f'"r"(left[{i}])' for i in range(4)) if from_registers else '"l"(left)'
    given = ", ".join(f"%{count + i}" for i in range(words))
    given = f"{{{given}}}" if from_registers else given
    return (
        f"__device__ inline void {name}(float (&d)[{count}], {left}, unsigned long long right, int adds) {{\n"
        f'    asm volatile("{{ .reg .pred adds; setp.ne.b32 adds, %{count + words + 1}, 0; "\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{rows}k{deep}.f32.{kind}.{kind} {{{names}}}, "\n'
        f'                 "{given}, %{count + words}, adds, 1, 1{layouts}; }}"\n'
        f'                 : {sums} : {inputs}, "l"(right), "r"(adds));\n}}\n'
    )


def product(
    matrix: Matrix,
    rows: torch.Tensor,
    loaded: int,
    units: int,
    in_halves: bool,
    row_scales: torch.Tensor | None = None,
    is_shared: bool = False,
) -> bytes:
    """The `Product` argument of a kernel: TMA descriptors of weights and rows, scales, and sizes.

    `loaded`: rows to load. `units`: programs or clusters that share the product. `is_shared`: each warpgroup
    of a program has half of its splits.
    Lines of weights are copied in groups of 8, paired with a counterpart: with `in_halves` (gate and up, or
    halves of a head) the same lines of the other half of the tile, else the next 8. Rows in e4m3 have scales;
    a descriptor counts two e4m3 numbers as one.
    """
    columns, steps = matrix.tiling.columns, matrix.depth // matrix.tiling.step
    line, depth = matrix.weight[0, 0, 0].nbytes // 2, rows[0].nbytes // 2
    second, next_eight = (columns // 2, 8) if in_halves else (8, 16)
    sizes = line, 8, 2, columns // 16, matrix.tiles * steps
    strides = line, second * line, next_eight * line, columns * line
    weights = tensor_map(matrix.weight.data_ptr(), sizes, strides, (LINE, 8, 2, TILE // 16, 1))
    lines = tensor_map(rows.data_ptr(), (depth, len(rows)), (depth,), (LINE, loaded))
    scales = [0 if own is None else own.data_ptr() for own in (matrix.scales, row_scales)]
    return weights + lines + struct.pack("<4i2Q32x", steps, units, matrix.tiling.splits, is_shared, *scales)


def argument(*parts: bytes) -> bytes:
    """The bytes of a C++ structure with these members, padded to its alignment."""
    whole = b"".join(parts)
    return whole.ljust(-(-len(whole) // 64) * 64, b"\0")
