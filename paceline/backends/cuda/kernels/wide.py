"""Products of more than 64 rows with large matrices on Hopper, in CUDA C++ (wide.cu).

The kernels of linear.py pad rows to a power of two there, and ask for weights when the kernel before has
ended. This one has programs of 96, 128 or 192 rows, whose weights are on their way before. The bits are
theirs, and where it cannot be had, they run.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import triton

from paceline.backends.cuda.kernels.launching import HOPPER
from paceline.backends.cuda.kernels.matrix import Matrix, Normed
from paceline.backends.cuda.kernels.native import NativeKernel, compiler, tensor_map

logger = logging.getLogger(__name__)

LEAST_ROWS = 65
LEAST_BYTES = 128 << 20  # of a matrix: smaller ones were not compared
MOST_GROUPS = {192: 3, 128: 4, 96: 4}  # by rows of a program: blocks of columns that it has registers for
PROGRAMS = 132  # one on each multiprocessor
BLOCK = 64  # columns
PIECE = 64  # of the depth
STEP = 128  # of the depth, as weights must lie in memory
SHARED_BYTES = 227 << 10
OTHER_BYTES = 2048  # beside the ring

PROJECT, GATE_UP = range(2)  # what products end with: wide.cu has the same numbers


class _Product(ctypes.Structure):
    """What the kernel is told, in the order of wide.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("output", "bias", "squares")),
        ("stride", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("width", "blocks", "depth", "rows", "groups")),
        *((name, ctypes.c_float) for name in ("size", "eps")),
    )


@dataclass(frozen=True)
class WideCut:
    """How programs share a product: no part of the result's bits."""

    rows: int  # of a program
    row_tiles: int
    parts: int  # programs along the columns
    groups: int  # blocks of columns that a program has at a time


def wide_cut(blocks: int, rows: int) -> WideCut:
    """How the product of so many blocks of columns is cut: as few rows of padding as can be, and one program
    on each multiprocessor."""
    own = min(MOST_GROUPS, key=lambda tile: -(-rows // tile) * tile)
    row_tiles = -(-rows // own)
    parts = min(max(1, PROGRAMS // row_tiles), blocks)
    return WideCut(own, row_tiles, parts, min(MOST_GROUPS[own], -(-blocks // parts)))


def multiply_wide(
    kind: int, normed: Normed, matrix: Matrix, output: torch.Tensor, stride: int, rows: int
) -> bool:
    """Write norm(rows) @ weight.T, ended as `kind` says, to `output`, whose rows lie `stride` apart; False if
    this kernel cannot."""
    if rows < LEAST_ROWS or not _suits(matrix):
        return False
    blocks, groups, inputs = matrix.padded_width // BLOCK, normed.squares.shape[1], normed.rows
    cut = wide_cut(blocks, rows)
    columns = matrix.tiling.columns
    kernel = _kernel(kind, cut.rows, cut.groups, columns, groups, inputs.device)
    if kernel is None:
        return False
    half, steps = columns // 2, matrix.depth // STEP
    weights = tensor_map(  # the depth, eight columns, both halves of a tile, its eights, steps of all tiles
        matrix.weight,
        (STEP, 8, 2, half // 8, matrix.tiles * steps),
        (STEP, half * STEP, 8 * STEP, columns * STEP),
        (PIECE, 8, 2, 4, 1),
    )
    read = tensor_map(inputs, (matrix.depth, len(inputs)), (inputs.stride(0),), (PIECE, cut.rows))
    bias = None if matrix.bias is None else matrix.bias.data_ptr()
    product = _Product(output.data_ptr(), bias, normed.squares.data_ptr(), stride, matrix.width, blocks)
    product.depth, product.rows, product.groups = matrix.depth, rows, groups
    product.size, product.eps = normed.size, normed.eps
    kernel.start((cut.parts, cut.row_tiles, 1), cut.groups * 128 + 64, (weights, read, product))
    return True


def _suits(matrix: Matrix) -> bool:
    """Whether the kernel is made for this matrix and its device."""
    weight, tiling = matrix.weight, matrix.tiling
    return (
        weight.device.type == "cuda"
        and weight.dtype == torch.bfloat16
        and weight.nbytes >= LEAST_BYTES
        and (tiling.packing, tiling.splits, tiling.step) == ("none", 1, STEP)
        and torch.cuda.get_device_capability(weight.device)[0] == HOPPER
        and compiler() is not None
    )


@lru_cache
def _kernel(
    kind: int, rows: int, groups: int, columns: int, squares: int, device: torch.device
) -> NativeKernel | None:
    """The kernel for programs of these sizes; None if it does not compile, which the log tells."""
    stage = (groups * BLOCK + rows) * PIECE * 2
    stages = (SHARED_BYTES - OTHER_BYTES) // stage
    sizes = {"KIND": kind, "ROWS": rows, "GROUPS": groups, "STAGES": stages, "STEP": STEP}
    sizes |= {"HALF": columns // 2, "SQUARE_WORDS": max(1, triton.next_power_of_2(squares) // 32)}
    source = "".join(f"#define {name} {value}\n" for name, value in sizes.items()) + _instruction(rows)
    source += Path(__file__).with_name("wide.cu").read_text()
    try:
        return NativeKernel(source, "wide_product", stages * stage + 1024, device)
    except Exception as error:  # whatever a private function raises on another torch or driver
        logger.warning("products of many rows run by Triton, since their kernel failed: %s", error)
        return None


def _instruction(rows: int) -> str:
    """The matrix instruction for so many rows, whose sums C++ cannot count."""
    count = rows // 2
    names = ", ".join(f"%{index}" for index in range(count))
    outputs = ", ".join(f'"+f"(d[{index}])' for index in range(count))
    return (
        '#define MULTIPLY "{ .reg .pred add; setp.ne.b32 add, 1, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{names}}}, %{count}, %{count + 1}, "
        f'add, 1, 1, 0, 0; }}"\n#define OUTPUTS {outputs}\n'
    )
