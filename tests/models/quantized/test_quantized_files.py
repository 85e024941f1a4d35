"""Quantized safetensors: each format is read as it is defined, and what is not read is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from paceline.backends.cpu import CpuBackend
from paceline.errors import CheckpointError, ModelError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint
from paceline.models.gguf.blocks import dequantize
from paceline.models.needs import model_needs
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive
from tests.models.quantized import packers
from tests.models.quantized.files import FORMATS, FP8, GPTQ, VALUES, save, write
from tests.models.quantized.packers import Packed, compressed

# formats whose matrices are blocks of GGUF, value for value, or, of Q4_1, nearly
BLOCKS = {"w4a16": "Q4_0", "gptq": "Q4_0", "w8a16": "Q8_0", "int8": "Q8_0"}
BLOCKS |= dict.fromkeys(("awq", "w4a16-zeros"), "Q4_1")


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    config, pack = FORMATS[name]
    expected = write(tmp_path, config, pack)
    found = load_checkpoint(tmp_path).tensors
    assert set(found) == set(expected)
    for key, values in expected.items():
        tensor = found[key]
        np.testing.assert_array_equal(tensor.float32(), values.numpy())
        in_blocks = dequantize(tensor.kind, tensor.blocks()).reshape(tensor.shape)
        error = float(values.abs().max()) * 2**-10 if tensor.kind == "Q4_1" else 0
        np.testing.assert_allclose(in_blocks, values, rtol=0, atol=error)
        part = slice(3, 29)  # across words, groups and tiles
        np.testing.assert_array_equal(tensor.take_rows(part).float32(), values[part].numpy())
        if key.endswith("up_proj.weight"):
            assert tensor.kind == BLOCKS.get(name, "F32")


@pytest.mark.parametrize("name", ["fp8-block", "awq", "gptq"])
def test_it_runs_as_the_same_values_in_float32_do(name: str, tmp_path: Path) -> None:
    expected = write(tmp_path, *FORMATS[name])
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(VALUES))
    safetensors.torch.save_file(expected, dense / "model.safetensors")
    logits = [_logits(load_checkpoint(folder)) for folder in (tmp_path, dense)]
    np.testing.assert_array_equal(*logits)


def _logits(checkpoint: Checkpoint) -> np.ndarray:
    """What the cpu backend gives for a prompt, with its weights in float32."""
    (request,) = drive(CpuBackend.load(checkpoint, quantization="none", threads=1, max_rows=8), pages_each=1)
    return request.run([5, 9, 2, 7])


def test_fp8_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    # of whole blocks: transformers divides a matrix evenly among its scales
    expected = write(tmp_path, *FORMATS["fp8-block"], VALUES | {"intermediate_size": 256})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported, only fp8, awq, gptq, compressed",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ of 4 bits in the order 'gemv'"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (compressed("marlin-24"), "format marlin-24 are not read"),
        (
            compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights",
        ),
        (compressed("dense") | {"transform_config": {"config_groups": {"u": {}}}}, "rotated"),
        (FP8 | {"weight_block_size": [128]}, "only of two sizes"),
        ({"group_size": 64, "bits": 4}, r"quant_method '\(none is named, as in MLX\)'"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "quant_algo 'MXFP8' is not read, only FP8"),
        (
            GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "packing_format 'auto_round:llm_compressor'",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, {}, config)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        load_checkpoint(tmp_path)
    assert "GGUF" in str(error.value)


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        (
            "fp8-block",
            "weight_scale_inv",
            lambda scale: scale[:, :0].clone() if scale.shape[1] > 1 else scale[:0],
        ),
        ("fp8-channel", "weight_scale", None),
        ("awq", "qzeros", lambda words: words[:, 1:].clone()),
        ("gptq", "g_idx", lambda groups: groups + 7),
        ("w4a16", "weight_shape", lambda shape: shape * 2),
        ("w4a16", "weight_packed", lambda words: words.float()),
        ("int8", "weight_scale", lambda scale: scale[1:].clone()),
    ],
)
def test_parts_that_do_not_fit_each_other_are_damage(
    name: str, part: str, change: Callable[[torch.Tensor], torch.Tensor] | None, tmp_path: Path
) -> None:
    write(tmp_path, *FORMATS[name])
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    key = f"model.layers.0.mlp.up_proj.{part}"
    damaged = tensors.pop(key)
    save(tmp_path, tensors | ({key: change(damaged)} if change else {}), FORMATS[name][0])
    with pytest.raises(CheckpointError, match="fetch"):
        load_checkpoint(tmp_path)


def test_scales_of_activations_and_of_keys_and_values_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = write(tmp_path, *FORMATS["fp8-tensor"])
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn"
    tensors |= {f"{name}.q_proj.input_scale": torch.ones(()), f"{name}.k_scale": torch.ones(())}
    save(tmp_path, tensors, FORMATS["fp8-tensor"][0])
    assert set(load_checkpoint(tmp_path).tensors) == set(expected)
    assert "the KV cache is not quantized" in caplog.text


ALIASES = {  # configurations under which a format is published too
    "fp8-tensor": [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
    ],
    "fp8-channel": [{"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}],
    "fp8-block": [{"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}],
    "gptq": [
        GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "extra_config": {}},
        GPTQ | {"format": "gptq", "meta": {"quantizer": ["gptqmodel:4.0"]}, "pack_dtype": "int32"},
    ],
    "awq": [
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32}
    ],
}


@pytest.mark.parametrize(("name", "config"), [(name, own) for name in ALIASES for own in ALIASES[name]])
def test_formats_are_read_under_all_their_names(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    expected = write(tmp_path, config, FORMATS[name][1])
    found = load_checkpoint(tmp_path).tensors
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key].float32(), values.numpy())


def test_some_matrices_of_gptq_may_have_more_bits(tmp_path: Path) -> None:
    """As `dynamic` of GPTQModel and `extra_config` of AutoRound give them."""

    def pack(matrix: torch.Tensor) -> Packed:
        return packers.gptq(matrix, 8 if matrix.shape[0] == 160 else 4, True, False, 1)

    expected = write(tmp_path, GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, pack)
    found = load_checkpoint(tmp_path).tensors
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key].float32(), values.numpy())
    assert found["model.layers.0.mlp.up_proj.weight"].stored.kind == "GPTQ 8-bit"


OLD_FILES = {
    "quantize_config.json": ("gptq", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
    "quant_config.json": ("awq", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    "hf_quant_config.json": (
        "nvfp4-modelopt",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    ),
}


@pytest.mark.parametrize("file_name", OLD_FILES)
def test_older_files_say_it_beside_config_json(file_name: str, tmp_path: Path) -> None:
    name, config = OLD_FILES[file_name]
    expected = write(tmp_path, *FORMATS[name])
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    (tmp_path / file_name).write_text(json.dumps(config))
    key = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(load_checkpoint(tmp_path).tensors[key].float32(), expected[key].numpy())


def test_biases_that_older_gptq_files_have_are_zeros_or_an_error(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for every matrix, also of models without biases; and named its file by itself."""
    expected = write(tmp_path, *FORMATS["gptq"])
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    name = "model.layers.0.self_attn.q_proj"
    tensors |= {f"{name}.bias": torch.zeros(32, dtype=torch.float16)}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    file = tmp_path / "gptq_model-4bit-32g.safetensors"
    safetensors.torch.save_file(tensors, file)
    assert set(load_checkpoint(tmp_path).tensors) == set(expected)
    safetensors.torch.save_file(tensors | {f"{name}.bias": torch.ones(32)}, file)
    with pytest.raises(CheckpointError, match=r"does not have: .*q_proj\.bias"):
        load_checkpoint(tmp_path)


