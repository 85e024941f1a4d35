"""From config.json to ModelConfig: the keys of each family, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import AttentionShape, ModelConfig, Reach, RopeConfig, Temperature
from paceline.models.families.config_reader import model_config
from paceline.models.families.table import FAMILIES
from paceline.models.files.layout import expected_tensors
from paceline.models.needs import missing_blocks
from paceline.models.transformer.rope import rope_frequencies
from tests.models.model_files import MODELS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def config(model: str, **changes: Any) -> ModelConfig:
    """The config of a tiny model with some keys changed; a change to `...` removes the key."""
    values = MODELS[model] | changes
    return model_config({key: value for key, value in values.items() if value is not ...}, "config.json")


def test_the_families_are_those_we_promise() -> None:
    first = {"llama", "mistral", "ministral", "qwen2", "mimo", "qwen3", "qwen3_moe", "mixtral"}
    later = {"gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "granite", "smollm3", "glm4", "cohere2"}
    later |= {"glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k2"}
    later |= {
        "gemma4_text",
        "gemma4_unified_text",
        "llama4_text",
        "ministral3",
        "nemotron_h",
        "falcon_h1",
        "exaone4",
    }
    later |= {"nemotron_h", "falcon_h1"}
    later |= {"granitemoehybrid", "lfm2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    near = {
        "gemma",
        "glm",
        "cohere",
        "seed_oss",
        "ernie4_5",
        "arcee",
        "helium",
        "cwm",
        "hyperclovax",
        "youtu",
    }
    near |= {"granite_swa", "granitemoe", "granitemoeshared", "granitemoe_swa", "qwen2_moe", "olmoe"}
    near |= {"flex_olmo", "mellum", "dots1", "solar_open", "exaone_moe", "hy_v3", "minimax_m2", "afmoe"}
    near |= {"ernie4_5_moe", "cohere2_moe", "glm4_moe_lite", "mistral4", "lfm2_moe"}
    assert set(FAMILIES) == first | later | near


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("ernie4_5", {"use_bias": True}, "use_bias"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported, only relu2"),
    ],
)
def test_what_near_families_have_beside_is_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config(model, **changes)


def test_layers_with_experts_are_listed_or_counted() -> None:
    def layers(**changes: Any) -> frozenset[int]:
        moe = config("dots1", **changes).moe
        assert moe is not None
        return moe.layers

    assert layers() == {1, 2}
    assert layers(mlp_layer_types=["sparse", "dense", "sparse"]) == {0, 2}
    with pytest.raises(CheckpointError, match=r"mlp_layer_types .* 3 entries, each dense or sparse"):
        layers(mlp_layer_types=["sparse", "dense"])


def test_early_files_of_gemma_mean_the_approximation() -> None:
    assert config("gemma", hidden_act="gelu").activation == "gelu_tanh"


def test_minimax_gives_the_number_of_rotated_values() -> None:
    assert config("minimax_m2", partial_rotary_factor=..., rotary_dim=6).rope.dim == 6


def test_windows_of_near_families_without_a_list() -> None:
    windows = {"sliding_window": 16, "use_sliding_window": True}
    assert config("qwen2_moe", **windows, max_window_layers=1).sliding_windows == (16, None, None)
    assert config("afmoe", layer_types=..., global_attn_every_n_layers=2).sliding_windows == (16, None, 16)
    assert config("dots1", sliding_window=16, max_window_layers=2).sliding_windows == (None, None, 16)


def test_biases_and_norms_are_those_of_the_family() -> None:
    found = {m: (config(m).qkv_bias, config(m).output_bias, config(m).qk_norm) for m in MODELS}
    assert found["llama"] == found["mistral"] == found["mixtral"] == (False, False, False)
    assert found["llama-biased"] == (True, True, False)
    assert found["qwen2"] == (True, False, False)
    assert found["qwen3"] == found["qwen3_moe"] == (False, False, True)
    assert config("qwen3", attention_bias=True).output_bias
    assert replace(config("qwen2", model_type="mimo"), family="qwen2") == config("qwen2")


def test_rope_is_read_as_transformers_4_and_5_write_it() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 64}
    expected = RopeConfig(5000.0, "llama3", 8.0, 1.0, 4.0, 64)
    assert config("llama", rope_scaling={"rope_type": "llama3", **llama3}).rope == expected
    new_style = {"rope_type": "llama3", "rope_theta": 5000.0, **llama3}
    assert config("llama", rope_theta=..., rope_parameters=new_style).rope == expected
    assert config("llama", rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(
        5000.0, "linear", 2.0
    )
    assert config("llama", rope_scaling=None).rope == RopeConfig(5000.0)


def test_keys_left_out_have_the_defaults_of_transformers() -> None:
    assert config("llama", head_dim=None, num_attention_heads=8).head_dim == 4
    assert config("llama", num_key_value_heads=...).num_kv_heads == 4
    assert config("qwen3", head_dim=...).head_dim == 128
    assert config("mistral", num_key_value_heads=..., num_attention_heads=16).num_kv_heads == 8
    assert config("llama", rope_theta=...).rope.theta == 10000.0
    assert config("mixtral", rope_theta=...).rope.theta == 1e6
    assert config("llama", rms_norm_eps=...).rms_norm_eps == 1e-6
    assert config("mistral", sliding_window=...).sliding_windows == (4096, 4096)


def test_sliding_windows_are_per_layer() -> None:
    assert config("mistral").sliding_windows == (16, 16)
    assert config("mistral", sliding_window=None).sliding_windows == ()
    assert config("llama", sliding_window=16).sliding_windows == ()
    window = {"use_sliding_window": True, "sliding_window": 16}
    assert config("qwen2", sliding_window=16).sliding_windows == ()
    assert config("qwen2", **window, max_window_layers=1).sliding_windows == (None, 16)
    kinds = ["sliding_attention", "full_attention"]
    assert config("qwen3", **window, layer_types=kinds).sliding_windows == (16, None)
    assert config("qwen3_moe", **window).window(1) == 16
    assert config("qwen2").window(1) is None


def test_windows_and_ropes_follow_the_kinds_of_layers() -> None:
    gemma2 = config("llama", model_type="gemma2", sliding_window=16)
    assert gemma2.sliding_windows == (16, None)
    assert gemma2.layer_ropes == ()
    old = config("llama", model_type="gemma3_text", sliding_window=16, sliding_window_pattern=2)
    assert old.sliding_windows == (16, None)
    assert old.layer_ropes == (RopeConfig(10000.0), RopeConfig(5000.0))
    both = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0}}
    kinds = ["full_attention", "sliding_attention"]
    new = config(
        "llama", model_type="gemma3_text", sliding_window=16, layer_types=kinds, rope_parameters=both
    )
    assert new.layer_ropes == (RopeConfig(7.0), RopeConfig(3.0))
    smollm3 = config("llama", model_type="smollm3", no_rope_layer_interval=2)
    assert smollm3.layer_ropes == (RopeConfig(5000.0), None)
    cohere2 = config("llama", model_type="cohere2", sliding_window=16, sliding_window_pattern=2)
    assert cohere2.layer_ropes == (RopeConfig(5000.0), None)
    scaled = config("llama", model_type="olmo3", sliding_window=16, rope_scaling=YARN, layer_types=kinds)
    assert [rope.scaling for rope in scaled.layer_ropes if rope] == ["yarn", "none"]


GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
}


def test_layers_of_gemma_4_differ_in_heads_and_share_keys_and_values() -> None:
    """As files of the hub say it, and as transformers 5 writes it."""
    hub = config("llama", **GEMMA4, global_head_dim=16, num_global_key_value_heads=1)
    full = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 3, 5)}
    assert config("llama", **GEMMA4, per_layer_config=full) == hub
    local, wide = AttentionShape(8, 2), AttentionShape(16, 1, values_are_keys=True)
    shared = replace(local, shared_with=2), replace(wide, shared_with=3)
    assert hub.layer_shapes == (local, wide, local, wide, *shared)
    assert (hub.kv_layers, [hub.kv_layer(layer) for layer in range(6)]) == ([0, 1, 2, 3], [0, 1, 2, 3, 2, 3])
    assert (hub.kv_values(0), hub.kv_values(1), hub.shared_heads) == (32, 32, 1)
    assert [rope.angles for rope in hub.layer_ropes if rope] == [0, 2] * 3
    assert config("llama", **GEMMA4, use_double_wide_mlp=True).intermediate_sizes == (64,) * 4 + (128,) * 2
    with pytest.raises(CheckpointError, match="num_kv_shared_layers"):
        config("llama", **GEMMA4 | {"num_kv_shared_layers": 5})
    with pytest.raises(UnsupportedModelError, match="per_layer_config has sliding_window"):
        config("llama", **GEMMA4, per_layer_config={"1": {"sliding_window": 4}})
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        config("llama", **GEMMA4, use_bidirectional_attention="all")


def test_layers_of_llama_4_attend_within_chunks_or_without_rope() -> None:
    found = config("llama", model_type="llama4_text", no_rope_layer_interval=2, attention_chunk_size=16)
    assert found.layer_ropes == (RopeConfig(5000.0), None)
    assert [found.reach(layer) for layer in (0, 1)] == [Reach(chunk=16), Reach()]
    assert found.temperature == Temperature(0.1, 8192, offset=1, with_rope=False)
    off = config("llama", model_type="llama4_text", attn_temperature_tuning=False)
    assert off.temperature is None


def test_a_layer_of_nemotron_h_is_one_block() -> None:
    sizes = {"model_type": "nemotron_h", "mamba_num_heads": 4, "n_groups": 2, "num_hidden_layers": ...}
    found = config("llama", **sizes, hidden_act=..., hybrid_override_pattern="M*-E")
    assert (found.num_layers, found.kv_layers, found.recurrent_layers) == (4, [1], [0])
    assert found.layer_parts == ("mixer", "mixer", "feed_forward", "feed_forward")
    assert found.moe is not None
    assert found.moe.layers == {3}
    with pytest.raises(CheckpointError, match="layers_block_type"):
        config("llama", **sizes, hybrid_override_pattern="M?")
    with pytest.raises(UnsupportedModelError, match="mamba_proj_bias"):
        config("llama", **sizes, hybrid_override_pattern="M", mamba_proj_bias=True)


def test_experts_of_nemotron_3_super_have_a_size_of_their_own() -> None:
    sizes = {"model_type": "nemotron_h", "mamba_num_heads": 4, "n_groups": 2, "num_hidden_layers": ...}
    found = config("llama", **sizes, hidden_act=..., hybrid_override_pattern="ME", moe_latent_size=8)
    assert found.expert_hidden == 8
    shapes = dict(expected_tensors(found))
    assert shapes["model.layers.1.mlp.experts.0.up_proj.weight"][1] == 8
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"][1] == found.hidden_size
    assert "experts in a latent space" in missing_blocks(found, "cuda")
    assert missing_blocks(found, "cpu") == []


def test_the_language_model_of_a_file_with_other_models() -> None:
    text = MODELS["llama"] | {"model_type": "gemma3_text", "sliding_window": 16}
    found = model_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "config.json")
    assert found == config("llama", model_type="gemma3_text", sliding_window=16)


def test_yarn_has_the_factors_of_the_paper_unless_the_file_says_others() -> None:
    found = config("llama", rope_scaling=YARN).rope
    assert (found.scaling, found.factor, found.original_max_position) == ("yarn", 4.0, 64)
    assert found.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert config("llama", rope_scaling=YARN | {"attention_factor": 0.5}).rope.attention_factor == 0.5
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert config("llama", rope_scaling=YARN | scales).rope.attention_factor == 1


def test_longrope_and_dynamic_are_those_of_the_served_context() -> None:
    long = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    phi = config("llama", model_type="phi3", rope_scaling=long, original_max_position_embeddings=64)
    assert (phi.rope.scaling, phi.rope.context, phi.rope.original_max_position) == ("longrope", 128, 64)
    assert phi.rope.attention_factor == pytest.approx((1 + math.log(2) / math.log(64)) ** 0.5)
    assert phi.for_context(64).rope.context == 64
    assert phi.for_context(64).max_position == 128
    dynamic = config("llama", rope_scaling={"type": "dynamic", "factor": 4.0})
    assert rope_frequencies(dynamic.rope, 8).tolist() == rope_frequencies(RopeConfig(5000.0), 8).tolist()
    assert dynamic.for_context(None) == dynamic
    assert (dynamic.for_context(300).max_position, dynamic.for_context(9999).max_position) == (300, 512)
    assert config("llama").for_context(300).max_position == 128
    with pytest.raises(CheckpointError, match="3 numbers in long_factor; expected 4"):
        config("llama", model_type="phi3", rope_scaling=long | {"long_factor": [1.0] * 3})


def test_blocks_that_only_the_torch_backend_has_are_named() -> None:
    assert config("llama").beyond_llama() == config("llama", model_type="phi3").beyond_llama() == []
    assert config("llama", rope_scaling=YARN).beyond_llama() == []
    assert config(
        "llama", model_type="granite", attention_multiplier=0.5, logits_scaling=2.0
    ).beyond_llama() == [
        "a scaled attention",
        "scaled residuals",
    ]
    assert "sandwich norms" in config("llama", model_type="gemma2", sliding_window=16).beyond_llama()
    assert config("llama", model_type="phi3", partial_rotary_factor=0.5).beyond_llama() == ["partial RoPE"]


def test_recurrent_layers_are_those_that_do_not_attend() -> None:
    lfm2 = config("llama", model_type="lfm2", full_attn_idxs=[1], conv_L_cache=4, block_multiple_of=16)
    assert lfm2.recurrent is not None
    assert (lfm2.recurrent.layers, lfm2.recurrent.conv_kernel) == ({0}, 4)
    assert (lfm2.kv_layers, lfm2.recurrent_layers) == ([1], [0])
    assert lfm2.intermediate_size == 16 * -(-(MODELS["llama"]["intermediate_size"] * 2 // 3) // 16)
    assert config("llama", model_type="lfm2").recurrent_layers == []
    kinds = ["full_attention", "linear_attention"]
    qwen = config("llama", model_type="qwen3_5_text", layer_types=kinds, head_dim=16)
    assert (qwen.recurrent_layers, qwen.attention_gate, qwen.rope.dim) == ([1], True, 4)
    assert qwen.beyond_llama() == ["partial RoPE", "gated attention", "gated delta nets"]
    interval = config("llama", model_type="qwen3_5_text", full_attention_interval=2, head_dim=16)
    assert interval.recurrent_layers == [0]
    mamba = {"mamba_n_heads": 4, "layer_types": ["mamba", "attention"], "position_embedding_type": "rope"}
    granite = config("llama", model_type="granitemoehybrid", **mamba, shared_intermediate_size=48)
    assert (granite.recurrent_layers, granite.layer_ropes) == ([0], ())
    assert granite.moe is not None
    assert granite.moe.shared_intermediate_size == 48
    dense = mamba | {"num_local_experts": 0, "position_embedding_type": "nope"}
    dense_granite = config("llama", model_type="granitemoehybrid", **dense, shared_intermediate_size=48)
    assert (dense_granite.moe, dense_granite.intermediate_size) == (None, 48)
    assert dense_granite.layer_ropes == (None, None)
    with pytest.raises(UnsupportedModelError, match="time_step_limit"):
        config("llama", model_type="granitemoehybrid", **mamba, time_step_limit=[0.001, 0.1])
    with pytest.raises(CheckpointError, match="layer_types"):
        config("llama", model_type="lfm2", layer_types=["conv", "sliding_attention"])
    with pytest.raises(CheckpointError, match="linear_num_value_heads"):
        config("llama", model_type="qwen3_5_text", head_dim=16, linear_num_value_heads=15)


def test_experts_are_read_for_both_families() -> None:
    moe = config("mixtral").moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (3, 2, 64)
    assert moe.normalize_weights
    assert moe.layers == {0, 1}
    moe = config("qwen3_moe", norm_topk_prob=...).moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (3, 2, 32)
    assert not moe.normalize_weights
    layers = [
        config("qwen3_moe", mlp_only_layers=[0]).moe,
        config("qwen3_moe", decoder_sparse_step=2).moe,
        config("qwen3_moe", num_experts=..., num_local_experts=3).moe,
    ]
    assert [entry.layers for entry in layers if entry] == [{1}, {1}, {0, 1}]


def test_an_assistant_of_gemma_4_alone_is_refused_with_how_to_use_it() -> None:
    text = {"model_type": "gemma4_text", "num_kv_shared_layers": 4}
    with pytest.raises(
        UnsupportedModelError, match=r"assistant of Gemma 4, .* Serve the target, .* --draft assistant:PATH"
    ):
        config("llama", model_type="gemma4_assistant", text_config=text)


def test_latent_attention_keeps_one_small_head_per_token() -> None:
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaling |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    sizes = {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": ..., "hidden_size": 7168}
    sizes |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    found = config("llama", model_type="deepseek_v3", rope_scaling=scaling, rope_theta=10000, **sizes)
    assert (found.num_kv_heads, found.head_dim, found.kv_values(0)) == (1, 576, 576)
    assert found.attention_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert found.rope.attention_factor == 1  # the scores have it, and not the angles
    with pytest.raises(UnsupportedModelError, match="topk_method 'noaux_tc'"):
        config("llama", model_type="deepseek_v2", topk_method="noaux_tc")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported. Supported are llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "axial"}}, "'axial' is not supported. Supported are default"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta of",
        ),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"head_dim": 7}, "odd"),
    ],
)
def test_what_we_do_not_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config("llama", **changes)


@pytest.mark.parametrize("value", [..., 0, -4, 1.5, "4", True, 1 << 40, [4]])
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_size_must_be_a_sensible_integer(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        config("llama", **{key: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 0},
        {"rope_theta": float("inf")},
        {"rope_theta": 10**400},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        {"tie_word_embeddings": "yes"},
        {"model_type": None},
    ],
)
def test_impossible_values_are_reported(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        config("llama", **changes)


def test_impossible_layer_lists_and_expert_counts_are_reported() -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        config("qwen3", use_sliding_window=True, layer_types=["full_attention"])
    with pytest.raises(CheckpointError, match="layer_types"):
        config("qwen3", use_sliding_window=True, layer_types=["full_attention", {}])
    with pytest.raises(CheckpointError, match="mlp_only_layers"):
        config("qwen3_moe", mlp_only_layers="0")
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        config("qwen3_moe", num_experts_per_tok=4)
