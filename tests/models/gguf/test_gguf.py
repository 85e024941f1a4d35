"""The GGUF reader: what is written is read, and nothing in a file is trusted."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, PacelineError, UnsupportedModelError
from paceline.models.gguf.checkpoint import gguf_checkpoint
from paceline.models.gguf.reader import read_gguf
from paceline.models.gguf.tokenizer import gguf_tokenizer
from tests.models.model_files import config_of, random_tensors, write_gguf


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small llama file with quantized matrices."""
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    return write_gguf(path, "llama", random_tensors(config_of("llama")), kind="Q4_0").read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, number: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", number) + value


def tensor_info(name: str, shape: tuple[int, ...], number: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)
    return text(name) + numbers


def gguf_bytes(
    entries: list[bytes], infos: list[bytes], data: bytes = b"", version: int = 3, padding: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(entries)) + b"".join(entries + infos)
    return head + b"\0" * (-len(head) % padding) + data


def read(folder: Path, content: bytes) -> object:
    path = folder / "made.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_metadata_of_every_type_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    written = {"uint8": 7, "int8": -7, "uint16": 700, "int16": -700, "uint32": 70000, "int32": -70000}
    written |= {"uint64": 1 << 40, "int64": -(1 << 40)}
    for name, value in written.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_float32("float32", 1.5)
    writer.add_float64("float64", 1e-300)
    writer.add_bool("bool", True)
    writer.add_string("string", "ünï")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["a", "", "日本"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(path).metadata
    for name, value in written.items():
        assert metadata[name] == value
        assert type(metadata[name]) is int
    assert (metadata["float32"], metadata["float64"]) == (1.5, 1e-300)
    assert metadata["bool"] is True
    assert metadata["string"] == "ünï"
    assert metadata["texts"] == ["a", "", "日本"]
    assert metadata["numbers"].tolist() == [1, 2, 3]  # type: ignore[union-attr]


def test_version_2_and_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 5, 6)
    nested = entry("nested", 9, struct.pack("<IQ", 9, 1) + inner)
    file = read(tmp_path, gguf_bytes([nested], [], version=2))
    assert [array.tolist() for array in file.metadata["nested"]] == [[5, 6]]  # type: ignore[attr-defined]


def test_tensors_have_the_values_and_kinds_that_were_written(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("qwen2"))
    file = read_gguf(write_gguf(tmp_path / "model.gguf", "qwen2", tensors, kind="Q8_0"))
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert {tensor.name for tensor in reader.tensors} == set(file.tensors)
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type.name
        assert ours.shape == tuple(int(length) for length in tensor.shape[::-1])
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.float32(), expected)


