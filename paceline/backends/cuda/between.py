"""Between two attentions everything in one kernel: output, gate and up, down, and the next layer's heads.

Each of these products needs all of the one before it. As kernels of their own they stop the stream of weights
every time; here it goes on while programs wait for each other's results. It is CUDA C++ (source/between.cu)
with the bits of the kernels in kernels/, which run wherever this one cannot.

Programs wait for each other, so all must be on the device at once: there may be one such kernel at a time.
The backend works on one stream, so there is.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from paceline.backends.cuda.kernels.launching import HOPPER
from paceline.backends.cuda.kernels.matrix import Matrix, Normed, Scratch
from paceline.backends.cuda.native import NativeKernel, compiler, tensor_map
from paceline.backends.cuda.weights import Layer

logger = logging.getLogger(__name__)

SWITCHED_ON = False  # until an engine with many slots has run with it: see "Not yet" in docs/cuda.md
SOURCES = ("stream", "stream_ends", "between")  # in this order they are one source
TILE, STEP = 64, 128  # columns of a tile, and of the depth, as weights must lie
DEEP = 64  # of the depth: what a cell of the ring holds, of one tile
FEW, MANY = 16, 96  # rows that it is compiled for
ROWS = {FEW: (1, 8), MANY: (65, 96)}  # for passes from so many rows to so many
RINGS = {FEW: (24, 12), MANY: (14, 7)}  # cells of weights, and slots of rows
THREADS = 384
COUNTERS = 4  # of programs that have done their part
MOST_TILES = 64  # of the residual stream: a warp adds up their squares


@dataclass(frozen=True)
class Stream:
    """What a layer reads and writes behind its attention."""

    hidden: torch.Tensor  # float32 [rows, padded hidden]
    mixed: torch.Tensor  # [rows, padded heads * head_dim] by attention
    feed_forward_input: Normed
    activated: torch.Tensor  # [rows, padded intermediate]
    output: Normed  # what the next layer reads


@dataclass(frozen=True)
class NextHeads:
    """Where the next layer's queries, keys and values go: see `project_heads`."""

    matrix: Matrix
    positions: torch.Tensor
    places: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def run_between(
    layer: Layer, stream: Stream, norm: torch.Tensor, rows: int, scratch: Scratch, heads: NextHeads | None
) -> bool:
    """Run a layer behind its attention, and begin the next; False if this kernel cannot, and nothing is done.

    `norm` is the weight of the norm that comes next, `heads` what is computed behind it, if anything is; if
    not, separate kernels are faster with few rows.
    """
    padded = next((own for own, (least, most) in ROWS.items() if least <= rows <= most), None)
    device = layer.output.weight.device
    if not SWITCHED_ON or padded is None or (padded == FEW and heads is None):
        return False
    if device.type != "cuda" or not _fits(layer, heads, device):
        return False
    kernel = _kernel_for(padded, device)
    if kernel is None:
        return False
    argument = _argument(layer, stream, norm, rows, padded, scratch, heads)
    kernel.launch(argument, (_programs(device), 1), (2, 1), THREADS)
    return True


def _fits(layer: Layer, heads: NextHeads | None, device: torch.device) -> bool:
    """Whether the kernel is made for a layer of this kind on this device."""
    if torch.cuda.get_device_capability(device)[0] != HOPPER or layer.mixture is not None:
        return False
    split = [layer.output, layer.down] + ([] if heads is None else [heads.matrix])
    programs = _programs(device)

    def plain(own: Matrix) -> bool:
        return own.tiling.packing == "none" and own.tiling.step == STEP and own.weight.dtype == torch.bfloat16

    return (
        all(map(plain, [layer.gate_up, *split]))
        and all(own.tiling.splits == 2 and 2 * own.tiles <= programs for own in split)
        and all(own.tiling.columns == TILE for own in (layer.output, layer.gate_up, layer.down))
        and layer.output.bias is None
        and layer.down.bias is None
        and layer.output.tiles == layer.down.tiles <= MOST_TILES
        and layer.gate_up.tiling.splits == 1
        and layer.gate_up.tiles % 4 == 0
        and layer.gate_up.tiles // 4 <= programs
        and programs % 2 == 0
        and (heads is None or heads.matrix.tiling.columns == heads.query.shape[2] == 2 * TILE)
    )


