"""Reading a file of arrays that may be damaged or made to harm. numpy's own reader believes what it says:
it allocates what a header claims, and unpacks without a limit."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MAX_MEMBERS = 16
KINDS = "iubU"  # whole numbers, booleans, text: no floats (NaN passes every comparison), no objects


@contextmanager
def stored_arrays(path: Path) -> Iterator[Mapping[str, Array]]:
    """The arrays that `numpy.savez` wrote. ValueError, KeyError or BadZipFile if there are none."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            packed = any(one.compress_type != zipfile.ZIP_STORED or one.flag_bits & 1 for one in members)
            if packed or len(members) > MAX_MEMBERS or sum(one.file_size for one in members) > size:
                raise ValueError("it claims to hold more than it does")
            yield {one.filename.removesuffix(".npy"): _array(archive.read(one)) for one in members}


def _array(content: bytes) -> Array:
    """The array of a member, whose header must say what is there."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"arrays of version {version} are not read")
    shape, fortran, kind = np.lib.format.read_array_header_1_0(stream)
    rest = memoryview(content)[stream.tell() :]
    if fortran or kind.kind not in KINDS or math.prod(shape) * kind.itemsize != len(rest):
        raise ValueError(f"an array of {shape} {kind} is not what follows")
    return np.frombuffer(rest, dtype=kind).reshape(shape) if kind.itemsize else np.zeros(shape, dtype=kind)
