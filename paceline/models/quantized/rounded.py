"""Matrices of a torch model in 8 or 4 bits, rounded while they are loaded and decoded for each product.

    int8   codes int8 [rows, inputs]        scale float16 by 32 inputs: value = code * scale
    int4   codes uint8 [rows, inputs / 2]   scale and minimum float16 by 32: value = code * scale + minimum
    fp8    codes e4m3 [rows, inputs]        scale float32 by row: value = code * scale

int8 and int4 round as the cpu backend does. A matrix is read in slabs, and the mapped pages of each are given
back, so loading never holds more than the result and a few megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.checkpoint import Tensor

GROUP = 32  # inputs that share a scale
E4M3_MAX = 448.0
_SLAB_VALUES = 1 << 18  # read and rounded at a time

Floats = npt.NDArray[np.float32]
Parts = tuple[npt.NDArray[Any], ...]  # arrays [rows, ...]: codes, then what decodes them


class Rounding(NamedTuple):
    """One way of rounding rows of inputs, and back."""

    encode: Callable[[Floats], Parts]
    decode: Callable[..., torch.Tensor]  # the parts as tensors -> float32 [rows, inputs, padded to groups]


@dataclass(frozen=True)
class RoundedWeight:
    """A matrix [rows, inputs] that is decoded when it is used."""

    parts: tuple[torch.Tensor, ...]
    inputs: int
    dtype: torch.dtype  # of what it is decoded to
    decode: Callable[..., torch.Tensor]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return sum(part.nbytes for part in self.parts)

    def to_dense(self) -> torch.Tensor:
        """The values as an ordinary tensor, as torch.Tensor.to_dense gives them."""
        return self.decode(*self.parts)[:, : self.inputs].to(self.dtype).contiguous()


def rounded(tensor: Tensor, quantization: str, device: torch.device, dtype: torch.dtype) -> RoundedWeight:
    """A checkpoint's matrix under a quantization of ROUNDINGS."""
    (rows, inputs), rounding = tensor.shape, ROUNDINGS[quantization]
    whole: Parts = ()
    for slab in slabs(tensor.shape):
        parts = rounding.encode(tensor.take_rows(slab).float32())
        whole = whole or tuple(np.empty((rows, *part.shape[1:]), part.dtype) for part in parts)
        for into, part in zip(whole, parts, strict=True):
            into[slab] = part
    tensors = tuple(torch.from_numpy(part).to(device) for part in whole)
    return RoundedWeight(tensors, inputs, dtype, rounding.decode)


def slabs(shape: tuple[int, ...]) -> Iterator[slice]:
    """Rows of a tensor, as many at a time as make floats of a megabyte; all if they are few."""
    step = max(1, _SLAB_VALUES // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _groups(values: Floats) -> Floats:
    """Rows padded with zeros to whole groups: [rows, groups, 32]."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % GROUP)))
    return padded.reshape(len(values), -1, GROUP)


def _inverse(scale: npt.NDArray[np.float16]) -> Floats:
    """One by the scale, and 0 for a group of zeros: float32 [rows, groups, 1]."""
    wide = scale.astype(np.float32)[:, :, None]
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def _to_int8(values: Floats) -> Parts:
    groups = _groups(values)
    scale = (np.abs(groups).max(2) / np.float32(127)).astype(np.float16)
    codes = np.clip(np.rint(groups * _inverse(scale)), -127, 127).astype(np.int8)
    return codes, scale


def _from_int8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (codes.float() * scale.float()[:, :, None]).flatten(1)


def _to_int4(values: Floats) -> Parts:
    groups = _groups(values)
    minimum = groups.min(2).astype(np.float16)
    above = groups - minimum.astype(np.float32)[:, :, None]
    scale = ((groups.max(2) - minimum) / np.float32(15)).astype(np.float16)
    codes = np.clip(np.rint(above * _inverse(scale)), 0, 15).astype(np.uint8)
    return codes[:, :, : GROUP // 2] | codes[:, :, GROUP // 2 :] << np.uint8(4), scale, minimum


def _from_int4(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    values = torch.cat((codes & 15, codes >> 4), dim=2).float()
    return (values * scale.float()[:, :, None] + minimum.float()[:, :, None]).flatten(1)


def _to_fp8(values: Floats) -> Parts:
    scale = np.maximum(np.abs(values).max(1, keepdims=True), np.float32(1e-12)) / np.float32(E4M3_MAX)
    codes = torch.from_numpy(values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.numpy(), scale


def _from_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scale


ROUNDINGS = {
    "int8": Rounding(_to_int8, _from_int8),
    "int4": Rounding(_to_int4, _from_int4),
    "fp8": Rounding(_to_fp8, _from_fp8),
}
