"""Weights in 8 and 4 bits: how they are rounded, and how they lie.

    int8    whole numbers -127 to 127, a float16 scale for each 32 of a row: the numbers of GGUF's Q8_0
    int4    whole numbers -8 to 7, likewise: those of Q4_0
    fp8     e4m3, a float32 scale for each row

A word has the same place of several groups of 32, so that shifting a block of words by `bits` gives the next
group, ready to be multiplied: with four bits, place 5 of groups 0 to 7 lies in word 5.
"""

from __future__ import annotations

import torch

GROUP = 32  # numbers of a row that have one scale, and words of a row and step
BITS = {"int8": 8, "int4": 4, "fp8": 8}
BIASES = {"int8": 128, "int4": 8, "fp8": 0}  # added to whole numbers, so that none is below zero
LARGEST_FP8 = 448.0


def step_of(packing: str) -> int:
    """The depth that one word of each place holds."""
    return 32 // BITS[packing] * GROUP


def pack(weight: torch.Tensor, packing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [rows, depth] as words: int32 [rows, steps, GROUP], and its scales.

    Those of groups are pairs in one word: int32 [rows, steps, pairs]; those of rows are float32 [rows].
    """
    numbers, scales = _ROUND[packing](weight.float())
    bits, steps = BITS[packing], weight.shape[1] // step_of(packing)
    codes = numbers.to(torch.int64) + BIASES[packing]
    parts = codes.view(len(weight), steps, 32 // bits, GROUP) & ((1 << bits) - 1)
    shifts = torch.arange(32 // bits, device=weight.device)[:, None] * bits
    words = (parts << shifts).sum(2).to(torch.int32)  # the upper bit of a word is its sign: it wraps around
    if packing == "fp8":
        return words, scales
    return words, scales.view(len(weight), steps, 32 // bits).contiguous().view(torch.int32)


def round_to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [rows, depth], and float16 scales [rows, groups]. Values of Q8_0 blocks stay what they are."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / 127).half()
    return _numbers(groups, scales, -127, 127), scales


def round_to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [rows, depth], and float16 scales [rows, groups]. Values of Q4_0 blocks stay what they are."""
    groups = weight.view(len(weight), -1, GROUP)
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (peak / -8).half()  # the largest becomes -8, the only number without its opposite
    return _numbers(groups, scales, -8, 7), scales


def round_to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of e4m3 numbers [rows, depth], and float32 scales [rows]."""
    scales = weight.abs().amax(-1) / LARGEST_FP8
    codes = (weight / _divisor(scales)[:, None]).to(torch.float8_e4m3fn)
    return codes.view(torch.int8), scales


def _numbers(groups: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> torch.Tensor:
    numbers = (groups / _divisor(scales.float())[..., None]).round().clamp(low, high)
    return numbers.to(torch.int8).flatten(1)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """The scales, and one where all is zero."""
    return torch.where(scales == 0, 1.0, scales)


_ROUND = {"int8": round_to_int8, "int4": round_to_int4, "fp8": round_to_fp8}
