"""Attention of a pass: a CUDA C++ kernel for uniform batches on Hopper, else the Triton kernel.

A batch is uniform if every request has the same number of rows, as in the decode loop (without drafts, with
chains, with trees). The kernel (source/decode_attention.cu) has the bits of paged_attention.py, which
supports any rows and is the fallback. It is persistent: one program per multiprocessor, with several KV
blocks in flight, computes one work unit (tiles of a request, a KV head) after the other.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import torch
import triton

from paceline.backends.cuda.kernels.attention import paged_attention as attention
from paceline.backends.cuda.kernels.attention.paged_attention import (
    BLOCK,
    LANES,
    MERGE_FAN_IN,
    AttentionScratch,
    tile_height,
)
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.scoring import LLAMA_SCORING, Scoring
from paceline.backends.cuda.kernels.attention.shared_prefix import attend_shared_prefix
from paceline.backends.cuda.native.nvrtc import NativeKernel, float_bits, is_left_out, native_kernel
from paceline.backends.cuda.native.prefill_attention import kv_map, run_prefill
from paceline.backends.cuda.native.weight_pipeline import (
    argument,
    num_multiprocessors,
    supports_pipeline,
    wgmma_source,
)
from paceline.backends.cuda.passes.compiling import cached_kernel

SOURCES = (  # concatenated in this order
    "instructions",
    "softmax",
    "decode_attention_loads",
    "decode_attention",
)
HEAD_SIZES = (64, 128)
MAX_SPAN = 64  # most nodes of a tree, so that it spans at most two blocks
TILES_PER_UNIT = 2  # most tiles of a work unit
# pipeline stages of keys, in the order of preference: as many as shared memory has room for
KEY_STAGES = (5, 4)
MORE_VALUES = 2  # additional stages of values, which are used two phases after keys
SHARED_MEMORY = 227 << 10  # bytes of a program, at most


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RowTables,
    window: int | None,
    page_size: int,
    output: torch.Tensor,
    scratch: AttentionScratch,
    earliest: int = 0,
    scales: torch.Tensor | None = None,
    scoring: Scoring = LLAMA_SCORING,
    merges: bool = True,
) -> None:
    """Attention of all rows: the contract of kernels/attention/paged_attention.py's `attend`."""
    if tables.visible is not None:
        assert window is None, "windows end at a row's own position"
        tables = replace(tables, positions=tables.visible)
    no_sharing = window is not None or not scoring.shares_prefixes or is_left_out("shared_prefix")
    if tables.shared_prefix is not None and no_sharing:
        tables = replace(tables, shared_prefix=None)
    plain = window is None and scales is None and scoring.is_native
    if plain and run_prefill(query, keys, values, tables, page_size, output, scratch, earliest, scoring):
        tables = replace(tables, prefill=None)
    plain &= not is_left_out("decode_attention")
    if not plain or not _run(query, keys, values, tables, page_size, output, scratch, earliest, scoring):
        attention.attend(
            query, keys, values, tables, window, page_size, output, scratch, earliest, scales, scoring, merges
        )


