"""Packs a checkpoint's tensors into the tile layout of weight_tile.py, quantizing them if needed.

GGUF blocks of 4, 6 and 8 bits are only reordered, never quantized again. Everything else is quantized to int8
in groups of 32, or stored as float32. Draft heads can be quantized to int4: their tokens are verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.tiles.weight_tile import (
    COLUMNS,
    FLOAT32,
    GROUP,
    INT4,
    INT4K,
    INT6K,
    INT8,
    tile_bytes,
)
from paceline.backends.cpu.weights.pack_kernels import DECODERS, round_to_int8
from paceline.models.checkpoint import Tensor
from paceline.models.files.mapped import release_pages
from paceline.models.gguf.blocks import FORMATS

Bytes = npt.NDArray[np.uint8]
_LINE = 64  # bytes of a cache line
_PART_VALUES = 1 << 24  # values of a task: several threads share a large matrix
_SLAB_VALUES = 1 << 18  # values packed at a time: their floats stay in the L2 cache


def address_of(array: npt.NDArray[np.generic]) -> int:
    """The address of an array's data."""
    return int(array.__array_interface__["data"][0])


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Zeros aligned to a cache line: a vector load that crosses two lines takes twice as long."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _LINE, dtype=np.uint8)
    start = -address_of(memory) % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, depth] as tiles of 16 rows, zero-padded to multiples of 32 in both dimensions."""

    data: Bytes  # [tiles, bytes of a tile]
    weight_format: int
    rows: int
    depth: int

    @property
    def groups(self) -> int:
        return -(-self.depth // GROUP)

    @property
    def padded_depth(self) -> int:
        return self.groups * GROUP

    def descriptor(self) -> list[int]:
        """Its descriptor for the compiled pass: address, format, groups, tiles, bytes of a tile."""
        return [address_of(self.data), self.weight_format, self.groups, *self.data.shape]


def choose_format(kind: str, quantization: str) -> int:
    """The weight format for a tensor of this kind."""
    if quantization == "none":
        return FLOAT32
    if quantization == "int4":
        return INT4
    if quantization == "native":
        return {"Q4_0": INT4, "Q4_1": INT4, "Q4_K": INT4K, "Q6_K": INT6K}.get(kind, INT8)
    return INT8


def pack(tensor: Tensor, quantization: str) -> PackedMatrix:
    """A tensor [rows, depth] packed for the tiles."""
    weight_format = choose_format(tensor.kind, quantization)
    data = np.empty(packed_shape(tensor, quantization), dtype=np.uint8)
    matrix = PackedMatrix(data, weight_format, *tensor.shape)
    pack_rows(tensor, matrix, 0, tensor.shape[0])
    return matrix


def pack_matrices(tensors: Mapping[str, Tensor], quantization: str, threads: int) -> dict[str, PackedMatrix]:
    """The tensors, packed by several threads into one allocation."""
    shapes = [packed_shape(tensor, quantization) for tensor in tensors.values()]
    sizes = [tiles * size for tiles, size in shapes]
    memory = aligned_zeros((sum(sizes),))
    pieces = np.split(memory, np.cumsum(sizes)[:-1])
    matrices = {
        name: PackedMatrix(piece.reshape(shape), choose_format(tensor.kind, quantization), *tensor.shape)
        for (name, tensor), piece, shape in zip(tensors.items(), pieces, shapes, strict=True)
    }
    parts = [
        (tensor, matrices[name], start, min(start + rows, tensor.shape[0]))
        for name, tensor in tensors.items()
        for rows in [max(1, _PART_VALUES // tensor.shape[1] // GROUP) * GROUP]
        for start in range(0, tensor.shape[0], rows)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: pack_rows(*part), parts))
    return matrices


def packed_shape(tensor: Tensor, quantization: str) -> tuple[int, int]:
    """The number of tiles of a packed tensor, and the bytes of a tile."""
    rows, depth = (-(-size // GROUP) * GROUP for size in tensor.shape)
    return rows // COLUMNS, tile_bytes(choose_format(tensor.kind, quantization), depth)


def pack_rows(tensor: Tensor, matrix: PackedMatrix, start: int, stop: int) -> None:
    """Fill in the tiles of rows `start` to `stop`, whole groups of 32 or up to the end of the tensor.

    Several threads can pack parts of one matrix: the work runs without the GIL.
    """
    part_of_tensor, kind = tensor.take_rows(slice(start, stop)), tensor.kind
    if matrix.weight_format == FLOAT32:  # a block format may not represent the values exactly
        blocks, kind = part_of_tensor.float32().view(np.uint8), "F32"
    else:
        blocks = part_of_tensor.blocks()
    step = max(1, _SLAB_VALUES // matrix.padded_depth // GROUP) * GROUP
    pack_slab = _FROM_BLOCKS.get((kind, matrix.weight_format))
    scratch = np.zeros((0 if pack_slab else step, matrix.padded_depth), dtype=np.float32)
    for first in range(start, stop, step):
        part = blocks[first - start : min(first + step, stop) - start]
        count = -(-len(part) // GROUP) * GROUP  # outputs become the groups of the next layer's input
        tiles = matrix.data[first // COLUMNS : (first + count) // COLUMNS]
        if pack_slab is not None:
            padding = np.zeros((count - len(part), part.shape[1]), dtype=np.uint8)
            tiles[:] = pack_slab(np.concatenate([part, padding]) if len(padding) else part)
        else:
            _decode(kind, part, scratch[: len(part), : matrix.depth])
            scratch[len(part) : count] = 0
            _FROM_FLOATS[matrix.weight_format](scratch[:count], tiles)
    release_pages(blocks)


def _decode(kind: str, blocks: Bytes, out: npt.NDArray[np.float32]) -> None:
    """Write the values of blocks [rows, bytes per row] into floats [rows, values per row]."""
    form = FORMATS[kind]
    whole = np.ascontiguousarray(blocks)
    into = out if out.flags.c_contiguous else np.empty(out.shape, dtype=np.float32)
    count = into.size // form.block_size
    if kind in DECODERS:
        DECODERS[kind](address_of(whole), count, address_of(into))
    else:
        with np.errstate(all="ignore"):  # a damaged scale must result in a bad value, not in a warning
            form.decode(whole.reshape(count, -1), into.reshape(count, -1))
    if into is not out:  # rows are padded to whole groups
        out[:] = into


def _interleave(values: Bytes, steps: int) -> Bytes:
    """[rows, groups, 4 * steps] bytes as [tiles, groups, steps * 16 * 4]: 4 k of all 16 columns together."""
    rows, groups, _ = values.shape
    words = np.ascontiguousarray(values).view(np.uint32).reshape(rows // COLUMNS, COLUMNS, groups, steps)
    moved = np.ascontiguousarray(words.transpose(0, 2, 3, 1))
    return moved.view(np.uint8).reshape(rows // COLUMNS, groups, steps * COLUMNS * 4)


def _columns(values: npt.NDArray[Any]) -> Bytes:
    """[rows, groups] numbers as [tiles, groups, bytes of 16 columns]."""
    rows, groups = values.shape
    moved = np.ascontiguousarray(values.reshape(rows // COLUMNS, COLUMNS, groups).transpose(0, 2, 1))
    return moved.view(np.uint8).reshape(rows // COLUMNS, groups, COLUMNS * values.itemsize)


def _stream(*parts: Bytes) -> Bytes:
    """The parts of each group, concatenated: [tiles, bytes of a tile]."""
    joined = np.concatenate(parts, axis=2)
    return joined.reshape(joined.shape[0], -1)


def _halves(blocks: Bytes, start: int) -> npt.NDArray[np.float16]:
    """The half float at a byte of each block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[:, :, start : start + 2]).view(np.float16)[:, :, 0]


