"""Folders of safetensors: what was saved is read, and nothing in a file is trusted."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, PacelineError, UnsupportedModelError
from paceline.models.families.config_reader import model_config
from paceline.models.families.table import FAMILIES
from paceline.models.files.file_layouts import LLAMA_FILES
from paceline.models.files.safetensors_files import read_safetensors, safetensors_checkpoint
from tests.models.model_files import MODELS, config_of, random_tensors, write_folder

# files that hold tensors as backends read them; the others are read from what transformers wrote
PLAIN = [model for model, values in MODELS.items() if FAMILIES[values["model_type"]].files == LLAMA_FILES]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model", PLAIN)
def test_a_saved_model_is_read_whole(tmp_path: Path, model: str, shards: int) -> None:
    tensors = random_tensors(config_of(model))
    checkpoint = safetensors_checkpoint(write_folder(tmp_path, model, tensors, shards))
    assert checkpoint.config == config_of(model)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].float32(), tensor)


def test_mixtral_experts_are_found_under_their_old_names(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("mixtral"))
    old = {}
    for name, tensor in tensors.items():
        renamed = name.replace(".mlp.", ".block_sparse_moe.")
        for new_part, old_part in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            renamed = renamed.replace(new_part, old_part)
        old[renamed] = tensor
    checkpoint = safetensors_checkpoint(write_folder(tmp_path, "mixtral", old))
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    np.testing.assert_array_equal(checkpoint.tensors[name].float32(), tensors[name])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_model_of_a_folder_with_a_vision_model(tmp_path: Path, prefix: str) -> None:
    tensors = random_tensors(config_of("llama"))
    stored = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    stored["vision_tower.encoder.weight"] = np.zeros((2, 2), dtype=np.float32)
    write_folder(tmp_path, "llama", stored)
    outer = {"model_type": "mistral3", "text_config": MODELS["llama"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = safetensors_checkpoint(tmp_path)
    assert found.config == config_of("llama")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found.tensors[name].float32(), tensor)


def test_joined_matrices_are_cut_and_their_blocks_too(tmp_path: Path) -> None:
    values = MODELS["llama"] | {"model_type": "phi3", "tie_word_embeddings": False}
    config = model_config(values, "config.json")
    tensors = random_tensors(config)
    stored = dict(tensors)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        joined = {"self_attn.qkv_proj": ("self_attn", "qkv"), "mlp.gate_up_proj": ("mlp", ("gate", "up"))}
        for whole, (block, parts) in joined.items():
            rows = [stored.pop(f"{name}{block}.{part}_proj.weight") for part in parts]
            stored[f"{name}{whole}.weight"] = np.concatenate(rows)
    write_folder(tmp_path, "llama", stored)
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = safetensors_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found.tensors[name].float32(), tensor)
        assert found.tensors[name].blocks().tobytes() == tensor.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_float_type_becomes_the_float32_that_torch_makes_of_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    safetensors.torch.save_file(
        {"x": values, "scalar": torch.tensor(2.5, dtype=dtype)}, tmp_path / "one.safetensors"
    )
    tensors = read_safetensors(tmp_path / "one.safetensors")
    np.testing.assert_array_equal(tensors["x"].float32(), values.float().numpy())
    assert tensors["x"].blocks().shape == (5, 7 * dtype.itemsize)
    assert tensors["scalar"].float32() == 2.5


def test_a_tied_model_may_carry_its_output_matrix_again(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("llama"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert "lm_head.weight" not in safetensors_checkpoint(write_folder(tmp_path, "llama", tensors)).tensors


def one_tensor(changes: dict[str, Any], data: bytes = b"\0" * 16) -> bytes:
    header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


DAMAGE = {
    "is empty": b"",
    "only 3 bytes": b"abc",
    "its header claims 4611686018427387904": struct.pack("<Q", 1 << 62) + b"{}",
    "not valid JSON": struct.pack("<Q", 3) + b"{x}",
    "not a JSON object": struct.pack("<Q", 2) + b"[]",
    "not valid JSON.*twice": struct.pack("<Q", 15) + b'{"x":1,"x":{} }',
    r"not valid JSON|recursion": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "entry of x is not an object": struct.pack("<Q", 7) + b'{"x":1}',
    "impossible shape": one_tensor({"shape": [-4]}),
    "an impossible shape or place": one_tensor({"shape": [True, 4]}),
    "shape or place": one_tensor({"data_offsets": [0]}),
    "should end at byte 20": one_tensor({"data_offsets": [0, 20]}),
    "should end at byte 0": one_tensor({"data_offsets": [16, 0]}),
    "does not fill": one_tensor({"shape": [1 << 62, 1 << 62]}),
    "which has 8": one_tensor({}, data=b"\0" * 8),
    "dtype 'F8_E4M3'": one_tensor({"dtype": "F8_E4M3", "shape": [16]}),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_each_kind_of_damage_is_reported(tmp_path: Path, message: str) -> None:
    path = tmp_path / "made.safetensors"
    path.write_bytes(DAMAGE[message])
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_safetensors(path)


def test_overlapping_tensors_are_reported(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"x": entry, "y": entry}).encode()
    (tmp_path / "made.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    with pytest.raises(CheckpointError, match="x and y overlap"):
        read_safetensors(tmp_path / "made.safetensors")


def test_what_is_missing_in_a_folder_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("qwen2"))
    write_folder(tmp_path, "qwen2", tensors, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 3 shards: model-00002-of-00003"):
        safetensors_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the tensor .* The file is incomplete"):
        safetensors_checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    (tmp_path / "consolidated.safetensors").touch()  # of another format
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        safetensors_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin can hold code and is never loaded"):
        safetensors_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        safetensors_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"x": "../../secret"}}, "not the name of a file here"),
        ({"weight_map": {"x": 5}}, "not the name of a file here"),
        ({"weight_map": []}, "no weight_map"),
        ([], "not a JSON object"),
    ],
)
def test_an_index_that_lies_is_reported(tmp_path: Path, index: object, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        safetensors_checkpoint(tmp_path)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("qwen2"))
    bias = tensors.pop("model.layers.1.self_attn.k_proj.bias")
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.1\.self_attn\.k_proj\.bias"):
        safetensors_checkpoint(write_folder(tmp_path, "qwen2", tensors))
    tensors["model.layers.1.self_attn.k_proj.bias"] = bias[:-1].copy()
    with pytest.raises(CheckpointError, match=r"has shape \[15\]; its configuration asks for \[16\]"):
        safetensors_checkpoint(write_folder(tmp_path, "qwen2", tensors))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return write_folder(folder, "llama", random_tensors(config_of("llama")))


@pytest.fixture(scope="module")
def changed(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(sound, tmp_path_factory.mktemp("changed") / "model"))


def loads_or_says_why(folder: Path) -> bool:
    """Whether it loaded; only a PacelineError may come out."""
    try:
        for tensor in safetensors_checkpoint(folder).tensors.values():
            assert tensor.float32().shape == tensor.shape
    except PacelineError:
        return False
    return True


def test_the_folder_loads_when_nothing_is_changed(sound: Path) -> None:
    assert loads_or_says_why(sound)


@settings(max_examples=150)
@given(data=st.data())
def test_a_file_cut_anywhere_never_loads(sound: Path, changed: Path, data: st.DataObject) -> None:
    content = (sound / "model.safetensors").read_bytes()
    (changed / "model.safetensors").write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert not loads_or_says_why(changed)


@settings(max_examples=150)
@given(data=st.data())
def test_changed_bytes_load_or_are_reported(sound: Path, changed: Path, data: st.DataObject) -> None:
    content = bytearray((sound / "model.safetensors").read_bytes())
    places = st.one_of(st.integers(0, 2500), st.integers(0, len(content) - 1))
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=6)):
        content[place] = byte
    (changed / "model.safetensors").write_bytes(bytes(content))
    loads_or_says_why(changed)


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(-2, 2**64), max_size=4),
    offsets=st.lists(st.one_of(st.integers(0, 64), st.integers(-(2**64), 2**64)), max_size=3),
    dtype=st.sampled_from(["F32", "F16", "BF16", "I64", "x", None]),
)
def test_lying_headers_load_or_are_reported(
    changed: Path, shape: list[int], offsets: list[int], dtype: str | None
) -> None:
    path = changed / "lying.safetensors"
    path.write_bytes(one_tensor({"shape": shape, "data_offsets": offsets, "dtype": dtype}, data=b"\0" * 64))
    with contextlib.suppress(PacelineError):
        for tensor in read_safetensors(path).values():
            assert tensor.float32().shape == tuple(shape)


@settings(max_examples=150)
@given(data=st.data())
def test_a_changed_config_loads_or_is_reported(sound: Path, changed: Path, data: st.DataObject) -> None:
    shutil.copy(sound / "model.safetensors", changed / "model.safetensors")
    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("ab", max_size=3))
    anything = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("type"), inner)
    )
    keys = [*MODELS["llama"], "attention_bias", "mlp_bias", "rope_scaling", "rope_parameters", "hidden_act"]
    values = MODELS["llama"] | {data.draw(st.sampled_from(keys)): data.draw(anything)}
    (changed / "config.json").write_text(json.dumps(values))
    loads_or_says_why(changed)
