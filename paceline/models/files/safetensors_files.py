"""A folder of safetensors as a Checkpoint: config.json with one file, or with several and mostly an index.

    8 bytes: length of the header | header: JSON of {name: {dtype, shape, data_offsets}} | data

We read the format ourselves: it is small, every number in it is checked against the file's size, and tensors
stay memory-mapped until a backend converts them. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint, Stored, Tensor
from paceline.models.families.config_reader import model_config
from paceline.models.families.table import FAMILIES
from paceline.models.files.file_layouts import FileLayout, converted, our_name
from paceline.models.files.layout import select_tensors
from paceline.models.files.mapped import (
    MAX_JSON_BYTES,
    damaged,
    map_file,
    parse_json,
    read_json,
    release_pages,
)
from paceline.models.gguf.blocks import FORMATS, Bytes, dequantize
from paceline.models.quantized.method import read_quantization, with_old_config
from paceline.models.quantized.modules import dequantized
from paceline.models.quantized.stacked import without_stacks

SINGLE_FILE = "model.safetensors"
HEADS = ("eagle3", "eagle", "medusa", "dflash", "dspark")  # as architectures name them
INDEX_FILE = "model.safetensors.index.json"
OTHER_FILES = ("consolidated", "adapter_", "optimizer", "training_args")  # of other formats, or no model
MAX_DIMENSIONS = 8  # of a tensor; multiplying very many forged lengths would take for ever
KINDS = ("F32", "F16", "BF16")
# only where a reader asks for them; the values of F8_E4M3 are bytes that mean something only with a scale
INTEGER_KINDS = {"I64": "<i8", "I32": "<i4", "I8": "|i1", "U8": "|u1", "BOOL": "|b1", "F8_E4M3": "|u1"}


@dataclass(frozen=True)
class SafeTensor:
    """One tensor of a memory-mapped safetensors file; implements checkpoint.Tensor."""

    shape: tuple[int, ...]
    kind: str
    data: Bytes  # [rows, bytes per row], a view of the mapped file

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return Stored(self.kind, self.data.nbytes)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        values = dequantize(self.kind, self.data).reshape(self.shape)
        release_pages(self.data)  # a loader reads each tensor once; its pages would count as memory in use
        return values

    def integers(self) -> npt.NDArray[np.int64]:
        """The values of a tensor of integers or booleans, a new array of `shape`."""
        kind = np.dtype(INTEGER_KINDS[self.kind])
        return np.ascontiguousarray(self.data).view(kind).astype(np.int64).reshape(self.shape)

    def blocks(self) -> Bytes:
        """The stored bytes: uint8 [rows, bytes per row]."""
        return self.data

    def take_rows(self, part: slice) -> SafeTensor:
        """These rows of a matrix, or values of a vector, mapped."""
        shape = (part.stop - part.start, *self.shape[1:])
        return SafeTensor(shape, self.kind, self.data.reshape(self.shape[0], -1)[part])


def safetensors_checkpoint(folder: Path) -> Checkpoint:
    """The model in a folder, its config and tensors checked against each other."""
    source = f"{folder.name}/config.json"
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is a LoRA adapter, not a model. Serve the model that it was trained on, with "
            f"--lora-modules NAME={folder}."
        )
    values = with_old_config(read_json(folder / "config.json"), folder)
    if method := head_method(values):
        raise CheckpointError(
            f"{folder} is a draft head, not a model. Serve the model that it drafts for, with "
            f"--draft {method}:{folder}."
        )
    config = model_config(values, source)
    family = FAMILIES[config.family]
    quantization, layout = read_quantization(values, source, family.quantizations), family.files
    integers = bool(layout.stacked_experts) or quantization is not None
    tensors: dict[str, Tensor] = dict(read_folder(folder, layout, integers))
    if quantization is not None:
        tensors = dequantized(without_stacks(tensors, quantization, config), quantization)
    tensors = dict(converted(tensors, layout, config))
    prefix = family.mtp.format(layers=config.num_layers)
    mtp = {name: tensors.pop(name) for name in list(tensors) if prefix and name.startswith(prefix)}
    is_tied = values.get("tie_word_embeddings")
    if isinstance(is_tied, bool) and is_tied != ("lm_head.weight" in tensors):
        config = replace(config, tie_embeddings=is_tied)  # though its text_config may have another default
    words = "" if quantization is None else quantization.words
    return Checkpoint(config, select_tensors(config, tensors, folder), folder, mtp, words)


def head_method(values: Mapping[str, object]) -> str:
    """The method of the draft head that a config.json describes; empty: it is none."""
    if "text_config" in values:  # Eagle is a vision model, too
        return ""
    words = f"{values.get('architectures', '')} {values.get('speculators_model_type', '')}".lower()
    named = next((method for method in HEADS if method in words), "")
    return named or ("medusa" if "medusa_num_heads" in values else "")


def read_folder(folder: Path, layout: FileLayout, integers: bool = False) -> dict[str, SafeTensor]:
    """The mapped tensors of a folder under the names of checkpoint.py, not yet `converted`."""
    tensors: dict[str, SafeTensor] = {}
    for path, names in _files(folder).items():
        found = read_safetensors(path, integers)
        for name in names if names is not None else found:
            if name not in found:
                raise damaged(path, f"it lacks the tensor {name}, which {INDEX_FILE} says is in it")
            if (ours := our_name(name, layout)) in tensors:
                raise damaged(path, f"the tensor {name} is there twice")
            if ours is not None:
                tensors[ours] = found[name]
    return tensors


def read_safetensors(path: Path, integers: bool = False) -> dict[str, SafeTensor]:
    """The mapped tensors of one safetensors file, under the file's own names, all sizes checked.

    `integers`: tensors of whole numbers may be among them.
    """
    kinds = (*KINDS, *INTEGER_KINDS) if integers else KINDS
    header, data = _read_header(path)
    header.pop("__metadata__", None)
    tensors: dict[str, SafeTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        kind, shape, begin, end = _checked_entry(path, name, entry, len(data), kinds)
        row_bytes = (shape[-1] if shape else 1) * item_bytes(kind)
        tensors[name] = SafeTensor(shape, kind, data[begin:end].reshape(-1, row_bytes))
        spans.append((begin, end, name))
    spans.sort()
    for (_, end, name), (begin, _, next_name) in pairwise(spans):
        if begin < end:
            raise damaged(path, f"tensors {name} and {next_name} overlap")
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file."""
    notes = _read_header(path)[0].get("__metadata__")
    return {str(name): str(note) for name, note in notes.items()} if isinstance(notes, dict) else {}


