"""Reading untrusted GGUF files: metadata, and memory-mapped tensors.

    magic "GGUF" | version | tensor count | metadata count | metadata ... | tensor infos ... | padding | data

Every count, length and offset is checked against the size of the file before it is used. So a truncated or
forged file is a CheckpointError, and memory use stays proportional to the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.checkpoint import Stored
from paceline.models.files.mapped import damaged, map_file, release_pages
from paceline.models.gguf.blocks import FORMATS, FORMATS_BY_NUMBER, BlockFormat, Bytes, dequantize

# a scalar, a string, a list of strings or of arrays, or a numpy array of numbers
MetadataValue = int | float | bool | str | list[object] | npt.NDArray[np.generic]

UINT32_TYPE = 4
STRING_TYPE = 8
ARRAY_TYPE = 9
UINT64_TYPE = 10
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
SCALARS |= {11: "<q", 12: "<d"}
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
SMALLEST_ENTRY = 13  # bytes of a metadata entry: empty key, type, one-byte value
SMALLEST_TENSOR_INFO = 32  # bytes: empty name, one dimension, type, offset
SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 10_000
SMALLEST_ITEM = {STRING_TYPE: 8, ARRAY_TYPE: 12}  # bytes of an empty string and of an empty array


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a memory-mapped GGUF file; implements checkpoint.Tensor."""

    shape: tuple[int, ...]
    kind: str
    data: Bytes  # [rows, bytes per row], a view of the mapped file
    row_order: npt.NDArray[np.intp] | None = None  # [rows] the stored row of each row; None: as stored

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return Stored(self.kind, self.data.nbytes)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        values = dequantize(self.kind, self.blocks()).reshape(self.shape)
        release_pages(self.data)  # a loader reads each tensor once; its pages would count as memory in use
        return values

    def integers(self) -> npt.NDArray[np.int64]:
        """The values of a tensor of INTEGERS, a new array of `shape`."""
        kind = np.dtype({"I32": "<i4", "I64": "<i8"}[self.kind])
        return np.ascontiguousarray(self.data).view(kind).astype(np.int64).reshape(self.shape)

    def blocks(self) -> Bytes:
        """The stored bytes in the order of the rows: uint8 [rows, bytes per row]."""
        return self.data if self.row_order is None else self.data[self.row_order]

    def reordered(self, order: npt.NDArray[np.intp]) -> GgufTensor:
        """This tensor with row i taken from stored row `order[i]`; a vector's values count as its rows."""
        data = self.data.reshape(len(order), -1)
        return GgufTensor(self.shape, self.kind, data, order)

    def take_rows(self, part: slice) -> GgufTensor:
        """These rows of a matrix, or values of a vector of floats, mapped."""
        shape = (part.stop - part.start, *self.shape[1:])
        if self.row_order is not None:
            return GgufTensor(shape, self.kind, self.data, self.row_order[part])
        return GgufTensor(shape, self.kind, self.data.reshape(self.shape[0], -1)[part])

    def slices(self) -> list[GgufTensor]:
        """The matrices of a stack [count, rows, columns], or the rows of a matrix, as one tensor each."""
        count, rows = self.shape[0], len(self.data) // self.shape[0]
        return [
            GgufTensor(self.shape[1:], self.kind, self.data[i * rows : (i + 1) * rows]) for i in range(count)
        ]


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, opened and checked. Tensor names are the file's own."""

    path: Path
    metadata: dict[str, MetadataValue]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The metadata and the mapped tensors of the GGUF file at `path`, all sizes checked.

    Of a split file, `path` is any part; the others are in the same folder.
    """
    file = _read_part(path)
    count = file.metadata.get("split.count", 1)
    return _joined([_read_part(part) for part in _parts(path, count)]) if count != 1 else file


def split_names(name: str) -> list[str]:
    """The names of all parts of a split file, from the name of one; of another file, its own name."""
    match = SPLIT_NAME.fullmatch(name)
    count = int(match["count"]) if match else 1
    if match is None or not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        return [name]
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _parts(path: Path, count: MetadataValue) -> list[Path]:
    """The files of all parts of a split file, which must be there."""
    names = split_names(path.name)
    if len(names) != count:
        raise CheckpointError(
            f"{path.name} is one of {str(count)[:20]} parts of a split GGUF file, but its name is not "
            f"NAME-00001-of-0000N.gguf. Give the parts the names that they were made with."
        )
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path.name} is one of {count} parts of a split GGUF file, and {', '.join(missing[:5])} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it. Fetch all parts into one folder."
        )
    return [path.parent / name for name in names]


def _joined(parts: list[GgufFile]) -> GgufFile:
    """The parts of a split file as one; the first has the metadata."""
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, len(parts)):
            raise damaged(part.path, f"it does not say that it is part {number + 1} of {len(parts)}")
        if twice := tensors.keys() & part.tensors.keys():
            raise damaged(part.path, f"another part has the tensor {min(twice)} too")
        tensors |= part.tensors
    first, total = parts[0], parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise damaged(
            first.path, f"it says that its parts have {total} tensors, but they have {len(tensors)}"
        )
    return GgufFile(first.path, first.metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    reader = _Reader(path, map_file(path))
    tensor_count, entry_count = _read_preamble(reader)
    metadata = _read_metadata(reader, entry_count)
    infos = [_read_tensor_info(reader) for _ in range(tensor_count)]
    return GgufFile(path, metadata, _map_tensors(reader, metadata, infos))


class _Reader:
    """A cursor over the file; CheckpointError if it would go past the end."""

    def __init__(self, path: Path, content: Bytes) -> None:
        self.path = path
        self.content = content
        self.view = content.data
        self.size = len(content)
        self.position = 0
        self.scalars: dict[int, Callable[[], int | float | bool]] = {
            number: self._scalar_reader(code) for number, code in SCALARS.items()
        }

    def _scalar_reader(self, code: str) -> Callable[[], int | float | bool]:
        layout = struct.Struct(code)

        def read() -> int | float | bool:
            start = self.advance(layout.size)
            value: int | float | bool = layout.unpack_from(self.view, start)[0]
            return value

        return read

    def advance(self, count: int) -> int:
        """The position of the next `count` bytes; moves the cursor past them."""
        start = self.position
        if count > self.size - start:
            raise damaged(self.path, f"it ends at byte {self.size}, but byte {start + count} was expected")
        self.position = start + count
        return start

    def uint32(self) -> int:
        return int(self.scalars[UINT32_TYPE]())

    def uint64(self) -> int:
        return int(self.scalars[UINT64_TYPE]())

    def count(self, smallest: int, what: str) -> int:
        """A 64-bit count of items of at least `smallest` bytes each, which must fit in the file."""
        count = self.uint64()
        if count * smallest > self.size - self.position:
            raise damaged(self.path, f"it claims {count} {what}, more than its {self.size} bytes can hold")
        return count

    def string(self) -> str:
        length = self.uint64()
        start = self.advance(length)
        try:
            return str(self.view[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"the text at byte {start} is not UTF-8") from error

    def value(self, number: int, depth: int = 0) -> MetadataValue:
        if number == STRING_TYPE:
            return self.string()
        if number == ARRAY_TYPE:
            return self.array(depth + 1)
        if number not in self.scalars:
            raise damaged(self.path, f"metadata has the unknown type {number}")
        return self.scalars[number]()

    def array(self, depth: int) -> MetadataValue:
        if depth > MAX_ARRAY_DEPTH:
            raise damaged(self.path, f"metadata arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        number = self.uint32()
        if number in SCALARS:
            dtype = np.dtype(SCALARS[number])
            count = self.count(dtype.itemsize, "array items")
            start = self.advance(count * dtype.itemsize)
            return self.content[start : start + count * dtype.itemsize].view(dtype)
        count = self.count(SMALLEST_ITEM.get(number, 1), "array items")
        if number == STRING_TYPE:
            return self.strings(count)
        return [self.value(number, depth) for _ in range(count)]

    def strings(self, count: int) -> list[object]:
        """`count` strings. No method calls in the loop: a vocabulary has 150,000."""
        view, size, position = self.view, self.size, self.position
        length_at = struct.Struct("<Q").unpack_from
        texts: list[object] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(view, position)[0]
                if position > size:
                    raise damaged(self.path, f"it ends at byte {size}, inside a list of texts")
                texts.append(str(view[start:position], "utf-8"))
        except struct.error as error:
            raise damaged(self.path, f"it ends at byte {size}, inside a list of texts") from error
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"the text at byte {start} is not UTF-8") from error
        self.position = position
        return texts


def _read_preamble(reader: _Reader) -> tuple[int, int]:
    """The tensor and metadata counts, after checking the magic and the version."""
    start = reader.advance(4)
    magic = bytes(reader.view[start : start + 4])
    if magic != b"GGUF":
        raise CheckpointError(
            f"{reader.path.name} is not a GGUF file (it starts with {magic!r}). "
            f"Give a .gguf file or a folder of safetensors."
        )
    version = reader.uint32()
    if version not in (2, 3):
        big_endian = version in (2 << 24, 3 << 24)
        found = "is big-endian" if big_endian else f"has version {version}"
        raise UnsupportedModelError(
            f"{reader.path.name} {found}; little-endian GGUF versions 2 and 3 are read. "
            f"Convert the model again with a current converter."
        )
    tensor_count = reader.count(SMALLEST_TENSOR_INFO, "tensors")
    return tensor_count, reader.count(SMALLEST_ENTRY, "metadata entries")


def _read_metadata(reader: _Reader, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = reader.string()
        if key in metadata:
            raise damaged(reader.path, f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.uint32())
    return metadata


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]  # outermost first; the file has it innermost first
    form: BlockFormat
    offset: int  # from the start of the data

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.form.block_size * self.form.block_bytes

    @property
    def rows(self) -> int:
        rows = 1
        for length in self.shape[:-1]:
            rows *= length  # Python integers: the product of forged lengths cannot overflow
        return rows


def _read_tensor_info(reader: _Reader) -> _TensorInfo:
    name = reader.string()
    dimensions = reader.uint32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise damaged(reader.path, f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reader.uint64() for _ in range(dimensions))[::-1]
    if min(shape) < 1:
        raise damaged(reader.path, f"tensor {name!r} has the impossible shape {shape}")
    number = reader.uint32()
    if number not in FORMATS_BY_NUMBER:
        raise UnsupportedModelError(
            f"{reader.path.name}: tensor {name!r} has the unsupported type number {number}. "
            f"Supported are {', '.join(FORMATS)}: quantize the model to one of them."
        )
    form = FORMATS_BY_NUMBER[number]
    if shape[-1] % form.block_size:
        raise damaged(
            reader.path, f"tensor {name!r} has rows of {shape[-1]} values, not whole {form.kind} blocks"
        )
    return _TensorInfo(name, shape, form, reader.uint64())


def _map_tensors(
    reader: _Reader, metadata: dict[str, MetadataValue], infos: list[_TensorInfo]
) -> dict[str, GgufTensor]:
    """Views of the tensors' bytes, after checking that each is inside the file and none overlap."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise damaged(reader.path, f"general.alignment is {alignment!r}, not a power of two of at least 8")
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end_of_previous, previous = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        length = info.rows * info.row_bytes
        if info.name in tensors:
            raise damaged(reader.path, f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            raise damaged(reader.path, f"tensor {info.name!r} is not aligned to {alignment} bytes")
        if info.offset < end_of_previous:
            raise damaged(reader.path, f"tensors {previous!r} and {info.name!r} overlap")
        if length > reader.size - data_start - info.offset:
            raise damaged(
                reader.path,
                f"tensor {info.name!r} should end at byte {data_start + info.offset + length}, "
                f"but the file has {reader.size}",
            )
        start = data_start + info.offset
        data = reader.content[start : start + length].reshape(info.rows, info.row_bytes)
        tensors[info.name] = GgufTensor(info.shape, info.form.kind, data)
        end_of_previous, previous = info.offset + length, info.name
    return tensors
