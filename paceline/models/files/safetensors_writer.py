"""Writing safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.models.files.safetensors_files import SafeTensor

ALIGNMENT = 8  # bytes; the format wants the data at a multiple of it


def encode(values: npt.NDArray[np.float32], kind: str = "F32") -> SafeTensor:
    """The values as a tensor of this kind: F32, F16 or BF16, rounded to the nearest."""
    if kind == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        # add half of the last kept bit, ties to even, so that dropping the low bits rounds
        stored = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    else:
        stored = values.astype({"F32": np.float32, "F16": np.float16}[kind])
    return _tensor(stored, kind)


def encode_integers(values: npt.NDArray[np.int64]) -> SafeTensor:
    """The values as a tensor of int64."""
    return _tensor(values, "I64")


def encode_flags(values: npt.NDArray[np.bool_]) -> SafeTensor:
    """The values as a tensor of booleans."""
    return _tensor(values, "BOOL")


def write_safetensors(path: Path, tensors: Mapping[str, SafeTensor], notes: Mapping[str, str]) -> None:
    """Write a file of tensors, atomically. `notes` are the metadata of its header."""
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.data.size
        header[name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).data)
    unfinished.replace(path)


def _tensor(stored: npt.NDArray[np.generic], kind: str) -> SafeTensor:
    data = np.ascontiguousarray(stored).view(np.uint8)
    return SafeTensor(stored.shape, kind, data.reshape(-1, stored.shape[-1] * stored.itemsize))
