"""Tiny models in every kind of quantized safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.models.families.config_reader import model_config
from tests.models.model_files import SIZES, random_tensors
from tests.models.quantized import packers
from tests.models.quantized.packers import Packed, compressed

# 160 is more than one FP8 block and no whole number of them
VALUES = SIZES | {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}

Format = tuple[dict[str, Any], Callable[[torch.Tensor], Packed]]
FORMATS: dict[str, Format] = {
    "fp8-tensor": (FP8, lambda matrix: packers.fp8(matrix, "tensor")),
    "fp8-channel": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda matrix: packers.fp8(matrix, "channel"),
    ),
    "fp8-block": (FP8 | {"weight_block_size": [128, 128]}, lambda matrix: packers.fp8(matrix, "block")),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", type="float", group_size=16),
        lambda matrix: packers.fp4(matrix, "compressed"),
    ),
    "nvfp4-modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda matrix: packers.fp4(matrix, "modelopt"),
    ),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", type="float", group_size=32),
        lambda matrix: packers.fp4(matrix, "mxfp4"),
    ),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), packers.int8),
    "w4a16": (compressed("pack-quantized"), lambda matrix: packers.packed(matrix, 4, True)),
    "w4a16-zeros": (compressed("pack-quantized"), lambda matrix: packers.packed(matrix, 4, False)),
    "w8a16": (compressed("pack-quantized", num_bits=8), lambda matrix: packers.packed(matrix, 8, True)),
    "w8a16-zeros": (
        compressed("pack-quantized", num_bits=8),
        lambda matrix: packers.packed(matrix, 8, False),
    ),
    "w4a16-order": (
        compressed("pack-quantized", actorder="group"),
        lambda matrix: packers.packed(matrix, 4, True, packers.shuffled(packers.runs(matrix.shape[1]))),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"}, packers.awq),
    "gptq": (GPTQ, lambda matrix: packers.gptq(matrix, 4, True, False, 1)),
    "gptq-order": (GPTQ | {"desc_act": True}, lambda matrix: packers.gptq(matrix, 4, False, True, 1)),
    "gptq-v2-8-bits": (
        GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"},
        lambda matrix: packers.gptq(matrix, 8, False, False, 0),
    ),
    "gptq-2-bits": (GPTQ | {"bits": 2}, lambda matrix: packers.gptq(matrix, 2, False, False, 1)),
}
WORDS = {
    "fp8-tensor": "FP8, one scale",
    "fp8-channel": "FP8, a scale by row",
    "fp8-block": "FP8, a scale by block of 128×128",
    "nvfp4": "compressed-tensors NVFP4",
    "nvfp4-modelopt": "Model Optimizer NVFP4",
    "mxfp4": "compressed-tensors MXFP4",
    "int8": "compressed-tensors w8a8",
    "w4a16": "compressed-tensors w4a16, symmetric",
    "w4a16-zeros": "compressed-tensors w4a16 with zero points",
    "w8a16": "compressed-tensors w8a16, symmetric",
    "w8a16-zeros": "compressed-tensors w8a16 with zero points",
    "w4a16-order": "compressed-tensors w4a16 in activation order",
    "awq": "AWQ 4 bits, zero points",
    "gptq": "GPTQ 4 bits, symmetric",
    "gptq-order": "GPTQ 4 bits, `desc_act`",
    "gptq-v2-8-bits": "GPTQ 8 bits, zero points",
    "gptq-2-bits": "GPTQ 2 bits",
}


def write(
    folder: Path,
    config: dict[str, Any],
    pack: Callable[[torch.Tensor], Packed],
    sizes: dict[str, Any] = VALUES,
) -> dict[str, torch.Tensor]:
    """Write a tiny model whose layers' matrices are packed; the values that they hold, by name."""
    stored, expected = {}, {}
    for name, array in random_tensors(model_config(sizes, "config.json")).items():
        tensor = torch.from_numpy(array)
        expected[name] = stored[name] = tensor
        if name.endswith("_proj.weight"):
            tensors, expected[name] = pack(tensor)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in tensors.items()}
    save(folder, stored, config, sizes)
    return expected


def save(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], sizes: dict[str, Any] = VALUES
) -> None:
    (folder / "config.json").write_text(json.dumps(sizes | {"quantization_config": config}))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
