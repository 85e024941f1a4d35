"""The language models of vision models, as transformers writes their files: a text has the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from paceline.backends.torch.backend import TorchBackend
from paceline.errors import CheckpointError
from paceline.models.families.config_reader import model_config
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive
from tests.models import model_files as files

TEXT = {
    "vocab_size": 173,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the text and of the vision model
    "Qwen2VL": ({}, {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "Qwen2_5_VL": ({}, VISION),
    "Qwen3VL": ({"head_dim": 16}, VISION | {"deepstack_visual_indexes": [0]}),
    "Qwen3VLMoe": ({"head_dim": 16, **EXPERTS}, VISION | {"deepstack_visual_indexes": [0]}),
}
PARTIAL = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 2],
}
KINDS |= {
    "Glm4v": ({"rope_parameters": PARTIAL, "pad_token_id": 0}, VISION),
    "Glm4vMoe": (
        {"rope_parameters": PARTIAL, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24},
        VISION,
    ),
}
PROMPT = np.random.default_rng(0).integers(2, 150, 40).tolist()


def save(kind: str, folder: Path, **sizes: int) -> np.ndarray:
    """Logits [tokens, vocab] of the prompt, by transformers; the model is now in the folder."""
    import transformers

    text, vision = KINDS[kind]
    ids = {"image_token_id": 170, "video_token_id": 171, "vision_start_token_id": 168}
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | text | sizes, vision_config=vision, **ids
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
        logits: np.ndarray = model(torch.tensor([PROMPT])).logits[0].float().numpy()
    model.save_pretrained(folder)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    expected = save(kind, tmp_path)
    found = drive(TorchBackend.load(load_checkpoint(tmp_path)), pages_each=3)[0].run(PROMPT)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_files_without_a_text_config_as_qwen_2_5_vl_was_published(tmp_path: Path) -> None:
    """The language model's sizes beside `vision_config`, its tensors without a prefix."""
    expected = save("Qwen2_5_VL", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = {name: config["text_config"][name] for name in TEXT if name != "rope_parameters"}
    published = text | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_act": "silu",
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "rope_theta": 10000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vision_config": VISION | {"model_type": "qwen2_5_vl"},
        "vision_start_token_id": 168,
    }
    assert model_config(published, "config.json") == model_config(config, "config.json")
    (tmp_path / "config.json").write_text(json.dumps(published))
    path = tmp_path / "model.safetensors"
    stored = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in safetensors.torch.load_file(path).items()
    }
    assert "visual.patch_embed.proj.weight" in stored
    safetensors.torch.save_file(stored, path)
    found = drive(TorchBackend.load(load_checkpoint(tmp_path)), pages_each=3)[0].run(PROMPT)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_gguf_files_are_those_of_the_text_model_under_another_name(
    model_type: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = next(name for name, values in files.MODELS.items() if values["model_type"] == model_type)
    tensors, found = files.random_tensors(files.config_of(model)), []
    for name, more in ((files.ARCHITECTURES[model_type], {}), (architecture, {"n_deepstack_layers": 3.0})):
        monkeypatch.setitem(files.ARCHITECTURES, model_type, name)
        keys = {f"{name}.{key}": value for key, value in more.items()}
        found.append(load_checkpoint(files.write_gguf(tmp_path / f"{name}.gguf", model, tensors, more=keys)))
    text, vision = found
    assert text.config == vision.config
    assert text.tensors.keys() == vision.tensors.keys()
    for name, tensor in text.tensors.items():
        np.testing.assert_array_equal(tensor.float32(), vision.tensors[name].float32())


def experts_of(folder: Path) -> dict[str, np.ndarray]:
    tensors = load_checkpoint(folder).tensors
    return {name: tensor.float32() for name, tensor in tensors.items() if ".experts." in name}


@pytest.mark.parametrize("width", [24, 32, 64], ids=["", "gate_up is square", "down is square"])
def test_qwen3_vl_moe_was_published_with_transposed_stacks_of_experts(width: int, tmp_path: Path) -> None:
    save("Qwen3VLMoe", tmp_path, moe_intermediate_size=width)
    path, expected = tmp_path / "model.safetensors", experts_of(tmp_path)
    stored = safetensors.torch.load_file(path)
    stacks = {
        name: tensor.transpose(1, 2).contiguous() for name, tensor in stored.items() if "experts" in name
    }
    assert stacks["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape == (3, 64, 2 * width)
    safetensors.torch.save_file(stored | stacks, path)
    found = experts_of(tmp_path)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("transposed", [False, True], ids=["transformers 5", "Qwen3-VL"])
@pytest.mark.parametrize("scaled_by", ["block", "gates and ups", "expert", "tensor"])
def test_stacks_of_experts_in_fp8(scaled_by: str, transposed: bool, tmp_path: Path) -> None:
    """Blocks of 16 by 8; or, with a scale for whole matrices, two for gates and ups, one, or one for all."""
    save("Qwen3VLMoe", tmp_path)
    path, expected = tmp_path / "model.safetensors", {}
    stored = safetensors.torch.load_file(path)
    generator, block = torch.Generator().manual_seed(1), (16, 8)
    for name in [name for name in stored if "experts" in name]:
        matrices = stored.pop(name)
        count, out, inputs = matrices.shape
        lines, columns = out // block[0], inputs // block[1]
        if scaled_by != "block":
            lines, columns = 2 if scaled_by == "gates and ups" and "gate_up" in name else 1, 1
        scales = 0.5 + torch.rand(count, lines, columns, generator=generator)
        if scaled_by == "tensor":
            scales[:] = scales[0]
        codes = matrices.to(torch.float8_e4m3fn)
        spread = scales.repeat_interleave(out // lines, 1).repeat_interleave(inputs // columns, 2)
        expected[name.replace("language_model.", "")] = codes.float() * spread
        if transposed:
            codes, scales = codes.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous()
        if scaled_by in ("expert", "tensor"):
            scales = scales.reshape(-1)[: 1 if scaled_by == "tensor" else count].clone()
        stored |= {name: codes, f"{name}_scale_inv": scales, f"{name}_activation_scale": torch.ones(count)}
    safetensors.torch.save_file(stored, path)
    config = json.loads((tmp_path / "config.json").read_text())
    size = {"weight_block_size": list(block)} if scaled_by == "block" else {}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8", **size}})
    )
    found = experts_of(tmp_path)
    for name, values in expected.items():
        for expert in range(len(values)):
            parts = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
            own = [found[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] for part in parts]
            np.testing.assert_array_equal(np.concatenate(own), values[expert])
    stored.pop(f"{next(name for name in stored if name.endswith('down_proj'))}_scale_inv")
    safetensors.torch.save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"in FP8, but has no .*down_proj_scale_inv"):
        load_checkpoint(tmp_path)
