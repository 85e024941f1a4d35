"""Attention of prefill chunks by a CUDA C++ kernel on Hopper (source/prefill_attention.cu).

It has the tiles and bits of the Triton kernel kernels/attention/prefill_attention.py, its fallback.
"""

from __future__ import annotations

import struct

import torch

from paceline.backends.cuda.kernels.attention.paged_attention import AttentionScratch
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.scoring import Scoring
from paceline.backends.cuda.kernels.attention.softmax import BLOCK
from paceline.backends.cuda.native.nvrtc import (
    NativeKernel,
    float_bits,
    is_left_out,
    native_kernel,
    tensor_map,
)
from paceline.backends.cuda.native.weight_pipeline import LINE, argument, supports_pipeline, wgmma_source
from paceline.backends.cuda.passes.compiling import cached_kernel

SOURCES = ("instructions", "activations", "softmax", "prefill_attention")  # concatenated in this order
DIM = 128  # size of heads
MAX_GROUP = 16  # most query heads of a KV head
STAGES = 2  # blocks of keys and values in flight or in use: with more, a second program would not fit
THREADS = 160


def run_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RowTables,
    page_size: int,
    output: torch.Tensor,
    scratch: AttentionScratch,
    earliest: int,
    scoring: Scoring,
) -> bool:
    """Run attention of the rows in prefill tiles; False if the kernel does not support it."""
    tiles = tables.prefill
    if tiles is None or is_left_out("prefill_attention") or not supports_pipeline(query.device):
        return False
    heads, kv_heads, lines = query.shape[1], keys.shape[1], min(page_size, BLOCK)
    if page_size % lines or BLOCK % lines or lines % 8:
        return False  # TMA copies multiples of 8 lines, the unit of the swizzle
    if query.dtype != torch.bfloat16 or query.shape[2] != DIM or heads // kv_heads > MAX_GROUP:
        return False
    kernel = prefill_kernel(heads, kv_heads, page_size, scoring.scale(DIM), query.device)
    if kernel is None:
        return False
    tensors = query, output, tables.positions, tiles.rows, tiles.counts, tiles.pages, tables.pages
    addresses = [tensor.data_ptr() for tensor in (*tensors, scratch.partial_acc)]
    rest = struct.pack("<8Q2i", *addresses, output.stride(0), earliest)
    maps = kv_map(keys, lines), kv_map(values, lines)
    kernel.launch(argument(*maps, rest), (kv_heads, len(tiles.rows)), (1,), THREADS)
    return True


def kv_map(pool: torch.Tensor, lines: int) -> bytes:
    """The TMA descriptor of keys or values [slots, KV heads, dim]: copies of 64 columns of some lines."""
    slots, heads, dim = pool.shape
    return tensor_map(pool.data_ptr(), (dim, heads, slots), (dim, heads * dim), (LINE, 1, lines))


@cached_kernel
def prefill_kernel(
    heads: int, kv_heads: int, page_size: int, scale: float, device: torch.device
) -> NativeKernel | None:
    """The kernel for these heads and pages; None if it is not available."""
    numbers = kernel_numbers(heads, kv_heads, page_size, scale)
    products = wgmma_source(BLOCK) + wgmma_source(
        LINE, "multiply_weights", transposed=True, from_registers=True
    )
    blocks = (2 * STAGES + 1) * BLOCK * DIM * 2  # keys, values and queries
    shared = blocks + BLOCK * DIM * 4 + 4 * STAGES * 8
    return native_kernel("prefill_attention", SOURCES, numbers, products, shared, device)


def kernel_numbers(heads: int, kv_heads: int, page_size: int, scale: float) -> dict[str, int]:
    """The constants that the kernel is compiled with."""
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "PAGE": page_size}
    return sizes | {"STAGES": STAGES, "SCALE_BITS": float_bits(scale)}
