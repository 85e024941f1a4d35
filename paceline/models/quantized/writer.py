"""Matrices as compressed-tensors' pack-quantized, which layouts.py reads: 4 or 8 bits in groups of 32.

4 bits    (code - zero point) * scale, from the smallest value of a group to the largest
8 bits    code * scale, as far down as up
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.models.files.safetensors_files import SafeTensor
from paceline.models.files.safetensors_writer import encode, encode_integers
from paceline.models.quantized.weights import BLOCK

STEPS = {4: 15, 8: 254}  # between the smallest code and the largest
SMALLEST = 1e-7  # of a scale, which is a float16

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def can_pack(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is a matrix of whole groups and whole words of zero points."""
    return len(shape) == 2 and shape[1] % BLOCK == 0 and shape[0] % 8 == 0


def pack(values: Floats, bits: int) -> dict[str, SafeTensor]:
    """The tensors of a matrix [out, in], by the last part of their names."""
    groups = values.reshape(len(values), -1, BLOCK)
    low = np.minimum(groups.min(axis=2), 0)
    high = np.maximum(groups.max(axis=2), 0)
    if bits == 8:
        high = np.maximum(high, -low)
        low = -high
    scale = np.maximum((high - low) / STEPS[bits], SMALLEST).astype(np.float16)
    wide = scale.astype(np.float32)
    # so that zero is a code, and 8 bits have it in their middle
    zeros = np.rint(-low / wide) if bits == 4 else np.full_like(wide, 128)
    codes = np.rint(groups / wide[:, :, None]) + zeros[:, :, None]
    codes = np.clip(codes, 0, 2**bits - 1).astype(np.uint8).reshape(values.shape)
    tensors = {
        "weight_packed": _words(codes, bits),
        "weight_scale": encode(wide, "F16"),
        "weight_shape": encode_integers(np.array(values.shape, dtype=np.int64)),
    }
    if bits == 4:  # packed down the rows
        down = _words(np.ascontiguousarray(zeros.astype(np.uint8).T), bits)
        words = np.ascontiguousarray(down.data.view("<u4").T)
        tensors["weight_zero_point"] = SafeTensor(words.shape, "I32", words.view(np.uint8))
    return tensors


def _words(codes: Codes, bits: int) -> SafeTensor:
    """Codes [rows, columns] in words of 32 bits, lowest bits first."""
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return SafeTensor((len(codes), codes.shape[1] // 4), "I32", np.ascontiguousarray(codes))


def quantization_config(bits: dict[str, int]) -> dict[str, object]:
    """The quantization_config of a config.json, for modules of these bits."""
    groups = {
        f"group_{number}": {
            "targets": sorted(name for name, own in bits.items() if own == count),
            "weights": {
                "num_bits": count,
                "type": "int",
                "strategy": "group",
                "group_size": BLOCK,
                "symmetric": count == 8,
            },
        }
        for number, count in enumerate(sorted(set(bits.values())))
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
