"""Weights quantized to 8 and 4 bits: formats and memory layout.

    int8    integers -127 to 127, a float16 scale for every 32 of a row: the numbers of GGUF's Q8_0
    int4    integers -8 to 7, likewise: those of Q4_0
    mxfp4   e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), likewise, with powers of two as scales
    fp8     e4m3, a float32 scale for each row
    fp8_blocks  e4m3, a float32 scale for every 128 of a row: those of files with a scale per block
    e4m3    as fp8, multiplied without unpacking by rows that are in e4m3 too: see fp8.py
    q41     GGUF's Q4_1: integers 0 to 15, a float16 scale and minimum for every 32; AWQ's numbers, too
    q4k     GGUF's Q4_K: likewise, with scales and minimums that have scales of their own
    q6k     GGUF's Q6_K in 8 bits: integers -32 to 31, a scale for every 16

The last three are never quantized here: they are a file's own blocks.

A word holds the same element of several groups of 32, so that shifting a block of words by `bits` gives the
next group, ready to be multiplied: with 4 bits, element 5 of groups 0 to 7 is in word 5.
"""

from __future__ import annotations

from itertools import pairwise

import torch

GROUP = 32  # numbers of a row that share a scale; also words of a row and step
BITS = {"int8": 8, "int4": 4, "mxfp4": 4, "fp8": 8, "fp8_blocks": 8, "e4m3": 8, "q41": 4, "q4k": 4, "q6k": 8}
BIASES = {
    "int8": 128,
    "int4": 8,
    "mxfp4": 0,
    "fp8": 0,
    "fp8_blocks": 0,
    "q41": 0,
    "q4k": 0,
    "q6k": 128,
}  # offsets that make all numbers non-negative
BLOCKS = {"Q4_1": "q41", "Q4_K": "q4k", "Q6_K": "q6k"}  # file formats that are kept as they are
SCALE_WORDS = {"q41": 8, "q4k": 5, "q6k": 3}  # words of scales of a row and step
LARGEST_FP8 = 448.0
FP8_LARGEST = (240.0, 256.0, 288.0, 320.0, 352.0, 384.0, 416.0, LARGEST_FP8)  # the largest of each mantissa
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; the fourth bit is the sign
FP8_GROUP = 64  # activations of a row that share an e4m3 scale


def step_of(packing: str) -> int:
    """The depth of a step: the elements of a word times GROUP."""
    return FP8_GROUP if packing == "e4m3" else 32 // BITS[packing] * GROUP


