"""Training for weights of 4 bits: gradients are those at the rounded weights, and move the exact ones.

A head is served with 4-bit matrices, on the cpu backend and from a file of 4 bits; `fc` keeps 8 bits in both.
It guesses better there if it has learned with them. It does so in the second half of a run, when its weights
move little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from paceline.models.heads.checkpoint import EIGHT_BITS
from paceline.train.sequences import fused

GROUP = 32  # inputs that share a scale and a zero point
STEPS = 15  # from the smallest of them to the largest
SMALLEST = 1e-7  # of a scale, which is a float16


def rounded(matrix: Tensor) -> Tensor:
    """The matrix [out, in] as 4 bits hold it; the same arithmetic as models/quantized/writer.py."""
    groups = matrix.view(len(matrix), -1, GROUP)
    # zero is always a code
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / STEPS).clamp(min=SMALLEST).half().float()
    zero = (-low / scale).round()
    codes = ((groups / scale).round() + zero).clamp(0, STEPS)
    return ((codes - zero) * scale).view(matrix.shape)


@cache
def _rounded_on(device_type: str) -> Callable[[Tensor], Tensor]:
    return fused(rounded) if device_type == "cuda" else rounded


@contextmanager
def rounded_weights(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which those of the parameters that are served with 4 bits are rounded, by name."""
    matrices = [
        each
        for name, each in parameters.items()
        if each.ndim == 2 and each.shape[1] % GROUP == 0 and name.removesuffix(".weight") not in EIGHT_BITS
    ]
    exact = [matrix.detach().clone() for matrix in matrices]
    with torch.no_grad():
        for matrix in matrices:
            matrix.copy_(_rounded_on(matrix.device.type)(matrix))
    try:
        yield
    finally:
        with torch.no_grad():
            for matrix, values in zip(matrices, exact, strict=True):
                matrix.copy_(values)
