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

import torch

from paceline.backends.cuda.kernels.matrix import Matrix, Normed, Scratch
from paceline.backends.cuda.native import NativeKernel, is_left_out
from paceline.backends.cuda.streaming import (
    MOST_TILES,
    THREADS,
    TILE,
    argument,
    is_plain,
    product,
    programs_of,
    streaming_kernel,
    streams_on,
)
from paceline.backends.cuda.weights import Layer

logger = logging.getLogger(__name__)

FEW, SOME, MANY = 16, 32, 96  # rows that it is compiled for
ROWS = {FEW: (1, 16), SOME: (17, 32), MANY: (65, 96)}  # for passes from so many rows to so many
RINGS = {FEW: (24, 12), SOME: (20, 10), MANY: (14, 7)}  # cells of weights, and slots of rows
CLUSTER = (2, 1)  # programs: the splits of a tile


@dataclass(frozen=True)
class Stream:
    """What a layer reads and writes behind its attention."""

    hidden: torch.Tensor  # float32 [rows, padded hidden]
    mixed: torch.Tensor  # [rows, padded heads * head_dim] by attention
    feed_forward_input: Normed
    activated: torch.Tensor  # [rows, padded intermediate]
    output: Normed  # what the next layer reads
    features: torch.Tensor | None = None  # float32 [rows, hidden] a second place of the residual stream


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
    if padded is None or (padded == FEW and heads is None) or is_left_out("between"):
        return False
    if not streams_on(device) or not _fits(layer, heads, programs_of(device)):
        return False
    if stream.features is not None and stream.features.shape[1] != stream.hidden.shape[1]:
        return False  # what is padding would be written, too
    kernel = streaming_kernel("between", "between_attentions", padded, RINGS[padded], device)
    if kernel is None or not _all_find_a_place(kernel, programs_of(device)):
        return False
    own = _argument(layer, stream, norm, rows, padded, scratch, heads)
    kernel.launch(own, (programs_of(device), 1), CLUSTER, THREADS)
    return True


@lru_cache
def _all_find_a_place(kernel: NativeKernel, programs: int) -> bool:
    """Whether so many programs, which wait for each other, are on the device at once: else they never end."""
    most = kernel.most_clusters((programs, 1), CLUSTER, THREADS)
    if most is None or 2 * most >= programs:
        return True
    logger.warning("layers run as separate kernels: %d of %d programs find a place", 2 * most, programs)
    return False


def _fits(layer: Layer, heads: NextHeads | None, programs: int) -> bool:
    """Whether the kernel is made for a layer of this kind, with so many programs."""
    split = [layer.output, layer.down] + ([] if heads is None else [heads.matrix])
    return (
        layer.mixture is None
        and all(map(is_plain, [layer.gate_up, *split]))
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
    heads_units = 0 if heads is None else matrix.tiles
    products = (
        product(layer.output, stream.mixed, padded, layer.output.tiles, in_halves=False),
        product(layer.gate_up, read.rows, padded, layer.gate_up.tiles // 4, in_halves=True),
        product(layer.down, stream.activated, padded, layer.down.tiles, in_halves=False),
        product(matrix, written.rows, padded, heads_units, in_halves=heads is not None),
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
        stream.features,
    )
    units = 2 * layer.output.tiles + layer.gate_up.tiles // 4
    assert len(scratch.counters) > units, "programs tell by them"
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = stream.hidden.shape[1], stream.activated.shape[1], rows, *counts
    stride = 0 if stream.features is None else stream.features.stride(0)
    early = padded == FEW and rows > 1  # with one row, or many, attention is better off later
    of_rows = struct.pack("<7i2f", *sizes, stride, early, float(written.size), written.eps)
    return argument(*products, struct.pack(f"<{len(addresses)}Q", *addresses), of_rows)
