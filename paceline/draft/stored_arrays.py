"""A reader of .npz files that are untrusted: damaged, or made to harm.

numpy's own reader trusts the file: it allocates what a header claims, and decompresses without a limit.
"""

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
KINDS = "iubU"  # numpy kinds: integers, booleans, text. No floats (NaN passes every comparison), no objects


@contextmanager
def stored_arrays(path: Path) -> Iterator[Mapping[str, Array]]:
    """The arrays that `numpy.savez` wrote. ValueError, KeyError or BadZipFile if there are none."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            packed = any(
                member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 for member in members
            )
            if packed or len(members) > MAX_MEMBERS or sum(member.file_size for member in members) > size:
                raise ValueError("it claims to hold more than it does")
            yield {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}


def _array(content: bytes) -> Array:
    """The array of a member. ValueError if its header does not fit its content."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"arrays of version {version} are not read")
    shape, fortran, kind = np.lib.format.read_array_header_1_0(stream)
    rest = memoryview(content)[stream.tell() :]
    if fortran or kind.kind not in KINDS or math.prod(shape) * kind.itemsize != len(rest):
        raise ValueError(f"an array of {shape} {kind} is not what follows")
    return np.frombuffer(rest, dtype=kind).reshape(shape) if kind.itemsize else np.zeros(shape, dtype=kind)
