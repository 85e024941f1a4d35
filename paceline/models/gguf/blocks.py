"""The block formats of GGUF files: dequantization of stored bytes to float32.

A row of a matrix is divided into blocks of 32 or 256 values; each block has its own scales. A format is one
line of FORMATS: its number in the file, its block size, its bytes per block, and a function from blocks
[n, bytes] into values [n, block size]. Every function computes in the order of the reference implementation,
so that the results are equal bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CHUNK_VALUES = 1 << 17  # values per step, so that temporaries stay in the L2 cache


@dataclass(frozen=True)
class BlockFormat:
    """One way to store a row of numbers."""

    kind: str
    number: int  # the type number in a GGUF file
    block_size: int  # values per block
    block_bytes: int
    decode: Callable[[Bytes, Floats], None]  # from uint8 [n, block_bytes] into float32 [n, block_size]


def dequantize(kind: str, blocks: Bytes) -> Floats:
    """The values of `blocks` (uint8 [rows, bytes per row]) as float32 [rows, values per row]."""
    form = FORMATS.get(kind) or INTEGERS[kind]
    rows, row_bytes = blocks.shape
    row_values = row_bytes // form.block_bytes * form.block_size
    values = np.empty((rows, row_values), dtype=np.float32)

    def decode(part: slice) -> None:
        chunk = np.ascontiguousarray(blocks[part]).reshape(-1, form.block_bytes)
        # a damaged scale may be infinite or NaN: it must show as such a value, not as a warning
        with np.errstate(all="ignore"):
            form.decode(chunk, values[part].reshape(-1, form.block_size))

    by_rows(values.shape, decode)
    return values


def by_rows(shape: tuple[int, ...], work: Callable[[slice], None], least: int = 1) -> None:
    """Call `work` for some rows after others of a matrix of this shape, with threads if there are many."""
    rows, columns = shape
    step = max(least, CHUNK_VALUES // max(1, columns))
    parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    if len(parts) < 4:
        for part in parts:
            work(part)
    else:  # numpy releases the GIL while it computes
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(work, parts))


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of every block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """Each run of `width` bytes as `width` low halves, then `width` high halves: [n, runs, 2, width]."""
    runs = packed.reshape(len(packed), -1, width)
    halves = np.empty((*runs.shape[:2], 2, width), dtype=np.uint8)
    np.bitwise_and(runs, 15, out=halves[:, :, 0])
    np.right_shift(runs, 4, out=halves[:, :, 1])
    return halves


def _signed(quants: Bytes, offset: int) -> npt.NDArray[np.int8]:
    """quants - offset, of values small enough for int8."""
    return quants.view(np.int8) - np.int8(offset)


def _decode_f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _decode_f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _decode_bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _decode_i32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<i4")


def _decode_i64(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<i8")


def _decode_q4_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(_half(blocks, 0), _signed(_nibbles(blocks[:, 2:], 16).reshape(-1, 32), 8), out=out)


def _decode_q4_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(_half(blocks, 0), _nibbles(blocks[:, 4:], 16).reshape(-1, 32), out=out)
    out += _half(blocks, 2)


def _fifth_bits(packed: Bytes) -> Bytes:
    """The 32 fifth bits of every block, moved to bit 4: [n, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _decode_q5_0(blocks: Bytes, out: Floats) -> None:
    quants = _nibbles(blocks[:, 6:], 16).reshape(-1, 32) | _fifth_bits(blocks[:, 2:6])
    np.multiply(_half(blocks, 0), _signed(quants, 16), out=out)


def _decode_q5_1(blocks: Bytes, out: Floats) -> None:
    quants = _nibbles(blocks[:, 8:], 16).reshape(-1, 32) | _fifth_bits(blocks[:, 4:8])
    np.multiply(_half(blocks, 0), quants, out=out)
    out += _half(blocks, 2)


def _decode_q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(_half(blocks, 0), blocks[:, 2:].view(np.int8), out=out)


def _two_bits(packed: Bytes) -> Bytes:
    """256 two-bit values: 32 bytes hold bits 0-1 of 32 values, then bits 2-3 of 32 more: [n, 8, 32]."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 8, 32)


def _one_bits(packed: Bytes) -> Bytes:
    """256 one-bit values: byte j holds the bits of values j, 32 + j, 64 + j, ...: [n, 8, 32]."""
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    return (packed[:, None, :] >> shifts) & np.uint8(1)


def _decode_q2_k(blocks: Bytes, out: Floats) -> None:
    scales = blocks[:, :16]  # low half: scale, high half: minimum, of 16 values each
    scale = (_half(blocks, 80) * (scales & np.uint8(15))).reshape(-1, 16, 1)
    minimum = (_half(blocks, 82) * (scales >> np.uint8(4))).reshape(-1, 16, 1)
    values = out.reshape(-1, 16, 16)
    np.multiply(scale, _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16), out=values)
    values -= minimum


def _decode_q3_k(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, 96:108]  # 16 six-bit scales: 8 bytes of low halves, 4 bytes of high bits
    low = np.concatenate([packed[:, :8] & np.uint8(15), packed[:, :8] >> np.uint8(4)], axis=1)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)
    high = ((packed[:, None, 8:] >> shifts) & np.uint8(3)).reshape(-1, 16)
    scale = (_half(blocks, 108) * _signed(low | (high << np.uint8(4)), 32)).reshape(-1, 16, 1)
    # a cleared bit of the mask subtracts 4
    quants = _signed(_two_bits(blocks[:, 32:96]) | (_one_bits(blocks[:, :32]) << np.uint8(2)), 4)
    np.multiply(scale, quants.reshape(-1, 16, 16), out=out.reshape(-1, 16, 16))


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 minimums that Q4_K and Q5_K pack into 12 bytes, each uint8 [n, 8]."""
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    four, six = np.uint8(4), np.uint8(6)
    scale = np.concatenate([first & np.uint8(63), (rest & np.uint8(15)) | ((first >> six) << four)], axis=1)
    minimum = np.concatenate([second & np.uint8(63), (rest >> four) | ((second >> six) << four)], axis=1)
    return scale, minimum


def _scale_and_shift(blocks: Bytes, quants: Bytes, out: Floats) -> None:
    """scale * quants - minimum, as Q4_K and Q5_K do for each of 8 sub-blocks; quants is [n, 8, 32]."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    values = out.reshape(-1, 8, 32)
    np.multiply((_half(blocks, 0) * scales).reshape(-1, 8, 1), quants, out=values)
    values -= (_half(blocks, 2) * minimums).reshape(-1, 8, 1)


def _decode_q4_k(blocks: Bytes, out: Floats) -> None:
    _scale_and_shift(blocks, _nibbles(blocks[:, 16:144], 32).reshape(-1, 8, 32), out)


def _decode_q5_k(blocks: Bytes, out: Floats) -> None:
    fifth = _one_bits(blocks[:, 16:48]) << np.uint8(4)
    _scale_and_shift(blocks, _nibbles(blocks[:, 48:176], 32).reshape(-1, 8, 32) | fifth, out)


def _decode_q6_k(blocks: Bytes, out: Floats) -> None:
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    quants = _signed(low | (_two_bits(blocks[:, 128:192]) << np.uint8(4)), 32)
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(np.int8)).reshape(-1, 16, 1)
    np.multiply(scale, quants.reshape(-1, 16, 16), out=out.reshape(-1, 16, 16))


def _looked_up(table: npt.NDArray[np.int8], packed: Bytes) -> npt.NDArray[np.int8]:
    """The table's entries for the nibbles of each 16 bytes, low halves first: [n, values]."""
    return table[_nibbles(packed, 16).reshape(len(packed), -1)]


def _decode_iq4_nl(blocks: Bytes, out: Floats) -> None:
    np.multiply(_half(blocks, 0), _looked_up(IQ4_VALUES, blocks[:, 2:]), out=out)


def _decode_iq4_xs(blocks: Bytes, out: Floats) -> None:
    """Scales of 6 bits: four low bits in pairs, then two high bits of all 8 in one 16-bit number."""
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    word = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = (word >> (2 * np.arange(8, dtype=np.uint16))).astype(np.uint8) & 3
    scale = _half(blocks, 0) * _signed(low | (high << np.uint8(4)), 32)
    quants = _looked_up(IQ4_VALUES, blocks[:, 8:]).reshape(-1, 8, 32)
    np.multiply(scale[:, :, None], quants, out=out.reshape(-1, 8, 32))


def _decode_mxfp4(blocks: Bytes, out: Floats) -> None:
    """The scale is half a power of two, because the table has the doubles of 4-bit floats."""
    exponent = blocks[:, :1].astype(np.int32)
    np.ldexp(_looked_up(MXFP4_DOUBLES, blocks[:, 1:]).astype(np.float32), exponent - 128, out=out)


IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
MXFP4_DOUBLES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)