def item_bytes(kind: str) -> int:
    """The bytes of one number of this kind."""
    return np.dtype(INTEGER_KINDS[kind]).itemsize if kind in INTEGER_KINDS else FORMATS[kind].block_bytes


def _read_header(path: Path) -> tuple[dict[str, object], Bytes]:
    """The header of a safetensors file and the data after it."""
    content = map_file(path)
    if len(content) < 8:
        raise damaged(path, f"it has only {len(content)} bytes")
    header_bytes = int.from_bytes(content[:8].tobytes(), "little")
    if header_bytes > min(MAX_JSON_BYTES, len(content) - 8):
        raise damaged(path, f"its header claims {header_bytes} bytes, but the file has {len(content)}")
    return parse_json(content[8 : 8 + header_bytes].tobytes(), path), content[8 + header_bytes :]


def _checked_entry(
    path: Path, name: str, entry: object, size: int, kinds: Collection[str]
) -> tuple[str, tuple[int, ...], int, int]:
    """The kind, shape, begin and end of a header entry, checked against `size` bytes of data."""
    if not isinstance(entry, dict):
        raise damaged(path, f"the header entry of {name} is not an object")
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or 0 in shape:
        raise damaged(path, f"tensor {name} has an impossible shape or place")
    if not isinstance(kind, str) or kind not in kinds:
        raise UnsupportedModelError(
            f"{path.name}: tensor {name} has dtype {kind!r}; supported are {', '.join(kinds)}. "
            f"Use a float version of the model, or a GGUF file of it."
        )
    begin, end = offsets
    if not begin <= end <= size:
        raise damaged(path, f"tensor {name} should end at byte {end} of the data, which has {size}")
    if prod(shape) * item_bytes(kind) != end - begin:
        raise damaged(
            path, f"tensor {name} of shape {shape} and type {kind} does not fill its {end - begin} bytes"
        )
    return kind, tuple(shape), begin, end


def _are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether this can be a shape or offsets: a few non-negative integers."""
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        return False
    return all(type(value) is int and value >= 0 for value in values)


def _files(folder: Path) -> Mapping[Path, list[str] | None]:
    """The files to read, and the tensors to take from each; None: all."""
    if (folder / INDEX_FILE).is_file():
        return _shards(folder)
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    if loose := weight_files(path.name for path in folder.iterdir()):
        return {folder / name: None for name in loose}
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f" {pickled[0]} can hold code and is never loaded: convert it to safetensors." if pickled else ""
    raise CheckpointError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.{hint} "
        f"Give a folder with safetensors and config.json."
    )


def weight_files(names: Iterable[str]) -> list[str]:
    """Those of a folder's files that hold the weights; some tools give them names of their own."""
    found = sorted(
        name
        for name in names
        if name.endswith(".safetensors") and "/" not in name and not name.startswith(OTHER_FILES)
    )
    return [name for name in found if name.startswith("model")] or found


def _shards(folder: Path) -> Mapping[Path, list[str] | None]:
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "it has no weight_map")
    shards: dict[Path, list[str] | None] = {}
    for name, file_name in weight_map.items():
        # a shard is a file of this folder, never a path out of it
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise damaged(
                index, f"the shard of {name} is {str(file_name)[:80]!r}, not the name of a file here"
            )
        names = shards.setdefault(folder / file_name, [])
        assert names is not None
        names.append(name)
    missing = sorted(path.name for path in shards if not _is_file(path))
    if missing:
        raise CheckpointError(
            f"{folder.name} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:5])}. "
            f"The download is incomplete: fetch the model again."
        )
    return shards


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long
        return False