def test_an_unknown_method_beside_a_vision_model_is_named(tmp_path: Path) -> None:
    save(tmp_path, {}, {"quant_method": "bitsandbytes"}, {"text_config": VALUES, "model_type": "gemma3"})
    with pytest.raises(UnsupportedModelError, match="'bitsandbytes' is not supported"):
        load_checkpoint(tmp_path)


def test_what_it_needs_is_counted_from_what_backends_keep(tmp_path: Path) -> None:
    sizes, needs = {}, {}
    for name in ("gptq", "awq"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, *FORMATS[name])
        checkpoint = load_checkpoint(folder)
        stored = [tensor.stored for tensor in checkpoint.tensors.values()]
        sizes[name] = sum(entry.nbytes for entry in stored if entry.kind.endswith("4-bit"))
        needs[name] = {
            (need.backend, need.quantization): need.weights_bytes for need in model_needs(checkpoint, 1, 1)
        }
    matrices = 3 * 64 * 160 + 2 * 64 * 32 + 2 * 64 * 16
    assert sizes["awq"] == matrices * (4 + 20 / 32) / 8  # a float16 scale and 4 bits of zero for 32 values
    native, int8, plain = ("cpu", "native"), ("cpu", "int8"), ("torch", "none")
    assert needs["gptq"][native] == needs["awq"][native] < needs["awq"][int8]  # both keep their 4 bits
    assert needs["gptq"][plain] == needs["awq"][plain]


def test_without_a_quantization_config_codes_are_no_weights(tmp_path: Path) -> None:
    write(tmp_path, *FORMATS["int8"])
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    with pytest.raises(ModelError, match="I8"):
        load_checkpoint(tmp_path)
