"""Training for weights of 4 bits: gradients are those at the rounded weights, and move the exact ones.

A head is served with 4-bit matrices, on the cpu backend and from a file of 4 bits; `fc` keeps 8 bits in both.
It guesses better there if it has learned with them. It does so in the second half of a run, when its weights
move little, and is written with rounded weights: engines round to other grids, on which the exact ones would
fall elsewhere, but every grid of 16 steps from a group's smallest weight to its largest has the rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from paceline.models.heads.checkpoint import EIGHT_BITS
from paceline.train.loop.sequences import fused

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


def round_matrices(parameters: Mapping[str, Tensor]) -> None:
    """Round those of the parameters, by name, that are served with 4 bits."""
    with torch.no_grad():
        for matrix in _matrices(parameters):
            matrix.copy_(_rounded_on(matrix.device.type)(matrix))


@contextmanager
def rounded_weights(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which those of the parameters, by name, that are served with 4 bits are rounded."""
    exact = [matrix.detach().clone() for matrix in _matrices(parameters)]
    round_matrices(parameters)
    try:
        yield
    finally:
        with torch.no_grad():
            for matrix, values in zip(_matrices(parameters), exact, strict=True):
                matrix.copy_(values)


def _matrices(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The matrices of whole groups, without those that keep 8 bits."""
    return [
        each
        for name, each in parameters.items()
        if each.ndim == 2 and each.shape[1] % GROUP == 0 and name.removesuffix(".weight") not in EIGHT_BITS
    ]
