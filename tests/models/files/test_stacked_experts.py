"""Tensors that files do not store one by one: experts as one tensor, and a block beside the layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from paceline.models.registry import load_checkpoint
from tests.tiny import random_model, save_checkpoint
from tests.tiny_families import TORCH_FAMILIES

EXPERTS, HIDDEN, WIDTH, GROUP = 3, 64, 32, 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint("gpt-oss", tmp_path)


def test_columns_of_gate_and_up_alternate(folder: Path) -> None:
    tensors = load_checkpoint(folder).tensors
    experts = random_model("gpt-oss").model.layers[1].mlp.experts
    for part, columns in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        weight = tensors[f"model.layers.1.mlp.experts.4.{part}_proj.weight"]
        np.testing.assert_array_equal(weight.float32(), experts.gate_up_proj[4, :, columns].T.detach())
        assert weight.blocks().tobytes() == weight.float32().tobytes()
        bias = tensors[f"model.layers.1.mlp.experts.4.{part}_proj.bias"]
        np.testing.assert_array_equal(bias.float32(), experts.gate_up_proj_bias[4, columns].detach())
    down = tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    np.testing.assert_array_equal(down.float32(), experts.down_proj[2].T.detach())


def test_mxfp4_files_have_the_values_that_transformers_unpacks(folder: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": EXPERTS}
    model = random_model_of(sizes)
    stored = dict(model.state_dict())
    generator = torch.Generator().manual_seed(3)
    unpacked = {}
    for layer in range(model.config.num_hidden_layers):
        for name, out, depth in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            shape = (EXPERTS, out, depth // GROUP, GROUP // 2)
            blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 130, shape[:3], generator=generator, dtype=torch.uint8)
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            del stored[key]
            unpacked[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(
        json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    tensors = load_checkpoint(folder).tensors
    for layer in range(model.config.num_hidden_layers):
        key = f"model.layers.{layer}.mlp.experts."
        for expert in range(EXPERTS):
            own = unpacked[f"{key}gate_up_proj"][expert].T
            found = [tensors[f"{key}{expert}.{part}_proj.weight"].float32() for part in ("gate", "up")]
            np.testing.assert_array_equal(np.stack(found, 1).reshape(own.shape), own)
            down = tensors[f"{key}{expert}.down_proj.weight"]
            np.testing.assert_array_equal(down.float32(), unpacked[f"{key}down_proj"][expert].T)
            assert down.blocks().tobytes() == down.float32().tobytes()


def random_model_of(sizes: dict[str, int]) -> Any:
    """A random gpt-oss model of other sizes."""
    from transformers import AutoModelForCausalLM

    config = TORCH_FAMILIES["gpt-oss"].config()
    config.update(sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_the_block_after_the_last_layer_is_no_part_of_a_glm4_model(tmp_path: Path) -> None:
    folder = save_checkpoint("glm4-moe", tmp_path)
    path = folder / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    stored["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    safetensors.torch.save_file(stored, path)
    found = load_checkpoint(folder)
    assert list(found.mtp) == ["model.layers.3.eh_proj.weight"]
    assert not any(name.startswith("model.layers.3.") for name in found.tensors)


def test_published_qwen3_5_files_have_experts_as_one_tensor_beside_a_vision_model(tmp_path: Path) -> None:
    expected = load_checkpoint(save_checkpoint("qwen3-5-moe", tmp_path / "single"))
    model = random_model("qwen3-5-moe")  # whose own parameters are stacked
    stored = {
        name.replace("model.", "model.language_model."): weight.contiguous()
        for name, weight in model.state_dict().items()
    }
    stored |= {"model.visual.patch_embed.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    folder = tmp_path / "stacked"
    folder.mkdir()
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    text = json.loads((tmp_path / "single" / "config.json").read_text())
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    found = load_checkpoint(folder)
    assert found.config == expected.config
    assert found.tensors.keys() == expected.tensors.keys()
    assert list(found.mtp) == ["mtp.fc.weight"]
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].float32(), tensor.float32())
    up = found.tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    np.testing.assert_array_equal(up.take_rows(slice(3, 9)).float32(), up.float32()[3:9])
    assert up.blocks().tobytes() == up.float32().tobytes()
