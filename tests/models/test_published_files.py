"""Files in the layouts in which models are published: whatever is around the language model, it is found.

Configurations are those of the hub, with fewer and smaller layers; test_transformer.py compares
families with transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint
from paceline.models.families.config_reader import model_config
from paceline.models.files.file_layouts import SANDWICH_NORMS
from paceline.models.needs import missing_blocks
from paceline.models.registry import load_checkpoint
from tests.models.model_files import Tensors, config_of, random_tensors, write_gguf

GEMMA3 = {  # google/gemma-3-4b-it: most of its sizes are transformers' defaults
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
QWEN3_5 = {  # Qwen/Qwen3.5-0.8B
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 8,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 80,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 12, "model_type": "qwen3_5"},
    "vision_start_token_id": 248053,
}
MINISTRAL3 = {  # mistralai/Ministral-3-3B-Instruct-2512
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
        "vocab_size": 80,
    },
    "vision_config": {"model_type": "pixtral"},
}
GRANITE4 = {  # ibm-granite/granite-4.0-1b: a hybrid by name, of which every layer attends
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["attention", "attention"],
    "logits_scaling": 8,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 1,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 4,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_intermediate_size": 48,
    "tie_word_embeddings": True,
    "vocab_size": 80,
}
VISION = {
    f"{name}.weight": np.zeros((2, 2), np.float32)
    for name in ("vision_tower.blocks.0", "mm_projector.proj.0")
}


def save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return load_checkpoint(folder)


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma_3_with_sizes_that_its_file_leaves_out(tmp_path: Path, prefix: str) -> None:
    """As the hub's file names tensors, and as transformers saves them after training."""
    tensors = random_tensors(model_config(GEMMA3, "config.json"))
    theirs = {ours: theirs for theirs, ours in SANDWICH_NORMS.items()}
    named = {
        ".".join(theirs.get(part, part) for part in name.split(".")): own for name, own in tensors.items()
    }
    found = save(tmp_path, GEMMA3, prefixed(named, prefix) | VISION)
    assert (found.config.vocab_size, found.config.num_heads, found.config.tie_embeddings) == (262208, 8, True)
    key = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(found.tensors[key].float32(), tensors[key])


@pytest.mark.parametrize("is_whole", [True, False])
def test_qwen_3_5_tied_outside_of_its_language_model(tmp_path: Path, is_whole: bool) -> None:
    """With the vision model and MTP block; or only the language model, under the names of the whole."""
    text: dict[str, Any] = QWEN3_5["text_config"]  # type: ignore[assignment]
    config = model_config(text | {"tie_word_embeddings": True}, "config.json")
    random = np.random.default_rng(3)
    tensors = random_tensors(config)
    for layer in (3,):  # of every head the query, then the gate
        names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in ("q", "gate")]
        both = [tensors.pop(name).reshape(config.num_heads, config.head_dim, -1) for name in names]
        tensors[names[0]] = np.concatenate(both, axis=1).reshape(-1, config.hidden_size)
    stored = prefixed(tensors, "model.language_model.")
    if is_whole:
        stored |= {"mtp.fc.weight": random.standard_normal((32, 64)).astype(np.float32)}
        stored |= {"model.visual.patch_embed.proj.weight": np.zeros((2, 3), np.float32)}
    outer = QWEN3_5 if is_whole else text | {"tie_word_embeddings": True}
    found = save(tmp_path, outer, stored)
    assert found.config == config
    assert set(found.mtp) == ({"mtp.fc.weight"} if is_whole else set())
    if is_whole:  # not tied, and no LM head: a file that lacks something
        with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head\.weight"):
            save(tmp_path, QWEN3_5 | {"tie_word_embeddings": False}, stored)


def test_a_head_of_its_own_is_kept_though_the_outer_default_says_tied(tmp_path: Path) -> None:
    text = MINISTRAL3["text_config"] | {"tie_word_embeddings": False}  # type: ignore[operator]
    tensors = random_tensors(model_config(text, "config.json"))
    stored = prefixed(tensors, "language_model.model.")
    stored["language_model.lm_head.weight"] = stored.pop("lm_head.weight")
    found = save(tmp_path, MINISTRAL3 | {"text_config": text, "tie_word_embeddings": True}, stored)
    np.testing.assert_array_equal(found.tensors["lm_head.weight"].float32(), tensors["lm_head.weight"])


def test_ministral_3_in_fp8_with_scales_of_activations(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = random_tensors(model_config(MINISTRAL3, "config.json"))
    stored = {}
    for name, values in prefixed(tensors, "language_model.model.").items():
        if not name.endswith("_proj.weight"):
            stored[name] = torch.from_numpy(values).bfloat16()
            continue
        module = name.removesuffix(".weight")
        stored[name] = torch.from_numpy(values / 2).to(torch.float8_e4m3fn)
        stored[f"{module}.weight_scale_inv"] = torch.tensor(2.0).bfloat16()
        stored[f"{module}.activation_scale"] = torch.tensor(0.01).bfloat16()
    quantization = {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(MINISTRAL3 | {"quantization_config": quantization}))
    save_file(stored, tmp_path / "model-00001-of-00001.safetensors")  # and no index
    found, key = load_checkpoint(tmp_path), "model.layers.1.mlp.down_proj.weight"
    expected = torch.from_numpy(tensors[key] / 2).to(torch.float8_e4m3fn).float() * 2
    np.testing.assert_array_equal(found.tensors[key].float32(), expected.numpy())
    assert found.config.temperature is not None


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a LoRA adapter.* --lora-modules NAME="):
        load_checkpoint(tmp_path)


def test_gemma_3_of_ollama_is_refused_for_it_lacks_a_factor(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("gemma3"))
    path = write_gguf(tmp_path / "model.gguf", "gemma3", tensors, more={"gemma3.rope.global.freq_base": 1e6})
    with pytest.raises(UnsupportedModelError, match=r"Ollama's own engine.* llama\.cpp's converter"):
        load_checkpoint(path)


def test_granite_4_without_mamba_is_no_hybrid(tmp_path: Path) -> None:
    config = model_config(GRANITE4, "config.json")
    assert config.recurrent is None
    assert missing_blocks(config, "cuda") == missing_blocks(config, "cpu") == []
    tensors = random_tensors(config)
    stored = {
        name.replace(".mlp.", ".shared_mlp."): own for name, own in tensors.items() if "gate" not in name
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}.shared_mlp"
        both = tensors[f"model.layers.{layer}.mlp.gate_proj.weight"], stored.pop(f"{prefix}.up_proj.weight")
        stored[f"{prefix}.input_linear.weight"] = np.concatenate(both)
        stored[f"{prefix}.output_linear.weight"] = stored.pop(f"{prefix}.down_proj.weight")
    found, key = save(tmp_path, GRANITE4, stored), "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(found.tensors[key].float32(), tensors[key])