def _signed_bytes(values: npt.NDArray[np.int8]) -> Bytes:
    unsigned = values.view(np.uint8)
    return unsigned ^ np.uint8(0x80) if ISA.offset_weights else unsigned


def _reduced(function: np.ufunc, groups: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The maximum or minimum of each group: [rows, groups]. Halving is 3 times as fast as numpy's axis."""
    while (half := groups.shape[2] // 2) > 0:
        groups = function(groups[:, :, :half], groups[:, :, half:])
    return groups[:, :, 0]


def _pack_q4_1(rows: Bytes) -> Bytes:
    blocks = rows.reshape(len(rows), -1, 20)
    return _stream(
        _interleave(blocks[:, :, 4:], 4), _columns(_halves(blocks, 0)), _columns(_halves(blocks, 2))
    )


def _pack_q4_0(rows: Bytes) -> Bytes:
    """w = d (q - 8) is w = d q + m with m = -8 d, exact in half precision."""
    blocks = rows.reshape(len(rows), -1, 18)
    scale = _halves(blocks, 0)
    return _stream(_interleave(blocks[:, :, 2:], 4), _columns(scale), _columns(scale * np.float16(-8)))


def _pack_q4_k(rows: Bytes) -> Bytes:
    blocks = rows.reshape(len(rows), -1, 144)
    count, superblocks = blocks.shape[:2]
    # 6-bit scales and minimums of the 8 groups
    packed = blocks[:, :, 4:16]
    low, high = packed[:, :, 0:4], packed[:, :, 4:8]
    scales = np.concatenate([low & 63, (packed[:, :, 8:12] & 15) | (low >> 6 << 4)], axis=2)
    minimums = np.concatenate([high & 63, (packed[:, :, 8:12] >> 4) | (high >> 6 << 4)], axis=2)
    # 64 values share 32 bytes: low nibbles the first group, high nibbles the second
    halves = blocks[:, :, 16:].reshape(count, superblocks, 4, 2, 16)
    first = (halves[:, :, :, 0] & 15) | (halves[:, :, :, 1] << 4)
    second = (halves[:, :, :, 0] >> 4) | (halves[:, :, :, 1] & 0xF0)
    nibbles = np.stack([first, second], axis=3).reshape(count, superblocks * 8, 16)
    tiles = count // COLUMNS

    def by_group(values: Bytes) -> Bytes:
        return _columns(values.reshape(count, superblocks * 8)).reshape(tiles, superblocks, 8 * COLUMNS)

    return _stream(
        _interleave(nibbles, 4).reshape(tiles, superblocks, 128 * COLUMNS),
        _columns(_halves(blocks, 0)),
        _columns(_halves(blocks, 2)),
        by_group(scales),
        by_group(minimums),
    )


def _pack_q6_k(rows: Bytes) -> Bytes:
    blocks = rows.reshape(len(rows), -1, 210)
    count, superblocks = blocks.shape[:2]
    tiles, groups = count // COLUMNS, superblocks * 8
    # for each 128 values: 64 bytes of nibbles, then 32 bytes with two bits of each of 4 groups
    low = blocks[:, :, :128].reshape(count, superblocks, 2, 1, 64) >> np.array([[0], [4]], dtype=np.uint8)
    shifts = np.array([[0], [2], [4], [6]], dtype=np.uint8)
    high = blocks[:, :, 128:192].reshape(count, superblocks, 2, 1, 32) >> shifts & np.uint8(3)
    quants = low.reshape(count, groups, 32) & np.uint8(15) | high.reshape(count, groups, 32) << np.uint8(4)
    weights = _interleave(pack_six_bits(quants, ISA.signed_six), 6)
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.uint16).reshape(count, groups)
    return _stream(
        weights.reshape(tiles, superblocks, 192 * COLUMNS),
        _columns(_halves(blocks, 208)),
        _columns(scales).reshape(tiles, superblocks, 16 * COLUMNS),
    )


def pack_six_bits(quants: Bytes, signed: bool) -> Bytes:
    """[..., 32] numbers of 6 bits as [..., 24] bytes: see the format int6k in weight_tile.py."""
    steps = quants.reshape(*quants.shape[:-1], 2, 4, 4)
    if signed:
        steps = steps ^ np.uint8(32)
    shifts = np.array([[0], [2], [4]], dtype=np.uint8)
    packed = steps[..., :3, :] | (steps[..., 3:, :] >> shifts) << np.uint8(6)
    if signed:
        packed = packed << np.uint8(2) | packed >> np.uint8(6)
    return packed.reshape(*quants.shape[:-1], 24)


def _pack_q8_0(rows: Bytes) -> Bytes:
    blocks = rows.reshape(len(rows), -1, 34)
    values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    return _stream(_interleave(_signed_bytes(values), 8), _columns(_halves(blocks, 0)))


def _pack_int8_rounded(rows: npt.NDArray[np.float32], tiles: Bytes) -> None:
    round_to_int8(address_of(rows), len(rows), rows.shape[1] // GROUP, address_of(tiles))


def _pack_int4_rounded(rows: npt.NDArray[np.float32], tiles: Bytes) -> None:
    """w = d q + m: 15 steps from the smallest to the largest of 32, as in Q4_1."""
    groups = rows.reshape(len(rows), -1, GROUP)
    smallest = _reduced(np.minimum, groups).astype(np.float16)
    scale = ((_reduced(np.maximum, groups) - smallest) / np.float32(15)).astype(np.float16)
    inverse = np.divide(
        1, scale, out=np.zeros(scale.shape, dtype=np.float32), where=scale != 0, dtype=np.float32
    )
    above = groups - smallest[:, :, None].astype(np.float32)
    with np.errstate(invalid="ignore"):  # a NaN weight makes its group's scale NaN
        values = np.clip(np.rint(above * inverse[:, :, None]), 0, 15).astype(np.uint8)
    nibbles = values[:, :, : GROUP // 2] | values[:, :, GROUP // 2 :] << np.uint8(4)
    tiles[:] = _stream(_interleave(nibbles, 4), _columns(scale), _columns(smallest))


def _pack_float32(rows: npt.NDArray[np.float32], tiles: Bytes) -> None:
    count, depth = rows.shape
    into = tiles.view(np.float32).reshape(count // COLUMNS, depth, COLUMNS)
    into[:] = rows.reshape(count // COLUMNS, COLUMNS, depth).transpose(0, 2, 1)


_FROM_BLOCKS = {
    ("Q4_0", INT4): _pack_q4_0,
    ("Q4_1", INT4): _pack_q4_1,
    ("Q4_K", INT4K): _pack_q4_k,
    ("Q6_K", INT6K): _pack_q6_k,
    ("Q8_0", INT8): _pack_q8_0,
}
_FROM_FLOATS = {INT8: _pack_int8_rounded, INT4: _pack_int4_rounded, FLOAT32: _pack_float32}