FORMATS = {
    form.kind: form
    for form in (
        BlockFormat("F32", 0, 1, 4, _decode_f32),
        BlockFormat("F16", 1, 1, 2, _decode_f16),
        BlockFormat("BF16", 30, 1, 2, _decode_bf16),
        BlockFormat("Q4_0", 2, 32, 18, _decode_q4_0),
        BlockFormat("Q4_1", 3, 32, 20, _decode_q4_1),
        BlockFormat("Q5_0", 6, 32, 22, _decode_q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _decode_q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _decode_q8_0),
        BlockFormat("Q2_K", 10, 256, 84, _decode_q2_k),
        BlockFormat("Q3_K", 11, 256, 110, _decode_q3_k),
        BlockFormat("Q4_K", 12, 256, 144, _decode_q4_k),
        BlockFormat("Q5_K", 13, 256, 176, _decode_q5_k),
        BlockFormat("Q6_K", 14, 256, 210, _decode_q6_k),
        BlockFormat("IQ4_NL", 20, 32, 18, _decode_iq4_nl),
        BlockFormat("IQ4_XS", 23, 256, 136, _decode_iq4_xs),
        BlockFormat("MXFP4", 39, 32, 17, _decode_mxfp4),
    )
}
# of tables of ids, such as the vocabulary of a draft head; no weights are stored so
INTEGERS = {
    form.kind: form
    for form in (BlockFormat("I32", 26, 1, 4, _decode_i32), BlockFormat("I64", 27, 1, 8, _decode_i64))
}
FORMATS_BY_NUMBER = {form.number: form for form in (*FORMATS.values(), *INTEGERS.values())}