def pack(weight: torch.Tensor, packing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [rows, depth] as words int32 [rows, steps, GROUP], or as e4m3 [rows, depth]; and its scales.

    Scales of groups are two to a word: int32 [rows, steps, pairs]; scales of rows are float32 [rows]; scales
    of steps are float32 bits, int32 [rows, steps, 1]. The result of `block_lines` is only split into these.
    """
    if packing in SCALE_WORDS:
        lines = weight.view(len(weight), -1, GROUP + SCALE_WORDS[packing])
        return lines[..., :GROUP].contiguous(), lines[..., GROUP:].contiguous()
    numbers, scales = _ROUND[packing](weight.float())
    if packing == "e4m3":
        return numbers.view(torch.float8_e4m3fn), scales
    words = _words(numbers, packing)
    if packing == "fp8":
        return words, scales
    if packing == "fp8_blocks":
        return words, scales.contiguous().view(torch.int32)[..., None]
    return words, scales.view(len(weight), -1, 32 // BITS[packing]).contiguous().view(torch.int32)


def _words(numbers: torch.Tensor, packing: str) -> torch.Tensor:
    """Numbers [rows, depth] as words: int32 [rows, steps, GROUP]."""
    bits = BITS[packing]
    codes = numbers.to(torch.int64) + BIASES[packing]
    parts = codes.view(len(numbers), -1, 32 // bits, GROUP) & ((1 << bits) - 1)
    shifts = torch.arange(32 // bits, device=numbers.device)[:, None] * bits
    return (parts << shifts).sum(2).to(torch.int32)  # the cast wraps: the highest bit becomes the sign


def depth_of(weight: torch.Tensor, packing: str) -> int:
    """The depth of a matrix, or of `block_lines`."""
    if packing in SCALE_WORDS:
        return weight.shape[1] // (GROUP + SCALE_WORDS[packing]) * step_of(packing)
    return weight.shape[1]


def block_lines(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """A file's blocks, uint8 [rows, bytes], as int32 [rows, steps * words]: words of a step, then scales.

    Rows can be concatenated, and rows of zeros stand for zeros.
    """
    numbers, scales = _TAKE_APART[kind](blocks)
    words = _words(numbers, BLOCKS[kind])
    return torch.cat((words, scales), -1).flatten(1)


def _q41_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [rows, depth]; for each 256 of them eight words of (scale, minimum)."""
    rows = len(blocks)
    parts = blocks.view(rows, -1, 20)
    numbers = torch.cat((parts[..., 4:] & 15, parts[..., 4:] >> 4), -1)
    return numbers.flatten(1), parts[..., :4].reshape(rows, -1, 32).view(torch.int32)


def _q4k_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [rows, depth]; for each 256 two halves, d and dmin, then the bytes that multiply them."""
    rows = len(blocks)
    parts = blocks.view(rows, -1, 144)
    packed = parts[..., 16:].reshape(rows, -1, 1, 32)
    numbers = torch.cat((packed & 15, packed >> 4), -2)
    first, second, rest = parts[..., 4:8], parts[..., 8:12], parts[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), -1)
    minimums = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), -1)
    words = torch.cat((parts[..., :4], torch.stack((scales, minimums), -1).flatten(-2)), -1)
    return numbers.flatten(1), words.contiguous().view(torch.int32)


def _q6k_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [rows, depth]; for each 128 a half, d, then the signed bytes that multiply it."""
    rows = len(blocks)
    parts = blocks.view(rows, -1, 210)
    low = parts[..., :128].reshape(rows, -1, 1, 64)  # of each 128
    low = torch.cat((low & 15, low >> 4), -2).view(rows, -1, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (parts[..., 128:192].reshape(rows, -1, 1, 32) >> shifts) & 3
    numbers = (low | (high << 4)).to(torch.int8) - 32
    scales = parts[..., 192:208].reshape(rows, -1, 8)
    whole = torch.nn.functional.pad(parts[..., 208:], (0, 2)).repeat_interleave(2, 1)
    return numbers.flatten(1), torch.cat((whole, scales), -1).view(torch.int32)


def round_to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [rows, depth] and float16 scales [rows, groups]. Exact for values from Q8_0 blocks."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / 127).half()
    return _numbers(groups, scales, -127, 127), scales


def round_to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [rows, depth] and float16 scales [rows, groups]. Exact for values from Q4_0 blocks."""
    groups = weight.view(len(weight), -1, GROUP)
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (peak / -8).half()  # the largest becomes -8, which has no positive counterpart
    return _numbers(groups, scales, -8, 7), scales


def round_to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, depth] and float16 scales [rows, groups]. Exact for values from MXFP4 blocks.

    The scale makes the largest value 4 or 6. A file's scale may be larger, with smaller codes for the same
    values.
    """
    groups = weight.view(len(weight), -1, GROUP)
    exponents = torch.frexp(groups.abs().amax(-1))[1] - 3  # of 4 and 6: 3
    scales = torch.ldexp(torch.ones_like(groups[..., 0]), exponents.clamp(-24, 15)).half()
    bounds = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=weight.device)
    codes = torch.bucketize((groups / scales.float()[..., None]).abs(), bounds)
    return (codes + 8 * (groups < 0)).to(torch.int8).flatten(1), scales


def round_to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of e4m3 numbers [rows, depth], and float32 scales [rows].

    Rows that are e4m3 numbers times one scale are reproduced exactly: that scale follows from the row's
    maximum, which has one of eight mantissas. A scale that is off by a power of two changes only the smallest
    numbers.
    """
    peaks = weight.abs().amax(-1)
    scales = peaks / LARGEST_FP8
    for largest in FP8_LARGEST:
        own = _divisor(peaks / largest)[:, None]
        rest = (weight / own).to(torch.float8_e4m3fn).float() * own - weight
        is_exact = rest.abs().amax(-1) <= peaks * 1e-6
        scales = torch.where(is_exact, peaks / largest, scales)
    codes = (weight / _divisor(scales)[:, None]).to(torch.float8_e4m3fn)
    return codes.view(torch.int8), scales


def round_to_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a scale for each step of 128: float32 [rows, steps]."""
    codes, scales = round_to_fp8(weight.reshape(-1, step_of("fp8_blocks")))
    return codes.view(weight.shape), scales.view(len(weight), -1)


def _numbers(groups: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> torch.Tensor:
    numbers = (groups / _divisor(scales.float())[..., None]).round().clamp(low, high)
    return numbers.to(torch.int8).flatten(1)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """The scales, with 1 in place of 0."""
    return torch.where(scales == 0, 1.0, scales)


_TAKE_APART = {"Q4_1": _q41_parts, "Q4_K": _q4k_parts, "Q6_K": _q6k_parts}
_ROUND = {"int8": round_to_int8, "int4": round_to_int4, "mxfp4": round_to_mxfp4}
_ROUND |= {"fp8": round_to_fp8, "fp8_blocks": round_to_fp8_blocks, "e4m3": round_to_fp8}