@lru_cache
def _programs(device: torch.device) -> int:
    """One on each multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def _kernel_for(rows: int, device: torch.device) -> NativeKernel | None:
    """The kernel for so many rows, compiled; None if it cannot be had, which the log tells."""
    if compiler() is None:
        return None
    cells, slots = RINGS[rows]
    numbers = {"ROWS": rows, "CELLS": cells, "ROW_SLOTS": slots}
    defined = "".join(f"#define {name} {number}\n" for name, number in numbers.items())
    folder = Path(__file__).with_name("source")
    source = "".join((folder / f"{name}.cu").read_text() for name in SOURCES)
    ring = cells * TILE * DEEP * 2 + slots * rows * DEEP * 2
    given, flags, factors = rows * 256, (2 * cells + 2 * slots + 2) * 8, rows * 4
    shared = -(-(ring + given + flags + factors) // 1024) * 1024
    try:
        return NativeKernel(defined + _multiply(rows) + source, "between_attentions", shared, device)
    except Exception as error:  # whatever a private function raises on another torch or driver
        logger.warning("layers run as separate kernels, since the one between attentions failed: %s", error)
        return None


def _multiply(rows: int) -> str:
    """The instruction that multiplies 64 columns by so many rows: it names each of its registers."""
    count = rows // 2
    sums, names = ", ".join(f'"+f"(d[{i}])' for i in range(count)), ", ".join(f"%{i}" for i in range(count))
    return (
        f"__device__ inline void multiply(float (&d)[{count}], unsigned long long left, "
        "unsigned long long right, int adds) {\n"
        f'    asm volatile("{{ .reg .pred adds; setp.ne.b32 adds, %{count + 2}, 0; "\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{names}}}, "\n'
        f'                 "%{count}, %{count + 1}, adds, 1, 1, 0, 0; }}"\n'
        f'                 : {sums} : "l"(left), "l"(right), "r"(adds));\n}}\n'
    )


def _argument(
    layer: Layer,
    stream: Stream,
    norm: torch.Tensor,
    rows: int,
    padded: int,
    scratch: Scratch,
    heads: NextHeads | None,
) -> bytes:
    """What source/between.cu calls Arguments."""
    read, written = stream.feed_forward_input, stream.output
    matrix = layer.output if heads is None else heads.matrix  # any, if there are none
    products = (
        _product(layer.output, stream.mixed, padded, 1),
        _product(layer.gate_up, read.rows, padded, 4),
        _product(layer.down, stream.activated, padded, 1),
        _product(matrix, written.rows, padded, 1, 0 if heads is None else matrix.tiles),
    )
    of_heads: tuple[torch.Tensor | None, ...] = (None,) * 8
    counts = 0, 0
    if heads is not None:
        own = heads.query, matrix.bias, heads.positions, heads.places, *heads.rotation
        of_heads, counts = (*own, heads.keys, heads.values), (heads.query.shape[1], heads.keys.shape[1])
    tensors = (
        stream.hidden,
        norm,
        layer.feed_forward_norm,
        read.rows,
        read.squares,
        stream.activated,
        written.rows,
        written.squares,
        *of_heads,
        scratch.counters,
    )
    assert len(scratch.counters) >= COUNTERS, "splits have one for each tile"
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = stream.hidden.shape[1], stream.activated.shape[1], rows, *counts
    whole = b"".join((*products, struct.pack(f"<{len(addresses)}Q", *addresses)))
    whole += struct.pack("<5i2f", *sizes, float(written.size), written.eps)
    return whole.ljust(-(-len(whole) // 64) * 64, b"\0")  # as large as the structure, which is aligned


def _product(matrix: Matrix, rows: torch.Tensor, padded: int, tiles: int, units: int | None = None) -> bytes:
    """A product as the kernel sees it: its operands, and how many units of `tiles` tiles it has.

    Lines of weights come in eights, each beside its counterpart: of the other half of the tile, where halves
    are gates and ups or parts of a head, else beside the next eight.
    """
    columns, steps = matrix.tiling.columns, matrix.depth // STEP
    in_halves = tiles > 1 or columns > TILE
    second, next_eight = (columns // 2, 8) if in_halves else (8, 16)
    sizes = STEP, 8, 2, columns // 16, matrix.tiles * steps
    strides = STEP, second * STEP, next_eight * STEP, columns * STEP
    weights = tensor_map(matrix.weight.data_ptr(), sizes, strides, (DEEP, 8, 2, TILE // 16, 1))
    lines = tensor_map(rows.data_ptr(), (matrix.depth, len(rows)), (matrix.depth,), (DEEP, padded))
    units = matrix.tiles // tiles if units is None else units
    return weights + lines + struct.pack("<2i56x", steps, units)
