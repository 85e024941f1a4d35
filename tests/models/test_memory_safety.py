"""GGUF and safetensors memory safety: what a file claims is checked before a byte is mapped or made."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.models.registry import load_checkpoint
from tests.models.files.test_safetensors_files import one_tensor
from tests.models.gguf.test_gguf import entry, gguf_bytes, tensor_info
from tests.models.model_files import MODELS, config_of, random_tensors, write_folder, write_gguf

HUGE = 1 << 62
ARRAY, UINT32, FLOAT32 = 9, 4, 0

GGUF = {
    "truncated": gguf_bytes([], [tensor_info("x", (64,))], b"\0" * 8),
    "huge tensor": gguf_bytes([], [tensor_info("x", (HUGE, 4))]),
    "huge count": b"GGUF" + struct.pack("<IQQ", 3, HUGE, HUGE),
    "huge text": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE),
    "huge array": gguf_bytes([entry("a", ARRAY, struct.pack("<IQ", UINT32, HUGE))], []),
    "offset that wraps around": gguf_bytes([], [tensor_info("x", (8,), offset=(1 << 64) - 32)], b"\0" * 32),
    "overlapping": gguf_bytes([], [tensor_info("x", (8,)), tensor_info("y", (8,))], b"\0" * 32),
    "arrays in arrays without an end": gguf_bytes(
        [entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000)], []
    ),
}
_ONE = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
_OVERLAP = json.dumps({"x": _ONE, "y": _ONE}).encode()
SAFETENSORS = {
    "truncated": one_tensor({}, data=b"\0" * 8),
    "huge tensor": one_tensor({"shape": [HUGE, HUGE]}),
    "huge header": struct.pack("<Q", HUGE) + b"{}",
    "negative offset": one_tensor({"data_offsets": [-16, 0]}),
    "overlapping": struct.pack("<Q", len(_OVERLAP)) + _OVERLAP + b"\0" * 16,
    "lists in lists without an end": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


def refusal(path: Path) -> PacelineError:
    """The error that the model at this path must give, without much memory spent on it."""
    tracemalloc.start()
    try:
        with pytest.raises(PacelineError) as caught:
            load_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    return caught.value


@pytest.mark.parametrize("damage", GGUF)
def test_gguf_memory_safety(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "made.gguf"
    path.write_bytes(GGUF[damage])
    refusal(path)


@pytest.mark.parametrize("damage", SAFETENSORS)
def test_safetensors_memory_safety(tmp_path: Path, damage: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS[damage])
    refusal(tmp_path)


def test_the_product_of_very_many_dimensions_is_not_computed(tmp_path: Path) -> None:
    """With 200,000 of them it would take hours."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    (tmp_path / "model.safetensors").write_bytes(one_tensor({"shape": [HUGE] * 9}))
    assert "impossible shape" in str(refusal(tmp_path))


@pytest.mark.parametrize("name", ["a" * 300, "..", "", "a\0b", "\ud800", "../model.safetensors", "/dev/zero"])
def test_an_index_that_names_what_is_no_file_here(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    refusal(tmp_path)


def test_a_config_without_an_end_is_not_read(tmp_path: Path) -> None:
    """A pipe that nobody writes to, a device, a sparse file: a clear error at once."""
    config = tmp_path / "config.json"
    os.mkfifo(config)
    assert "not a regular file" in str(refusal(tmp_path))
    config.unlink()
    config.symlink_to("/dev/zero")
    assert "not a regular file" in str(refusal(tmp_path))
    config.unlink()
    config.touch()
    os.truncate(config, 1 << 40)
    assert "at most" in str(refusal(tmp_path))


def test_an_absurd_context_length_is_refused(tmp_path: Path) -> None:
    """Backends have tables of all positions: 2 ** 31 of them would be 32 GiB for the tiniest head."""
    write_folder(tmp_path, "llama", random_tensors(config_of("llama")))
    (tmp_path / "config.json").write_text(
        json.dumps({**MODELS["llama"], "max_position_embeddings": 2**31 - 1})
    )
    assert "max_position_embeddings" in str(refusal(tmp_path))


def test_symbolic_link_loops_are_refused(tmp_path: Path) -> None:
    """An index whose shard is a link to itself or to the index: no endless loop, a clear error."""
    write_folder(tmp_path, "llama", random_tensors(config_of("llama")), shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(shard)
    refusal(tmp_path)
    shard.unlink()
    shard.symlink_to(tmp_path / "model.safetensors.index.json")
    refusal(tmp_path)


def test_sound_files_load(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("llama"))
    (tmp_path / "folder").mkdir()
    load_checkpoint(write_folder(tmp_path / "folder", "llama", tensors))
    load_checkpoint(write_gguf(tmp_path / "sound.gguf", "llama", tensors))
