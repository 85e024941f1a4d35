"""Fused output-projection/MLP/QKV kernel: everything of a layer after its attention, and the next QKV.

Each of these products needs the complete result of the one before. Separate kernels interrupt the stream of
weights between products; in one kernel the weights of the next product are loaded while programs wait for
each other's results. It is CUDA C++ (source/fused_layer.cu), with the bits of the Triton kernels, its
fallback.

Programs wait for each other at grid barriers, so all of them must be resident at once, and only one such
kernel may run at a time. The backend uses a single stream, which guarantees that.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, Scratch
from paceline.backends.cuda.native.nvrtc import NativeKernel, is_left_out
from paceline.backends.cuda.native.weight_pipeline import (
    MAX_TILES,
    THREADS,
    TILE,
    argument,
    can_stream,
    num_multiprocessors,
    pipeline_kernel,
    product,
    supports_pipeline,
)
from paceline.backends.cuda.weights.model_weights import Layer

logger = logging.getLogger(__name__)

FEW = 16  # rows of the smallest variant
CLUSTER = (2, 1)  # two programs, each with half of the splits of a tile
GATE_UP_COLUMNS = 4 * TILE  # columns of a program's gate and up


@dataclass(frozen=True)
class Variant:
    """The row counts that a compiled kernel is for."""

    padded: int  # rows that it computes
    rows: range  # rows of the passes that use it
    ring: tuple[int, int]  # pipeline stages: cells of weights, slots of rows
    loaded: int  # rows that it loads; only these are multiplied by unpacked weights


def _variant(padded: int, first: int, ring: tuple[int, int], loaded: int | None = None) -> Variant:
    loaded = padded if loaded is None else loaded
    return Variant(padded, range(first, loaded + 1), ring, loaded)


VARIANTS = {  # by packing
    "none": (_variant(FEW, 1, (24, 12)), _variant(32, 17, (20, 10)), _variant(96, 65, (14, 7))),
    "e4m3": (_variant(FEW, 1, (24, 12)), _variant(32, 17, (20, 10)), _variant(64, 33, (16, 8))),
    "int4": (
        _variant(FEW, 1, (18, 6), loaded=8),
        _variant(FEW, 9, (18, 6)),
        _variant(32, 17, (12, 6)),
        _variant(64, 33, (9, 4)),
    ),
}


@dataclass(frozen=True)
class LayerBuffers:
    """The inputs and outputs of a layer after its attention."""

    hidden: torch.Tensor  # float32 [rows, padded hidden]
    attention_output: torch.Tensor  # [rows, padded heads * head_dim]; e4m3 if it has scales
    feed_forward_input: Normed
    activated: torch.Tensor  # [rows, padded intermediate] likewise
    output: Normed  # input of the next layer
    features: torch.Tensor | None = None  # float32 [rows, hidden] a copy of the residual stream
    attention_scales: torch.Tensor | None = None  # as of Normed
    activated_scales: torch.Tensor | None = None


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
    """Run a layer after its attention, and the next layer's QKV; False if the kernel does not support it.

    `norm` is the weight of the next norm, `heads` the QKV projection after it; without one (after the last
    layer), separate kernels are faster for few rows.
    """
    packing, device = layer.output.tiling.packing, layer.output.weight.device
    variant = next((own for own in VARIANTS.get(packing, ()) if rows in own.rows), None)
    if variant is None or (variant.padded == FEW and heads is None) or is_left_out("fused_layer"):
        return False
    if not supports_pipeline(device) or not _fits(layer, heads, num_multiprocessors(device)):
        return False
    if buffers.features is not None and buffers.features.shape[1] != buffers.hidden.shape[1]:
        return False  # the kernel writes padding columns too
    sizes = variant.padded, variant.ring
    kernel = pipeline_kernel("fused_layer", "fused_layer", *sizes, device, packing, variant.loaded)
    if kernel is None or not _all_fit_at_once(kernel, num_multiprocessors(device)):
        return False
    argument_bytes = _argument(layer, buffers, norm, rows, variant, scratch, heads)
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
    packing, gate_up = layer.output.tiling.packing, layer.gate_up
    return (
        layer.mixture is None
        and all(can_stream(matrix, packing) for matrix in (gate_up, *split))
        and all(_halves(matrix) and 2 * matrix.tiles <= programs for matrix in split)
        and all(matrix.tiling.columns == TILE for matrix in (layer.output, layer.down))
        and gate_up.tiling.columns == (2 * TILE if packing == "e4m3" else TILE)
        and layer.output.bias is None
        and layer.down.bias is None
        and layer.output.tiles == layer.down.tiles <= MAX_TILES
        and gate_up.tiling.splits == 1
        and gate_up.padded_width % GATE_UP_COLUMNS == 0
        and gate_up.padded_width // GATE_UP_COLUMNS <= programs
        and programs % 2 == 0
        and (heads is None or heads.matrix.tiling.columns == heads.query.shape[2] == 2 * TILE)
    )


def _halves(matrix: Matrix) -> bool:
    """Whether the splits divide evenly between two programs; packed weights may have more than two splits."""
    splits, steps = matrix.tiling.splits, matrix.depth // matrix.tiling.step
    if matrix.tiling.packing == "e4m3":
        return splits % 2 == 0 and steps % splits == 0  # a pipeline cell is a step
    return splits == 2 or (matrix.tiling.packing != "none" and splits % 2 == 0)


def _is_shared(matrix: Matrix) -> bool:
    """Whether each warpgroup of a program computes half of its splits: one or two, equally deep."""
    splits, steps = matrix.tiling.splits, matrix.depth // matrix.tiling.step
    return matrix.tiling.packing != "none" and splits in (4, 8) and steps % splits == 0


def _argument(
    layer: Layer,
    buffers: LayerBuffers,
    norm: torch.Tensor,
    rows: int,
    variant: Variant,
    scratch: Scratch,
    heads: NextQkv | None,
) -> bytes:
    """The `Arguments` of source/pipeline.cu."""
    read, written, loaded = buffers.feed_forward_input, buffers.output, variant.loaded
    matrix = layer.output if heads is None else heads.matrix  # any matrix, if there is no next layer
    heads_units = 0 if heads is None else matrix.tiles
    four_units = layer.gate_up.padded_width // GATE_UP_COLUMNS
    of_attention, of_activated = buffers.attention_scales, buffers.activated_scales
    (feed, feed_scales), (following, following_scales) = read.read_by(layer.gate_up), written.read_by(matrix)

    def residual_product(own: Matrix, rows: torch.Tensor, scales: torch.Tensor | None) -> bytes:
        """A product that is added to the residual stream."""
        return product(own, rows, loaded, own.tiles, False, scales, _is_shared(own))

    products = (
        residual_product(layer.output, buffers.attention_output, of_attention),
        product(layer.gate_up, feed, loaded, four_units, True, feed_scales),
        residual_product(layer.down, buffers.activated, of_activated),
        product(matrix, following, loaded, heads_units, heads is not None, following_scales),
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
        *(read.fp8, read.scales),
        *(buffers.activated, buffers.activated_scales),
        *(written.fp8, written.scales),
    )
    units = 2 * layer.output.tiles + four_units
    assert len(scratch.counters) > units, "programs tell by them"
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = buffers.hidden.shape[1], buffers.activated.shape[1], rows, *counts
    stride = 0 if buffers.features is None else buffers.features.stride(0)
    early = (
        variant.padded == FEW and rows > 1
    )  # whether attention may start early: with 1 row, or many, it is slower
    of_rows = struct.pack("<7i2f", *sizes, stride, early, float(written.size), written.eps)
    return argument(*products, struct.pack(f"<{len(addresses)}Q", *addresses), of_rows)
