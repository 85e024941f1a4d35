"""Attention of a pass: by a kernel of CUDA C++ where all requests have as many rows, else by one of Triton.

Chains, trees and plain rows of the decode loop are of that kind. The kernel (source/attend.cu) is for Hopper
and has the bits of the one in kernels/attention.py, which is for any rows, and runs wherever this one cannot.
A program of it has a multiprocessor for itself, and much of what it reads on its way at once.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import lru_cache

import torch
import triton

from paceline.backends.cuda.kernels import attention
from paceline.backends.cuda.kernels.attention import (
    BLOCK,
    LANES,
    MERGED,
    AttentionScratch,
    RowTables,
    score_scale,
    tile_height,
)
from paceline.backends.cuda.native import NativeKernel, float_bits, is_left_out, native_kernel, tensor_map
from paceline.backends.cuda.streaming import argument, multiplication, programs_of, streams_on

SOURCES = ("instructions", "softmax", "attend")  # in this order they are one source
HEAD_SIZES = (64, 128)
COLUMNS = 64  # of a copy
MOST_SPAN = 64  # KV indices of a tree: a block, and what it reads of the next
TOGETHER = 2  # tiles of a program, if a request has several
STAGES = 5  # windows of keys and values that a program has on their way or at hand


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
) -> None:
    """What kernels/attention.py says of it."""
    if tables.common is not None and (window is not None or is_left_out("common")):
        tables = replace(tables, common=None)
    plain = window is None and scales is None and not is_left_out("attend")
    if not plain or not _run(query, keys, values, tables, page_size, output, scratch, earliest):
        attention.attend(
            query, keys, values, tables, window, page_size, output, scratch, earliest=earliest, scales=scales
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
) -> bool:
    """Run the kernel of CUDA C++; False if it cannot be had, or is not made for this."""
    rows, heads, dim = len(tables.positions), query.shape[1], query.shape[2]
    even, kv_heads, device = tables.even, keys.shape[1], query.device
    if even is None or not streams_on(device) or query.dtype != torch.bfloat16 or dim not in HEAD_SIZES:
        return False
    lines = min(page_size, BLOCK)
    if page_size % lines or BLOCK % lines or lines % 8:
        return False  # copies are of whole eights, as the matrix unit wants them
    crooks, tiles = tables.paths is not None, len(tables.tile_counts)
    if (crooks and even.span > MOST_SPAN) or triton.next_power_of_2(heads // kv_heads) > LANES:
        return False
    together, requests = min(even.tiles, TOGETHER), tiles // even.tiles
    groups = requests * -(-even.tiles // together)
    takers = programs_of(device) // (groups * kv_heads)
    if attention.PROGRAMS // (tiles * kv_heads) >= MERGED or (takers == 0 and together == 1):
        return False  # Triton's are several on a multiprocessor, and those of few tiles share single blocks
    stretches = -(-scratch.blocks // MERGED)
    kernel = _kernel((heads, kv_heads, dim, page_size), together, crooks, device)
    if kernel is None:
        return False
    tensors = (
        query,
        output,
        tables.positions,
        tables.straight,
        tables.paths,
        tables.tile_counts,
        tables.tile_pages,
        tables.pages,
        None if tables.common is None else tables.common.skipped,
        scratch.mixed,
        scratch.totals,
        scratch.counters,
    )
    if tables.common is not None:
        attention.leave_common(query, keys, values, tables, page_size, scratch, stretches, earliest)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = rows // requests, even.tiles, stretches, output.stride(0)
    of_rows = struct.pack(f"<{len(addresses)}Q6i", *addresses, *sizes, earliest, even.settled)
    maps = _map(keys, lines), _map(values, lines)
    grid = (groups, kv_heads, max(1, min(takers, stretches)))
    kernel.launch(argument(*maps, of_rows), grid, (1,), _threads(dim))
    return True


def _map(pool: torch.Tensor, lines: int) -> bytes:
    """What the copy engine must know of keys or values [places, key heads, dim]."""
    places, heads, dim = pool.shape
    return tensor_map(pool.data_ptr(), (dim, heads, places), (dim, heads * dim), (COLUMNS, 1, lines))


def _threads(dim: int) -> int:
    """Of warps that score, that weigh, and that mix 64 columns each."""
    return 128 + 256 + 2 * dim


@lru_cache
def _kernel(
    sizes: tuple[int, int, int, int], together: int, crooks: bool, device: torch.device
) -> NativeKernel | None:
    """The kernel for these heads, key heads, head size and page size; None if it cannot be had."""
    numbers, lanes = kernel_numbers(sizes, together, crooks), LANES * together
    products = multiplication(lanes) + multiplication(lanes, "multiply_turned", turned=True)
    return native_kernel("attend", SOURCES, numbers, products, numbers["SHARED_BYTES"], device)


def kernel_numbers(sizes: tuple[int, int, int, int], together: int, crooks: bool) -> dict[str, int]:
    """What the kernel is compiled for."""
    heads, kv_heads, dim, page_size = sizes
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAGE": page_size,
        "HEIGHT": tile_height(heads, kv_heads),
        "TOGETHER": together,
        "STAGES": STAGES,
        "CROOKS": int(crooks),
        "SCALE_BITS": float_bits(score_scale(dim)),
        "SHARED_BYTES": _shared_bytes(dim, LANES * together, crooks),
    }


def _shared_bytes(dim: int, lanes: int, crooks: bool) -> int:
    """What source/attend.cu calls Shared."""
    read = (2 * STAGES * BLOCK + lanes) * dim * 2
    scores = 2 * lanes * ((2 * BLOCK if crooks else BLOCK) + 4) * 4
    weights, totals = 2 * lanes * BLOCK * 2, 2 * lanes * 8 + lanes * 4
    flags, picked = 2 * STAGES * 8, 2 * lanes * BLOCK  # a tile has at most a row for each lane
    return -(-(read + scores + weights + totals + flags + picked + 1) // 16) * 16
