"""Writes tests/lossless/peft_folders anew, with peft: `python -m tests.lossless.write_peft_folders`.

Each folder is as peft saves it, for a tiny model. deltas.json has what peft adds to each of the model's
parameters: a sum over its numbers, and one in which each has another weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tests.tiny import save_checkpoint

FOLDERS = Path(__file__).parent / "peft_folders"
# by folder: the family of the model, and the options of LoraConfig
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {
            "r": 3,
            "lora_alpha": 12,
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"q_proj": 5, r"^model\.layers\.1\.mlp\.up_proj": 2},
            "alpha_pattern": {"v_proj": 7, "layers.2.self_attn.q_proj": 3},
        },
    ),
    "root": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": r".*layers\.[02]\.(self_attn\.o_proj|mlp\.gate_proj)",
        },
    ),
    "all-linear": (
        "llama",
        {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    ),
    "joined": ("phi3", {"r": 2, "lora_alpha": 3, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "experts": (
        "qwen3-moe",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}


def sums(change: np.ndarray) -> list[float]:
    """Two numbers that tell one array from another."""
    numbers = change.astype(np.float64).reshape(-1)
    return [float(numbers.sum()), float(numbers @ np.cos(np.arange(len(numbers))))]


def write(name: str, family: str, options: dict[str, Any], model_folder: Path) -> None:
    """A folder of peft, with random matrices."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM

    save_checkpoint(family, model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if ".lora_" in key:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.peft_config["default"].base_model_name_or_path = family
    adapted.save_pretrained(FOLDERS / name)
    (FOLDERS / name / "README.md").unlink()
    after = adapted.merge_and_unload().state_dict()
    changes = {key: (after[key] - before[key]).numpy() for key in before}
    deltas = {key: sums(change) for key, change in changes.items() if change.any()}
    (FOLDERS / name / "deltas.json").write_text(json.dumps(deltas, indent=1) + "\n")


if __name__ == "__main__":
    for folder_name, (of_family, own_options) in WRITTEN.items():
        with TemporaryDirectory() as saved:
            write(folder_name, of_family, own_options, Path(saved))
