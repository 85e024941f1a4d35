"""Opening the files of a model: mapped bytes and JSON, with errors that name the remedy."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from stat import S_ISREG

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError

MAX_JSON_BYTES = 50_000_000  # three times the largest known index; parsed it takes up to 30 times as many


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a damaged file, with the remedy."""
    return CheckpointError(
        f"{path.name}: {what}. The file is truncated or damaged: fetch it again (an alias with "
        f"`paceline models pull ALIAS`), or convert the model again."
    )


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, memory-mapped: uint8 [size]."""
    try:
        if path.stat().st_size == 0:
            raise damaged(path, "the file is empty")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}. Check the path and its permissions.") from error


def release_pages(mapped: npt.NDArray[np.uint8]) -> None:
    """Give back the memory of a part of a mapped file; a later read gets it from the file again."""
    base: object = mapped
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    address = int(mapped.__array_interface__["data"][0])
    begin = address - int(np.frombuffer(base, dtype=np.uint8).__array_interface__["data"][0])
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # neighbours may still need the pages at both ends
    last = (begin + mapped.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        base.madvise(mmap.MADV_DONTNEED, first, last - first)


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file."""
    try:
        state = path.stat()
        if not S_ISREG(state.st_mode):  # a pipe or a device has no end
            raise damaged(path, "it is not a regular file")
        if state.st_size > MAX_JSON_BYTES:
            raise damaged(path, f"it has {state.st_size} bytes, and at most {MAX_JSON_BYTES} are read")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"Cannot read {path}: {error.strerror or error}. "
            f"A model folder needs this file: check the path, or fetch the model again."
        ) from error
    return parse_json(content, path)


def parse_json(content: bytes, path: Path) -> dict[str, object]:
    """The JSON object in `content`, a part of the file at `path`."""
    try:
        value = json.loads(content, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(value, dict):
        raise damaged(path, "it is not a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The pairs as a dict. ValueError for a repeated key: parsers would disagree on its value."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key appears twice")
    return values
