"""Readers of the parts of a config.json in which families differ: rope by layers, scales, latents.

Each takes the configuration and gives fields of ModelConfig; table.py says which family uses which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.errors import UnsupportedModelError
from paceline.models.config import LatentConfig, ModelConfig, RopeConfig, Temperature
from paceline.models.families.fields import Fields
from paceline.models.families.layer_kinds import CHUNKED, FULL, SLIDING, layer_kinds
from paceline.models.families.rope_fields import rope_fields, scaled_rope
from paceline.models.transformer.rope import yarn_mscale

QUERY_GROWTH = "llama_4_scaling_beta"  # among rope parameters
# of files that say nothing, beside its theta and its factor
MISTRAL_ROPE: dict[str, object] = {"type": "yarn", "mscale_all_dim": 1.0, "mscale": 1.0, QUERY_GROWTH: 0.1}


def ministral3(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Queries grow with their positions, if the rope's parameters say so."""
    scaling = rope_fields(fields)
    if not scaling.has(QUERY_GROWTH):
        return {}
    strength, period = scaling.number(QUERY_GROWTH), config.rope.original_max_position
    return {"temperature": Temperature(strength, period, offset=0, with_rope=True)}


def latent_attention(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Latent attention: one KV head, of the shared rotated key and the latent."""
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank", 512),
        query_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else 0,
        rope_dim=fields.integer("qk_rope_head_dim", 64),
        nope_dim=fields.integer("qk_nope_head_dim", 128),
        value_dim=fields.integer("v_head_dim", 128),
        biases=fields.flag("attention_bias", False),
        interleaved=fields.flag("rope_interleave", True),
    )
    if latent.rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "an even number")
    scaling = rope_fields(fields)
    scale = (latent.rope_dim + latent.nope_dim) ** -0.5
    if config.rope.scaling != "none" and scaling.has("mscale_all_dim"):
        # yarn's factor here is of the scores, so of queries and keys: once for each
        scale *= yarn_mscale(config.rope.factor, scaling.number("mscale_all_dim")) ** 2
    return {
        "num_kv_heads": 1,
        "head_dim": latent.rope_dim + latent.rank,
        "rope": replace(config.rope, dim=latent.rope_dim),
        "attention_scale": scale,
        "output_bias": latent.biases,
        "latent": latent,
    }


def glm4_moe(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {"qk_norm": fields.flag("use_qk_norm", False)}


def gpt_oss(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Sinks, and an MLP with the only setting that was ever published."""
    if (fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise UnsupportedModelError(
            f"{fields.source}: only swiglu_alpha 1.702 with swiglu_limit 7 is supported; use such a model."
        )
    return {"attention_sinks": True, "activation": "clamped_silu"}


def olmo3(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Olmo 3 scales the rope of layers without a window only."""
    return ropes_by_kind(fields, config, RopeConfig(config.rope.theta))


def ropes_by_kind(fields: Fields, config: ModelConfig, local: RopeConfig) -> dict[str, Any]:
    """The ropes of layers without and with a window.

    transformers 5 writes both; 4 wrote that of layers without a window, and `local` is the other.
    """
    rope, both = config.rope, fields.group("rope_parameters")
    if both.has(FULL) or both.has(SLIDING):
        rope = scaled_rope(both.group(FULL), fields.number("rope_theta", config.rope.theta), fields)
        local = scaled_rope(both.group(SLIDING), local.theta, fields)
    return {
        "rope": rope,
        "layer_ropes": tuple(rope if window is None else local for window in config.sliding_windows),
    }


def granite(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logits_scale": 1 / fields.number("logits_scaling", 1.0),
    }


def llama4(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Layers with rope attend within chunks; queries of the others grow with their position."""
    blocks = smollm3(fields, config)
    has_rope = [rope is not None for rope in blocks.get("layer_ropes", (config.rope,) * config.num_layers)]
    usual = [CHUNKED if rope else FULL for rope in has_rope]
    kinds = layer_kinds(fields, config.num_layers, other=CHUNKED) or usual
    chunk = fields.integer("attention_chunk_size", 8192)
    tuning = fields.values.get(
        "attn_temperature_tuning", True
    )  # some files have a number, as if it were true
    is_tuned = (
        tuning if isinstance(tuning, bool) else fields.integer("attn_temperature_tuning", 1, least=0) > 0
    )
    strength, period = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    return blocks | {
        "intermediate_size": fields.integer("intermediate_size_mlp", 16384),
        "attention_chunks": tuple(chunk if kind == CHUNKED else None for kind in kinds),
        "unit_qk": fields.flag("use_qk_norm", True),
        "temperature": Temperature(strength, period, offset=1, with_rope=False) if is_tuned else None,
    }


def smollm3(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """No RoPE in every fourth layer, or where no_rope_layers has 0."""
    every = fields.integer("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % every != 0) for layer in range(config.num_layers)]
    marks = fields.values.get("no_rope_layers") or usual
    if (
        not isinstance(marks, list)
        or len(marks) != config.num_layers
        or not all(mark in (0, 1) for mark in marks)
    ):
        raise fields.wrong("no_rope_layers", f"{config.num_layers} entries, each 0 (no rope) or 1")
    return {"layer_ropes": tuple(config.rope if mark else None for mark in marks)} if not all(marks) else {}


def exaone4(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """If some layers have windows, only they have rope."""
    return {"layer_ropes": _ropes_of_windows(config)} if config.sliding_windows else {}


def _ropes_of_windows(config: ModelConfig) -> tuple[RopeConfig | None, ...]:
    return tuple(None if window is None else config.rope for window in config.sliding_windows)


def cohere2(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Only layers with a window have rope."""
    return {
        "logits_scale": fields.number("logit_scale", 0.0625),
        "layer_ropes": _ropes_of_windows(config),
    }


def cohere(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    if fields.flag("use_qk_norm", False):
        raise UnsupportedModelError(
            f"{fields.source}: use_qk_norm of this family is not supported; use a model without it."
        )
    return {"logits_scale": fields.number("logit_scale", 0.0625)}


def cohere2_moe(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Dense layers have a width of their own, and may have rope without a window; norms may be RMSNorm."""
    blocks, moe = cohere2(fields, config), config.moe
    assert moe is not None
    ropes = list(blocks["layer_ropes"] or (None,) * config.num_layers)
    if fields.integer("prefix_dense_sliding_window_pattern", 1) == 1:
        ropes = [own if layer in moe.layers else config.rope for layer, own in enumerate(ropes)]
    if fields.has("rms_norm_eps"):
        blocks |= {"norm": "rms", "rms_norm_eps": fields.number("rms_norm_eps")}
    width = fields.integer("prefix_dense_intermediate_size", config.intermediate_size)
    return blocks | {"layer_ropes": tuple(ropes), "intermediate_size": width}


def seed(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {"output_bias": fields.flag("attention_out_bias", False)}


def without_biases(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Nothing more; a model whose matrices all have biases is refused."""
    if fields.flag("use_bias", False):
        raise UnsupportedModelError(f"{fields.source}: use_bias is not supported; use a model without it.")
    return {}


def olmoe(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Nothing more; a model that clips its queries, keys and values is refused."""
    if fields.has("clip_qkv"):
        raise UnsupportedModelError(f"{fields.source}: clip_qkv is not supported; use a model without it.")
    return {}


def qwen2_moe(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {"qkv_bias": fields.flag("qkv_bias", True)}


def hyperclovax(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Granite's factors, but that of logits is not a divisor; norms after attention and MLP are optional."""
    scale = fields.number("attention_multiplier", config.head_dim**-0.5)
    blocks = granite(fields, config) | {"attention_scale": scale}
    if not fields.flag("use_post_norm", True):
        blocks["norm_placement"] = "pre"
    return blocks | {"logits_scale": fields.number("logits_scaling", 1.0)}


def granite_swa(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Granite's factors, sinks, and a rope base for each layer: 0 means no rope."""
    blocks = granite(fields, config) | {"attention_sinks": True}
    thetas = fields.values.get("layer_rope_theta")
    if thetas is None:
        return blocks
    if (
        not isinstance(thetas, list)
        or len(thetas) != config.num_layers
        or not all(type(theta) in (int, float) and theta >= 0 for theta in thetas)
    ):
        raise fields.wrong("layer_rope_theta", f"{config.num_layers} numbers, 0 for no rope")
    ropes = tuple(replace(config.rope, theta=float(theta)) if theta else None for theta in thetas)
    return blocks | ({} if {*ropes} == {config.rope} else {"layer_ropes": ropes})


def mellum(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Layers with and without a window have ropes of their own. GGUF files have the base of the first."""
    if not config.sliding_windows:
        return {}
    local = config.rope
    if fields.has("rope_local_base_freq"):
        local = RopeConfig(fields.number("rope_local_base_freq"))
    return ropes_by_kind(fields, config, local)


def afmoe(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Gated attention, rope only in layers with a window, and scaled embeddings."""
    scale = config.hidden_size**0.5 if fields.flag("mup_enabled", False) else 1.0
    return {"attention_gate": True, "layer_ropes": _ropes_of_windows(config), "embedding_scale": scale}


def mistral4(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Latent attention whose queries grow with their positions."""
    return latent_attention(fields, config) | ministral3(fields, config)


def partial_rope_keys(fields: Fields) -> dict[str, object]:
    """The share of a head that is rotated, from the number of its values."""
    if not fields.has("rotary_dim"):
        return {}
    return {"partial_rotary_factor": fields.integer("rotary_dim") / fields.integer("head_dim")}


def other_keys(**names: str) -> Callable[[Fields], dict[str, object]]:
    """The keys that a family calls otherwise: ours = its own."""

    def derived(fields: Fields) -> dict[str, object]:
        return {ours: fields.values[own] for ours, own in names.items() if fields.has(own)}

    return derived
