"""Fused output-projection/MLP/QKV kernel: all of a layer after its attention, and the next layer's QKV.

Each of these products needs the whole result of the one before. As separate kernels they interrupt the
stream of weights every time; in one kernel the weights of the next product are loaded while programs wait
for each other's results. It is CUDA C++ (source/fused_layer.cu) with the bits of the Triton kernels, which
run wherever this one cannot.

Programs wait for each other, so all of them must be resident at once, and only one such kernel may run at a
time. The backend uses a single stream, which guarantees that.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.backends.cuda.kernels.matrix import Matrix, Normed, Scratch
from paceline.backends.cuda.native import NativeKernel, is_left_out
from paceline.backends.cuda.weight_pipeline import (
    MAX_TILES,
    THREADS,
    TILE,
    argument,
    is_plain,
    num_multiprocessors,
    pipeline_kernel,
    product,
    supports_pipeline,
)
from paceline.backends.cuda.weights import Layer

logger = logging.getLogger(__name__)

FEW, SOME, MANY = 16, 32, 96  # rows (padded) that it is compiled for
ROWS = {FEW: (1, 16), SOME: (17, 32), MANY: (65, 96)}  # rows of the passes that each is for
RINGS = {FEW: (24, 12), SOME: (20, 10), MANY: (14, 7)}  # pipeline stages: cells of weights, slots of rows
CLUSTER = (2, 1)  # one program per split of a tile


@dataclass(frozen=True)
class LayerBuffers:
    """What a layer reads and writes after its attention."""

    hidden: torch.Tensor  # float32 [rows, padded hidden]
    attention_output: torch.Tensor  # [rows, padded heads * head_dim]
    feed_forward_input: Normed
    activated: torch.Tensor  # [rows, padded intermediate]
    output: Normed  # what the next layer reads
    features: torch.Tensor | None = None  # float32 [rows, hidden] a copy of the residual stream


@dataclass(frozen=True)
class NextQkv:
    """Where the next layer's queries, keys and values go: see `project_heads`."""

    matrix: Matrix
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def run_fused_layer(
    layer: Layer,
    buffers: LayerBuffers,
    norm: torch.Tensor,
    rows: int,
    scratch: Scratch,
    heads: NextQkv | None,
) -> bool:
    """Run a layer after its attention, and the next layer's QKV; False, with nothing done, if it cannot.

    `norm` is the weight of the next norm, `heads` the QKV product after it, if any. Without it, separate
    kernels are faster for few rows.
    """
    padded = next((size for size, (least, most) in ROWS.items() if least <= rows <= most), None)
    device = layer.output.weight.device
    if padded is None or (padded == FEW and heads is None) or is_left_out("fused_layer"):
        return False
    if not supports_pipeline(device) or not _fits(layer, heads, num_multiprocessors(device)):
        return False
    if buffers.features is not None and buffers.features.shape[1] != buffers.hidden.shape[1]:
        return False  # the kernel writes padding columns too
    kernel = pipeline_kernel("fused_layer", "fused_layer", padded, RINGS[padded], device)
    if kernel is None or not _all_fit_at_once(kernel, num_multiprocessors(device)):
        return False
    argument_bytes = _argument(layer, buffers, norm, rows, padded, scratch, heads)
    kernel.launch(argument_bytes, (num_multiprocessors(device), 1), CLUSTER, THREADS)
    return True


@lru_cache
def _all_fit_at_once(kernel: NativeKernel, programs: int) -> bool:
    """Whether all programs are resident at once: they wait for each other, so otherwise they deadlock."""
    most = kernel.most_clusters((programs, 1), CLUSTER, THREADS)
    if most is None or 2 * most >= programs:
        return True
    logger.warning("layers run as separate kernels: %d of %d programs find a place", 2 * most, programs)
    return False


def _fits(layer: Layer, heads: NextQkv | None, programs: int) -> bool:
    """Whether the kernel supports a layer of this kind with this many programs."""
    split = [layer.output, layer.down] + ([] if heads is None else [heads.matrix])
    return (
        layer.mixture is None
        and all(map(is_plain, [layer.gate_up, *split]))
        and all(matrix.tiling.splits == 2 and 2 * matrix.tiles <= programs for matrix in split)
        and all(matrix.tiling.columns == TILE for matrix in (layer.output, layer.gate_up, layer.down))
        and layer.output.bias is None
        and layer.down.bias is None
        and layer.output.tiles == layer.down.tiles <= MAX_TILES
        and layer.gate_up.tiling.splits == 1
        and layer.gate_up.tiles % 4 == 0
        and layer.gate_up.tiles // 4 <= programs
        and programs % 2 == 0
        and (heads is None or heads.matrix.tiling.columns == heads.query.shape[2] == 2 * TILE)
    )


def _argument(
    layer: Layer,
    buffers: LayerBuffers,
    norm: torch.Tensor,
    rows: int,
    padded: int,
    scratch: Scratch,
    heads: NextQkv | None,
) -> bytes:
    """The `Arguments` of source/pipeline.cu."""
    read, written = buffers.feed_forward_input, buffers.output
    matrix = layer.output if heads is None else heads.matrix  # any matrix, if there is no next layer
    heads_units = 0 if heads is None else matrix.tiles
    products = (
        product(layer.output, buffers.attention_output, padded, layer.output.tiles, in_halves=False),
        product(layer.gate_up, read.rows, padded, layer.gate_up.tiles // 4, in_halves=True),
        product(layer.down, buffers.activated, padded, layer.down.tiles, in_halves=False),
        product(matrix, written.rows, padded, heads_units, in_halves=heads is not None),
    )
    of_heads: tuple[torch.Tensor | None, ...] = (None,) * 8
    counts = 0, 0
    if heads is not None:
        inputs = heads.query, matrix.bias, heads.positions, heads.slot_mapping, *heads.rotation
        of_heads, counts = (*inputs, heads.keys, heads.values), (heads.query.shape[1], heads.keys.shape[1])
    tensors = (
        buffers.hidden,
        norm,
        layer.feed_forward_norm,
        read.rows,
        read.squares,
        buffers.activated,
        written.rows,
        written.squares,
        *of_heads,
        scratch.counters,
        buffers.features,
    )
    units = 2 * layer.output.tiles + layer.gate_up.tiles // 4
    assert len(scratch.counters) > units, "programs tell by them"
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = buffers.hidden.shape[1], buffers.activated.shape[1], rows, *counts
    stride = 0 if buffers.features is None else buffers.features.stride(0)
    early = padded == FEW and rows > 1  # whether attention may start early: with 1 row, or many, it is slower
    of_rows = struct.pack("<7i2f", *sizes, stride, early, float(written.size), written.eps)
    return argument(*products, struct.pack(f"<{len(addresses)}Q", *addresses), of_rows)