def _run(
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
    """Run the CUDA C++ kernel; False if it is not available or does not support this pass."""
    rows, heads, dim = len(tables.positions), query.shape[1], query.shape[2]
    uniform, kv_heads, device = tables.uniform, keys.shape[1], query.device
    if (
        uniform is None
        or not supports_pipeline(device)
        or query.dtype != torch.bfloat16
        or dim not in HEAD_SIZES
    ):
        return False
    lines = min(page_size, BLOCK)
    if page_size % lines or BLOCK % lines or lines % 8:
        return False  # TMA copies multiples of 8 lines, the unit of the swizzle
    has_trees, tiles = tables.paths is not None, len(tables.tile_counts)
    if (has_trees and uniform.span > MAX_SPAN) or triton.next_power_of_2(heads // kv_heads) > LANES:
        return False
    tiles_each, requests = min(uniform.tiles, TILES_PER_UNIT), tiles // uniform.tiles
    groups = requests * -(-uniform.tiles // tiles_each)
    kv_chunks, multiprocessors = -(-scratch.blocks // MERGE_FAN_IN), num_multiprocessors(device)
    is_crowd = groups * kv_heads > multiprocessors and tiles_each == 1
    if attention.PROGRAMS // (tiles * kv_heads) >= MERGE_FAN_IN or is_crowd:
        return False  # Triton is faster: it splits into blocks, with several programs per multiprocessor
    kv_splits = num_kv_splits(groups * kv_heads, kv_chunks, multiprocessors)
    kernel = _kernel((heads, kv_heads, dim, page_size), tiles_each, has_trees, scoring.scale(dim), device)
    if kernel is None:
        return False
    tensors = (
        query,
        output,
        tables.positions,
        tables.contiguous_until,
        tables.paths,
        tables.tile_counts,
        tables.tile_pages,
        tables.pages,
        None if tables.shared_prefix is None else tables.shared_prefix.shared_chunks,
        scratch.partial_acc,
        scratch.partial_stats,
        scratch.counters,
    )
    if tables.shared_prefix is not None:
        to = scratch.partial_acc, scratch.partial_stats, kv_chunks
        paged_prefix = tables.shared_prefix, tables.pages, page_size
        attend_shared_prefix(query, keys, values, *paged_prefix, to, scoring, earliest)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = rows // requests, uniform.tiles, groups, kv_splits, kv_chunks, output.stride(0)
    of_rows = struct.pack(f"<{len(addresses)}Q8i", *addresses, *sizes, earliest, uniform.settled)
    maps = kv_map(keys, lines), kv_map(values, lines)
    programs = min(groups * kv_heads * kv_splits, multiprocessors)
    kernel.launch(argument(*maps, of_rows), (programs, 1), (1,), threads(dim))
    return True


def num_kv_splits(units: int, kv_chunks: int, multiprocessors: int) -> int:
    """The number of KV splits of a work unit.

    More than one if multiprocessors would be idle, or if many would wait for the last units.
    """
    several = [splits for splits in (2, 4) if splits <= kv_chunks]
    if units <= multiprocessors:
        return max(1, min(multiprocessors // units, kv_chunks))
    return min([1, *several], key=lambda splits: -(-units * splits // multiprocessors) / splits + splits / 10)


def threads(dim: int) -> int:
    """The threads of a program: warps for scores, softmax, each 64 columns of values, and loads."""
    return 128 + 256 + 2 * dim + 128


@cached_kernel
def _kernel(
    sizes: tuple[int, int, int, int], tiles_each: int, has_trees: bool, scale: float, device: torch.device
) -> NativeKernel | None:
    """The kernel for these heads, KV heads, head size and page size; None if it is not available."""
    numbers, lanes = kernel_numbers(sizes, tiles_each, has_trees, scale), LANES * tiles_each
    products = wgmma_source(lanes) + wgmma_source(lanes, "multiply_transposed", transposed=True)
    return native_kernel("decode_attention", SOURCES, numbers, products, numbers["SHARED_BYTES"], device)


def kernel_numbers(
    sizes: tuple[int, int, int, int], tiles_each: int, has_trees: bool, scale: float
) -> dict[str, int]:
    """The constants that the kernel is compiled with."""
    heads, kv_heads, dim, page_size = sizes
    room = {stages: _shared_bytes(dim, LANES * tiles_each, has_trees, stages) for stages in KEY_STAGES}
    stages = next(stages for stages in KEY_STAGES if room[stages] <= SHARED_MEMORY)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAGE": page_size,
        "HEIGHT": tile_height(heads, kv_heads),
        "TILES_PER_UNIT": tiles_each,
        "KEY_STAGES": stages,
        "VALUE_STAGES": stages + MORE_VALUES,
        "HAS_TREES": int(has_trees),
        "SCALE_BITS": float_bits(scale),
        "SHARED_BYTES": room[stages],
    }


def _shared_bytes(dim: int, lanes: int, has_trees: bool, key_stages: int) -> int:
    """The size of `Shared` in source/decode_attention_loads.cu."""
    windows = 2 * key_stages + MORE_VALUES
    read = (windows * BLOCK + lanes) * dim * 2
    scores = 2 * lanes * ((2 * BLOCK if has_trees else BLOCK) + 4) * 4
    weights, totals = 2 * lanes * BLOCK * 2, 2 * lanes * (8 + 16) + lanes * 4
    flags, picked = 2 * windows * 8, 2 * lanes * BLOCK  # at most one row per lane
    return -(-(read + scores + weights + totals + flags + picked + 1) // 16) * 16
