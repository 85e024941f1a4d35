"""GGUF files made as llama.cpp's converter makes them have the config and the tensors of their safetensors.

Hybrids, mixtures and Gemma 4; test_transformer.py compares the safetensors with transformers.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.registry import load_checkpoint
from tests import tiny, tiny_families
from tests.models.gguf_converter import with_gguf
from tests.tiny_families import (
    DELTA_NET,
    FULL,
    HYBRIDS,
    MORE_HYBRIDS,
    SHARED_EXPERT,
    TORCH_FAMILIES,
    YARN_ROPE,
    Family,
)
from tests.tiny_near_families import NEAR_FAMILIES

MISTRAL4 = NEAR_FAMILIES["mistral4"]
MISTRAL4_ROPE = MISTRAL4.options["rope_parameters"] | {"llama_4_scaling_beta": 0.1}  # files leave it out
NEMOTRON = HYBRIDS["nemotron-h"].options
# whose layers GGUF files can describe: all MLPs have experts or none
FAMILIES = {
    "qwen3-next-experts": Family("Qwen3NextConfig", DELTA_NET | SHARED_EXPERT),
    "granite-hybrid": HYBRIDS["granite-hybrid"],
    "granite-hybrid-dense": MORE_HYBRIDS["granite-hybrid-dense"],
    "falcon-h1-gate-first": Family(
        "FalconH1Config", MORE_HYBRIDS["falcon-h1"].options | {"mamba_norm_before_gate": False}
    ),
    "falcon-h1-without-norm-gate-first": Family(
        "FalconH1Config", MORE_HYBRIDS["falcon-h1-without-norm"].options | {"mamba_norm_before_gate": False}
    ),
    "nemotron-h-mlp": Family(
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", FULL, "linear_attention"]},
    ),
    "nemotron-h-experts": Family(
        "NemotronHConfig", NEMOTRON | {"layers_block_type": ["linear_attention", "moe", FULL, "moe"]}
    ),
    "nemotron-h-latent-experts": Family(
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": ["linear_attention", "moe", FULL, "moe"], "moe_latent_size": 37},
    ),
    "deepseek-v2-one-scale": Family(
        "DeepseekV2Config",
        TORCH_FAMILIES["deepseek-v2"].options
        | {"rope_parameters": YARN_ROPE | {"mscale": 0.9, "mscale_all_dim": 0.9}},
    ),
    "deepseek-v3": TORCH_FAMILIES["deepseek-v3"],
    "mistral4-files": MISTRAL4._replace(options=MISTRAL4.options | {"rope_parameters": MISTRAL4_ROPE}),
    "llama4-files": Family(
        "Llama4TextConfig",
        {"head_dim": 14, "intermediate_size_mlp": 77, "num_hidden_layers": 4, "interleave_moe_layer_step": 2}
        | {"num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "ministral3": TORCH_FAMILIES["ministral3"],
    "gemma4": TORCH_FAMILIES["gemma4"],
    "gemma4-moe": TORCH_FAMILIES["gemma4-moe"],
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Transformers' file of a family, and model.gguf beside it."""
    monkeypatch.setitem(tiny_families.TORCH_FAMILIES, request.param, FAMILIES[request.param])
    return with_gguf(tiny.save_checkpoint(request.param, tmp_path))


def rounded(value: object) -> object:
    """A config without the digits that float32 does not have, which metadata is in."""
    if is_dataclass(value):
        return {own.name: rounded(getattr(value, own.name)) for own in fields(value)}
    if isinstance(value, tuple):
        return [rounded(own) for own in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def as_in_files(model: Checkpoint) -> ModelConfig:
    """The config of safetensors as a GGUF file says it: some factors are in the weights, and Nemotron-H with
    experts has no other width."""
    config = model.config
    if config.family == "falcon_h1":
        scales = tuple(replace(one, factors=(1.0,) * len(one.factors)) for one in config.weight_scales)
        own = {"weight_scales": scales, "hidden_factors": True}
        return replace(config, **own, embedding_scale=1.0, logits_scale=1.0)
    if config.moe is not None and config.family == "nemotron_h":
        return replace(config, intermediate_size=config.moe.intermediate_size)
    return config


def test_config_and_tensors_are_those_of_safetensors(folder: Path) -> None:
    model, file = load_checkpoint(folder), load_checkpoint(folder / "model.gguf")
    assert rounded(file.config) == rounded(as_in_files(model))
    assert file.tensors.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        expected = tensor.float32()
        if model.config.family == "falcon_h1" and name in ("model.embed_tokens.weight", "lm_head.weight"):
            scale = model.config.embedding_scale if "embed" in name else model.config.logits_scale
            expected = expected * np.float32(scale)
        np.testing.assert_allclose(file.tensors[name].float32(), expected, rtol=1e-5, atol=1e-6, err_msg=name)
