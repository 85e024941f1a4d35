"""GGUF files of Qwen 3.5, as llama.cpp's converter writes them, are the models that they were made of."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.backends.base import Backend
from paceline.backends.cpu import CpuBackend
from paceline.backends.torch.backend import TorchBackend
from paceline.errors import CheckpointError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import RecurrentConfig
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive
from tests.models.model_files import add_tokenizer
from tests.tiny import save_checkpoint

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
PARTS |= {f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")}
PARTS |= {
    f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")
}


def tiled(rows: np.ndarray, own: RecurrentConfig, size: int, first: int = 0) -> np.ndarray:
    """The rows from `first` on, `size` of each value head, with heads of the same key head far apart."""
    heads = rows[first:].reshape(own.key_heads, -1, size, *rows.shape[1:])
    return np.concatenate((rows[:first], heads.swapaxes(0, 1).reshape(rows[first:].shape)))


def as_stored(part: str, values: np.ndarray, own: RecurrentConfig) -> np.ndarray:
    """A tensor as files have it."""
    keys = 2 * own.key_heads * own.key_dim
    if part == "linear_attn.A_log":
        return tiled(-np.exp(values), own, 1)
    if part == "linear_attn.out_proj.weight":
        return tiled(values.T, own, own.value_dim).T
    if part == "linear_attn.conv1d.weight":
        return tiled(values[:, 0], own, own.value_dim, keys)
    sizes = {"in_proj_qkv": own.value_dim, "in_proj_z": own.value_dim}
    sizes |= {"in_proj_a": 1, "in_proj_b": 1, "dt_bias": 1}
    name = part.removeprefix("linear_attn.").removesuffix(".weight")
    if name not in sizes or not part.startswith("linear_attn."):
        return values
    return tiled(values, own, sizes[name], keys if name == "in_proj_qkv" else 0)


def stored_tensors(model: Checkpoint) -> dict[str, np.ndarray]:
    """All tensors under the names of a file."""
    own, config = model.config.recurrent, model.config
    assert own is not None
    values = {name: tensor.float32() for name, tensor in model.tensors.items()}
    stored = {NAMES[name]: values[name] for name in NAMES if name in values}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for part, theirs in PARTS.items():
            if prefix + part in values:
                stored[f"blk.{layer}.{theirs}"] = as_stored(part, values[prefix + part], own)
        if f"{prefix}self_attn.q_proj.weight" in values:  # of each head the query, then the gate
            both = [values[f"{prefix}self_attn.{part}_proj.weight"] for part in ("q", "gate")]
            apart = [one.reshape(config.num_heads, config.head_dim, -1) for one in both]
            joined = np.concatenate(apart, axis=1).reshape(-1, config.hidden_size)
            stored[f"blk.{layer}.attn_q.weight"] = joined
        if config.moe is not None:
            for part in ("gate", "up", "down"):
                names = [
                    f"{prefix}mlp.experts.{expert}.{part}_proj.weight"
                    for expert in range(config.moe.num_experts)
                ]
                stored[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack([values[name] for name in names])
    return stored


def write(path: Path, model: Checkpoint, nextn: dict[str, np.ndarray] | None = None) -> Path:
    """The path, holding the model; with tensors of `nextn`, its last layer is for multi-token prediction."""
    config, own = model.config, model.config.recurrent
    assert own is not None
    writer = gguf.GGUFWriter(path, "qwen35" if config.moe is None else "qwen35moe")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.dim)
    writer.add_rope_dimension_sections([2, 2, 2, 0])
    writer.add_ssm_conv_kernel(own.conv_kernel)
    writer.add_ssm_state_size(own.key_dim)
    writer.add_ssm_group_count(own.key_heads)
    writer.add_ssm_time_step_rank(own.value_heads)
    writer.add_ssm_inner_size(own.value_heads * own.value_dim)
    writer.add_full_attention_interval(2)
    if nextn:
        writer.add_nextn_predict_layers(1)
    if config.moe is None:
        writer.add_feed_forward_length(config.intermediate_size)
    else:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.experts_per_token)
        writer.add_expert_feed_forward_length(config.moe.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe.shared_intermediate_size)
    add_tokenizer(writer, config.vocab_size)
    for name, values in (stored_tensors(model) | (nextn or {})).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(backend: Backend) -> np.ndarray:
    return drive(backend, pages_each=3)[0].run(range(5, 30))


@pytest.mark.parametrize("family", ["qwen3-5", "qwen3-5-moe"])
def test_logits_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    model = load_checkpoint(save_checkpoint(family, tmp_path))
    file = load_checkpoint(write(tmp_path / "model.gguf", model))
    assert file.config.recurrent is not None
    assert file.config.recurrent.tiled_values  # 3 value heads share a key head
    expected = logits(TorchBackend.load(model))
    np.testing.assert_allclose(logits(TorchBackend.load(file)), expected, rtol=1e-4, atol=1e-4)
    backend = CpuBackend.load(file, quantization="none", threads=1, max_rows=32)
    np.testing.assert_allclose(logits(backend), expected, rtol=1e-4, atol=1e-4)
    backend.close()


def test_rates_that_are_not_negative_are_reported(tmp_path: Path) -> None:
    model = load_checkpoint(save_checkpoint("qwen3-5", tmp_path))
    path = write(tmp_path / "model.gguf", model)
    rates = stored_tensors(model)["blk.0.ssm_a"].astype(np.float32).tobytes()
    path.write_bytes(path.read_bytes().replace(rates, bytes(len(rates))))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a has values that are not negative"):
        load_checkpoint(path)
