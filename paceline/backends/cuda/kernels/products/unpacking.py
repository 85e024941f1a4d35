"""Products of packed weights (packing.py), dequantized in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.backends.cuda.kernels.products.packing import SCALE_WORDS


@triton.constexpr_function  # type: ignore[untyped-decorator]
def words_of_scales(packing: str, step: int) -> int:
    """The number of words of a row and step that hold scales; most formats have two scales in a word."""
    if packing in SCALE_WORDS:
        return SCALE_WORDS[packing]
    return 1 if packing == "fp8_blocks" else step // 64


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _unpacking(packing: str, index: int) -> str:
    """PTX that converts element `index` of two words to two bfloat16, before scaling.

    4-bit integers become the lowest mantissa bits of 128, two numbers at once; 8-bit ones those of 2 ** 23.
    """
    if packing == "int8" or packing == "q6k":
        return f"""{{
            .reg .b32 low, high; .reg .f32 first, second;
            prmt.b32 low, $1, 0x4B000000, 0x744{index};
            prmt.b32 high, $2, 0x4B000000, 0x744{index};
            mov.b32 first, low; mov.b32 second, high;
            add.rn.f32 first, first, 0fCB000080; add.rn.f32 second, second, 0fCB000080;
            cvt.rn.bf16x2.f32 $0, second, first;
        }}"""
    bit = 4 * (index % 4)
    if packing == "mxfp4":  # e2m1 as the low exponent and high mantissa bits of bfloat16, times 2 ** 126
        return f"""{{
            .reg .b32 both, sign, number, scale, zero;
            prmt.b32 both, $1, $2, {"0x5410" if index < 4 else "0x7632"};
            shl.b32 sign, both, {12 - bit};
            {"shl" if bit < 6 else "shr"}.b32 number, both, {abs(6 - bit)};
            and.b32 number, number, 0x01C001C0;
            lop3.b32 number, sign, 0x80008000, number, 0xEA;
            mov.b32 scale, 0x7E807E80; mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, number, scale, zero;
        }}"""
    if packing == "fp8" or packing == "fp8_blocks":  # e4m3 likewise, times 2 ** 120
        return f"""{{
            .reg .b32 both, number, scale, zero;
            prmt.b32 both, $1, $2, 0x{4 + index}0{index}0;
            shr.b32 number, both, 4;
            and.b32 number, number, 0x07F007F0;
            lop3.b32 number, both, 0x80008000, number, 0xEA;
            mov.b32 scale, 0x7B807B80; mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, number, scale, zero;
        }}"""
    halves, least = "0x5410" if index < 4 else "0x7632", "0xC308C308" if packing == "int4" else "0xC300C300"
    return f"""{{
        .reg .b32 both, one, least;
        prmt.b32 both, $1, $2, {halves};
        shr.b32 both, both, {bit};
        lop3.b32 both, both, 0x000F000F, 0x43004300, 0xEA;
        mov.b32 one, 0x3F803F80; mov.b32 least, {least};
        fma.rn.bf16x2 $0, both, one, least;
    }}"""


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(words, index: tl.constexpr, packing: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Element `index` of each word, before scaling.

    Assembled from bits, because conversion instructions have far less throughput than additions: an integer
    becomes the lowest mantissa bits of 2 ** 23, an e4m3 number a float32 whose exponent is 120 too low.
    """
    if dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            _unpacking(packing, index), "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif packing == "fp8" or packing == "fp8_blocks":
        code = words >> 8 * index
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        numbers = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    elif packing == "mxfp4":
        code = words >> 4 * index
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        numbers = bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0
    elif packing == "int8" or packing == "q6k":
        numbers = (((words >> 8 * index) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        least: tl.constexpr = 8.0 if packing == "int4" else 0.0
        numbers = (((words >> 4 * index) & 0xF) | 0x4B000000).to(tl.float32, bitcast=True) - (
            8388608.0 + least
        )
    return numbers.to(dtype)


@triton.jit
def _half(words):  # type: ignore[no-untyped-def]
    """The float16 in the lower half of each word: float32."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _add_scaled(  # type: ignore[no-untyped-def]
    total, numbers, rows, scales_at, column, index: tl.constexpr, columns: tl.constexpr, packing: tl.constexpr
):
    """`total` plus the scaled product of one more group; `scales_at` has the scales of its step."""
    shape: tl.constexpr = total.shape
    if packing == "q4k" or packing == "q41":
        if packing == "q41":
            both = tl.load(scales_at + index * columns + column)
            scale, least = _half(both), _half(both >> 16)
        else:
            both = tl.load(scales_at + column)
            pair = tl.load(scales_at + (1 + index // 2) * columns + column) >> 16 * (index % 2)
            scale = _half(both) * (pair & 0xFF).to(tl.float32)
            least = -(_half(both >> 16) * ((pair >> 8) & 0xFF).to(tl.float32))
        total = tl.fma(tl.dot(numbers, rows), tl.broadcast_to(scale[:, None], shape), total)
        sums = tl.dot(tl.full(numbers.shape, 1.0, numbers.dtype), rows)
        total = tl.fma(sums, tl.broadcast_to(least[:, None], shape), total)
    elif packing == "q6k":
        whole = _half(tl.load(scales_at + column))
        pair = tl.load(scales_at + (1 + index // 2) * columns + column) >> 16 * (index % 2)
        is_first = (tl.arange(0, 32) < 16)[None, :]
        for part in tl.static_range(2):
            scale = whole * (pair << (24 - 8 * part) >> 24).to(tl.float32)
            some = tl.where(is_first, numbers, 0.0) if part == 0 else tl.where(is_first, 0.0, numbers)
            total = tl.fma(
                tl.dot(some.to(numbers.dtype), rows), tl.broadcast_to(scale[:, None], shape), total
            )
    else:
        pair = tl.load(scales_at + index // 2 * columns + column) >> 16 * (index % 2)
        total = tl.fma(tl.dot(numbers, rows), tl.broadcast_to(_half(pair)[:, None], shape), total)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def packed_matmul(  # type: ignore[no-untyped-def]
    words_at,
    scales_at,
    rows_at,
    row,
    real,
    depth,
    begin,
    end,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    scale_words: tl.constexpr,
    stages: tl.constexpr,
):
    """Packed weights of a tile times rows `row` [tokens], depth `begin` to `end`: float32 [columns, tokens].

    Products of a group (in `fp8_blocks`, of a step) are summed before they are scaled.
    """
    group: tl.constexpr = 32
    column, along = tl.arange(0, columns), tl.arange(0, group)
    dtype: tl.constexpr = rows_at.dtype.element_ty
    total = tl.zeros([columns, tokens], tl.float32)
    for at in tl.range(begin, end, step, num_stages=stages):
        at = tl.multiple_of(at, 64)
        number = at // step
        words = tl.load(words_at + number * (columns * group) + column[:, None] * group + along[None, :])
        of_step = tl.zeros([columns, tokens], tl.float32)
        for index in tl.static_range(step // group):
            rows = tl.load(
                rows_at + at + index * group + row[None, :] * depth + along[:, None],
                mask=real[None, :],
                other=0.0,
            )
            numbers = _numbers(words, index, packing, dtype)
            if packing == "fp8":
                total = tl.dot(numbers, rows, total)
            elif packing == "fp8_blocks":
                of_step = tl.dot(numbers, rows, of_step)
            else:
                step_scales_at = scales_at + number * (scale_words * columns)
                total = _add_scaled(total, numbers, rows, step_scales_at, column, index, columns, packing)
        if packing == "fp8_blocks":
            scale = tl.load(scales_at + number * columns + column).to(tl.float32, bitcast=True)
            total = tl.fma(of_step, tl.broadcast_to(scale[:, None], total.shape), total)
    return total
