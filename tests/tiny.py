"""Tiny random checkpoints of every family, made on the fly by transformers' own classes.

Sizes are odd on purpose: no dimension is a multiple of a tile, a vector register or a page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

VOCAB_SIZE = 173

# 6 query heads share 2 key heads; with 3 layers there is one that is neither first nor last
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 85,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}

FAMILIES = {
    "llama": LlamaConfig(**SIZES, head_dim=14, tie_word_embeddings=True),
    "llama-attention-bias": LlamaConfig(**SIZES, attention_bias=True),
    "llama-llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "mistral-window": MistralConfig(**SIZES, head_dim=14, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-some-windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=14, tie_word_embeddings=True),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=14,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=37,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe-raw-weights": Qwen3MoeConfig(
        **SIZES,
        head_dim=14,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=37,
        norm_topk_prob=False,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
}


def random_model(family: str) -> PreTrainedModel:
    """A float32 model of the family in which every weight, norms and biases too, is random."""
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family],
        dtype=torch.float32,
        experts_implementation="eager",  # the fused one wants even sizes
    ).eval()
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # scaled so that logits spread over several units: a wrong bias or mask shows at once
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    return model


def save_checkpoint(family: str, folder: Path) -> Path:
    """The folder, now holding a random safetensors checkpoint of the family and its config.json."""
    random_model(family).save_pretrained(folder)
    return folder
