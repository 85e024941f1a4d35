"""Folders as peft saves them for a tiny checkpoint, and the checkpoint with the same changes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

RANK, ALPHA = 3, 12.0


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> Path:
    """A folder as peft saves it."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def save_adapter_and_merged(
    model: Path,
    folder: Path,
    wanted: str,
    scale: float = 0.2,
    is_swapped: Callable[[str], bool] | None = None,
) -> Path:
    """Write `folder`/adapter, random, for the file's matrices whose names `wanted` matches; and
    `folder`/merged, the checkpoint with the products added. Matrices of all experts in one parameter
    [experts, a, b] are changed as peft's target_parameters are."""
    file = model / "model.safetensors"
    tensors, generator = safetensors.torch.load_file(file), torch.Generator().manual_seed(5)
    sides: dict[str, torch.Tensor] = {}
    for name, weight in sorted(tensors.items()):
        if not re.search(wanted, name):
            continue
        module = "base_model.model." + name.removesuffix(".weight")
        if weight.dim() == 3:
            module = module.rpartition(".")[0] + (".base_layer" if "down_proj" in name else "")
            experts, inputs, outputs = weight.shape
            a = scale * torch.randn((experts, RANK, inputs), generator=generator)
            b = scale * torch.randn((experts, outputs, RANK), generator=generator)
            tensors[name] = weight + ALPHA / RANK * (b @ a).transpose(1, 2)
            stored = a.reshape(-1, inputs), b.permute(1, 2, 0).reshape(outputs, -1).contiguous()
            if is_swapped is not None and is_swapped(name):
                stored = b.transpose(1, 2).reshape(-1, outputs), a.permute(2, 1, 0).reshape(inputs, -1)
        else:
            a = scale * torch.randn((RANK, weight.shape[1]), generator=generator)
            b = scale * torch.randn((weight.shape[0], RANK), generator=generator)
            tensors[name] = weight + ALPHA / RANK * (b @ a)
            stored = a, b
        sides |= {f"{module}.lora_A.weight": stored[0], f"{module}.lora_B.weight": stored[1].contiguous()}
    assert sides
    folder.mkdir(exist_ok=True)
    save_adapter(folder / "adapter", sides)
    (folder / "merged").mkdir()
    for part in model.iterdir():
        if part.suffix == ".json":
            (folder / "merged" / part.name).write_bytes(part.read_bytes())
    safetensors.torch.save_file(tensors, folder / "merged" / file.name, metadata={"format": "pt"})
    return folder