ONE_FLOAT = struct.pack("<f", 1.0) * 8
DAMAGE = {
    "is not a GGUF file": b"PK\3\4" + b"\0" * 60,
    "version 1": gguf_bytes([], [], version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "ends at byte": b"GGUF\3\0",
    "claims 4611686018427387904 tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0),
    "metadata entries, more than": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40),
    "but byte 9223372036854775": gguf_bytes([struct.pack("<Q", 1 << 63) + b"key and more bytes"], []),
    "array items, more than": gguf_bytes([entry("a", 9, struct.pack("<IQ", 8, 1 << 60))], []),
    "unknown type 99": gguf_bytes([entry("a", 99, b"")], []),
    "not UTF-8": gguf_bytes([entry("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []),
    "nested deeper": gguf_bytes([entry("a", 9, struct.pack("<IQ", 9, 1) * 6)], []),
    "key 'a' appears twice": gguf_bytes([entry("a", 0, b"1"), entry("a", 0, b"2")], []),
    "0 dimensions": gguf_bytes([], [tensor_info("t", ()) + b"\0" * 8]),
    "9 dimensions": gguf_bytes([], [tensor_info("t", (1,) * 9)]),
    "impossible shape": gguf_bytes([], [tensor_info("t", (8, 0))]),
    "not whole Q4_K blocks": gguf_bytes([], [tensor_info("t", (100,), number=12)]),
    "should end at byte": gguf_bytes([], [tensor_info("t", (9,))], ONE_FLOAT),
    "'t' should end": gguf_bytes([], [tensor_info("t", (1 << 63, 1 << 63, 1 << 63))], ONE_FLOAT),
    "but the file has": gguf_bytes([], [tensor_info("t", (8,), offset=1 << 62)], ONE_FLOAT),
    "is not aligned": gguf_bytes([], [tensor_info("t", (2,), offset=4)], ONE_FLOAT),
    "overlap": gguf_bytes([], [tensor_info("t", (8,)), tensor_info("u", (8,))], ONE_FLOAT),
    "'t' appears twice": gguf_bytes(
        [], [tensor_info("t", (8,)), tensor_info("t", (8,), offset=32)], ONE_FLOAT * 2
    ),
    "unsupported type number 19": gguf_bytes([], [tensor_info("t", (256,), number=19)]),
    "not a power of two": gguf_bytes([entry("general.alignment", 4, struct.pack("<I", 48))], []),
    "its name is not NAME-00001-of-0000N.gguf": gguf_bytes(
        [entry("split.count", 2, struct.pack("<H", 3))], []
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_each_kind_of_damage_is_reported_and_costs_no_memory(tmp_path: Path, message: str) -> None:
    tracemalloc.start()
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(tmp_path, DAMAGE[message])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_an_empty_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="empty"):
        read(tmp_path, b"")
    with pytest.raises(CheckpointError, match="Cannot read"):
        read_gguf(tmp_path / "none.gguf")


def use_whole_file(folder: Path, content: bytes) -> None:
    """Read everything that a loader would: header, config, names, every value, tokenizer."""
    path = folder / "changed.gguf"
    path.write_bytes(content)
    file = read_gguf(path)
    for tensor in gguf_checkpoint(file).tensors.values():
        assert tensor.float32().shape == tensor.shape
    gguf_tokenizer(file).encode("abc")


def loads_or_says_why(use: Callable[[Path, bytes], None], folder: Path, content: bytes) -> bool:
    """Whether it loaded. Only a PacelineError may come out, and memory stays in proportion."""
    tracemalloc.start()
    try:
        use(folder, content)
        return True
    except PacelineError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed")


def test_the_file_loads_when_nothing_is_changed(sound: bytes, folder: Path) -> None:
    assert loads_or_says_why(use_whole_file, folder, sound)


@settings(max_examples=200)
@given(data=st.data())
def test_a_file_cut_anywhere_never_loads(sound: bytes, folder: Path, data: st.DataObject) -> None:
    # the writer pads the last tensor, so the cut must go into what is needed
    length = data.draw(st.integers(0, len(sound) - 32))
    assert not loads_or_says_why(use_whole_file, folder, sound[:length])


@settings(max_examples=200)
@given(data=st.data())
def test_changed_bytes_load_or_are_reported(sound: bytes, folder: Path, data: st.DataObject) -> None:
    changed = bytearray(sound)
    # most of the changes go where the structure is: the header is small before the data
    places = st.one_of(st.integers(0, 4000), st.integers(0, len(sound) - 1))
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        changed[place] = byte
    loads_or_says_why(use_whole_file, folder, bytes(changed))


@settings(max_examples=200)
@given(data=st.data())
def test_lying_numbers_load_or_are_reported(sound: bytes, folder: Path, data: st.DataObject) -> None:
    # overwrite a length, count, dimension or offset by another number
    numbers = st.one_of(
        st.integers(0, 2**64 - 1), st.integers(0, 300), st.sampled_from([2**63, 2**32, 2**31])
    )
    place = data.draw(st.integers(4, 6000))
    changed = sound[:place] + struct.pack("<Q", data.draw(numbers)) + sound[place + 8 :]
    loads_or_says_why(use_whole_file, folder, changed)
