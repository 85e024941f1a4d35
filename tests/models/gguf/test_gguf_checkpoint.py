"""A GGUF file as a checkpoint: the same config, names and values as the folder it was converted from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import RopeConfig
from paceline.models.gguf import reader as gguf_files
from paceline.models.gguf.checkpoint import gguf_checkpoint
from paceline.models.gguf.reader import GgufFile, read_gguf
from paceline.models.registry import load_checkpoint, load_tokenizer, resolve
from paceline.models.transformer.rope import rope_frequencies
from tests.models.model_files import MODELS, config_of, random_tensors, write_gguf


def converted(folder: Path, model: str, kind: str = "F32", **extra: np.ndarray) -> GgufFile:
    tensors = random_tensors(config_of(model))
    named = {name.replace("__", "."): tensor for name, tensor in extra.items()}
    return read_gguf(write_gguf(folder / "model.gguf", model, tensors, kind, named))


def test_longrope_is_read_from_the_tensors_that_hold_it(tmp_path: Path) -> None:
    short, long = np.array([1, 1.5, 2, 3], np.float32), np.array([1, 2, 4, 8], np.float32)
    file = converted(tmp_path, "phi3", rope_factors_short__weight=short, rope_factors_long__weight=long)
    file.metadata["phi3.rope.scaling.original_context_length"] = 32
    file.metadata["phi3.rope.scaling.attn_factor"] = 1.25
    rope = gguf_checkpoint(file).config.rope
    assert (rope.scaling, rope.original_max_position, rope.context) == ("longrope", 32, 128)
    assert (rope.attention_factor, rope.short_divisors) == (1.25, tuple(short))
    plain = rope_frequencies(RopeConfig(rope.theta), 8)
    assert rope_frequencies(rope, 8).tolist() == (plain / long).tolist()
    assert rope_frequencies(replace(rope, context=32), 8).tolist() == (plain / short).tolist()


@pytest.mark.parametrize("model", MODELS)
def test_config_names_and_values_survive_the_conversion(tmp_path: Path, model: str) -> None:
    config = config_of(model)
    checkpoint = gguf_checkpoint(converted(tmp_path, model))
    eps = float(np.float32(config.rms_norm_eps))  # the file has float32
    assert checkpoint.config == replace(config, rms_norm_eps=eps)
    tensors = random_tensors(config)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].float32(), tensor, err_msg=name)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def parts_of(folder: Path) -> list[Path]:
    """A llama model in parts, as gguf writes them."""
    write_gguf(folder / "model.gguf", "llama", random_tensors(config_of("llama")), tensors_each=8)
    return sorted(folder.glob("model-*-of-*.gguf"))


def test_a_split_file_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    assert len(parts) > 2
    for part in (parts[0], parts[-1]):
        checkpoint = load_checkpoint(part)
        for name, tensor in random_tensors(config_of("llama")).items():
            np.testing.assert_array_equal(checkpoint.tensors[name].float32(), tensor)
    assert load_tokenizer(parts[1]).encode("abc")


def test_parts_that_do_not_fit_together_are_reported(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    alone = tmp_path / "part.gguf"
    shutil.copy(parts[0], alone)
    with pytest.raises(CheckpointError, match="its name is not NAME-00001-of-0000N"):
        read_gguf(alone)
    kept = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match="does not say that it is part 2 of"):
        read_gguf(parts[0])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=f"{parts[1].name} is not beside it. Fetch all parts"):
        read_gguf(parts[0])
    parts[1].write_bytes(kept)
    read_gguf(parts[0])


@pytest.mark.parametrize("problem", ["another part has the tensor", "it says that its parts have"])
def test_parts_that_share_or_lack_tensors_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    parts = parts_of(tmp_path)
    read = gguf_files._read_part
    others = read(parts[0]).tensors if "another" in problem else {}

    def with_other_tensors(path: Path) -> GgufFile:
        """The last part has the tensors of the first, or none."""
        return replace(read(path), tensors=others) if path == parts[-1] else read(path)

    monkeypatch.setattr(gguf_files, "_read_part", with_other_tensors)
    with pytest.raises(CheckpointError, match=problem):
        read_gguf(parts[0])


@pytest.mark.parametrize("model", MODELS)
def test_blocks_have_the_row_order_of_the_values(tmp_path: Path, model: str) -> None:
    checkpoint = gguf_checkpoint(converted(tmp_path, model, kind="Q4_1"))
    for name, tensor in checkpoint.tensors.items():
        blocks = tensor.blocks()
        assert blocks.dtype == np.uint8
        rows = tensor.float32().reshape(len(blocks), -1)
        decoded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[tensor.kind])
        np.testing.assert_array_equal(decoded.reshape(rows.shape), rows, err_msg=name)


def test_averages_of_shared_experts_are_refused(tmp_path: Path) -> None:
    file = converted(tmp_path, "cohere2_moe")
    file.metadata["cohere2moe.expert_shared_count"] = 1
    with pytest.raises(UnsupportedModelError, match="strategy 'average'"):
        gguf_checkpoint(file)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    extra = {"blk__2__attn_norm__weight": np.ones(32), "blk__2__nextn__eh_proj__weight": np.ones((32, 64))}
    extra = {name: values.astype(np.float32) for name, values in extra.items()}
    file = converted(tmp_path, "glm4_moe", **extra)
    with pytest.raises(CheckpointError, match="nextn"):
        gguf_checkpoint(file)
    file.metadata.update({"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1})
    assert gguf_checkpoint(file).config.num_layers == 2


def test_llama_3_frequency_divisors_come_from_their_tensor(tmp_path: Path) -> None:
    divisors = np.array([1, 1, 2.5, 8], dtype=np.float32)
    file = converted(tmp_path, "llama", rope_freqs__weight=divisors)
    assert gguf_checkpoint(file).config.rope.frequency_divisors == (1, 1, 2.5, 8)


@pytest.mark.parametrize("divisors", [[1, 1, 1], [1, 1, 0, 8], [1, 1, np.nan, 8]])
def test_impossible_frequency_divisors_are_refused(tmp_path: Path, divisors: list[float]) -> None:
    file = converted(tmp_path, "llama", rope_freqs__weight=np.array(divisors, dtype=np.float32))
    with pytest.raises(CheckpointError, match="rope_freqs"):
        gguf_checkpoint(file)


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    file = converted(tmp_path, "llama")
    file.metadata.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    rope = gguf_checkpoint(file).config.rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", "architecture 'mamba' is not supported. Supported are llama"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count is 4"),
        ("llama.attention.value_length", 16, "value_length is 16"),
    ],
)
def test_features_that_we_do_not_run_are_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    file = converted(tmp_path, "llama")
    file.metadata[key] = value  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=message):
        gguf_checkpoint(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 3, "lacks the tensor model.layers.2"),
        ("llama.block_count", 1, "tensors that a llama model of this configuration does not have"),
        ("llama.block_count", 1 << 40, "block_count|num_hidden_layers"),
        ("llama.embedding_length", 31, r"asks for \[80, 31\]"),
        ("llama.attention.head_count", 3, "heads"),
        ("llama.attention.head_count", 0, "heads"),
        ("llama.attention.head_count_kv", "two", "heads"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "rms_norm_eps"),
        ("llama.context_length", True, "max_position_embeddings"),
    ],
)
def test_metadata_that_lies_is_reported(tmp_path: Path, key: str, value: object, message: str) -> None:
    file = converted(tmp_path, "llama")
    file.metadata[key] = value  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=message):
        gguf_checkpoint(file)


def test_a_tensor_that_no_known_model_has_is_reported(tmp_path: Path) -> None:
    file = converted(tmp_path, "llama", blk__0__ssm_a__weight=np.ones(4, dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a"):
        gguf_checkpoint(file)


@pytest.mark.real
def test_the_default_model_is_what_it_is_said_to_be() -> None:
    checkpoint = gguf_checkpoint(read_gguf(resolve("smollm2-135m")))
    config = checkpoint.config
    assert (config.family, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.tie_embeddings, config.rope.theta) == (49152, True, 100000.0)
    assert checkpoint.tensors["model.embed_tokens.weight"].kind == "Q8_0"
    assert checkpoint.tensors["model.layers.29.mlp.down_proj.weight"].kind == "Q4_1"
