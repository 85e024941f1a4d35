"""Readers of the parts of a config.json in which families differ: rope, windows, experts, scales.

Each takes the configuration and gives fields of ModelConfig; families.py says which family uses which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from paceline.errors import UnsupportedModelError
from paceline.models.config import LatentConfig, ModelConfig, MoeConfig, RopeConfig, Temperature
from paceline.models.fields import Fields
from paceline.models.rope import longrope_attention_factor, yarn_attention_factor, yarn_mscale

MAX_EXPERTS = 10_000
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_NAMES = {"su": "longrope", "mrope": "default"}  # mrope differs for images only
# what an object of rope parameters may hold; anything else could change the angles
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"}
ROPE_FIELDS |= {"original_max_position_embeddings", "max_position_embeddings", "low_freq_factor"}
ROPE_FIELDS |= {"high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_FIELDS |= {"short_factor", "long_factor", "mrope_section", "mrope_interleaved", "finetuned"}
# kinds of layers, as transformers names them
QUERY_GROWTH = "llama_4_scaling_beta"  # among rope parameters
SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"

Windows = tuple[int | None, ...]


def rope_config(fields: Fields, default_theta: float, more: Collection[str] = ()) -> RopeConfig:
    """The RopeConfig; its parameters may hold `more`, which the family reads."""
    return scaled_rope(rope_fields(fields), fields.number("rope_theta", default_theta), fields, more)


def rope_fields(fields: Fields) -> Fields:
    """The rope's parameters: transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling."""
    return fields.group("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def scaled_rope(
    scaling: Fields, default_theta: float, fields: Fields, more: Collection[str] = ()
) -> RopeConfig:
    """The RopeConfig of one object of rope parameters, which may hold `more`."""
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    rope_type = "longrope" if scaling.has("long_factor") else ROPE_NAMES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{fields.source}: rope scaling {rope_type!r} is not supported. "
            f"Supported are {', '.join(ROPE_TYPES)}: use a model of one of these kinds."
        )
    kinds = {SLIDING, FULL}  # an object for each kind of layers, which others read
    known = {*ROPE_FIELDS, *kinds, *more}
    unknown = sorted(name for name in scaling.values if scaling.has(name) and name not in known)
    if unknown:
        raise UnsupportedModelError(
            f"{scaling.source}: {', '.join(unknown)} of rope parameters is not supported in this family. "
            "Use a model without it."
        )
    theta = scaling.number("rope_theta", default_theta)
    if rope_type == "dynamic":
        context = fields.integer("max_position_embeddings")
        return RopeConfig(
            theta, "dynamic", scaling.number("factor"), original_max_position=context, context=context
        )
    if rope_type == "linear":
        return RopeConfig(theta, "linear", scaling.number("factor"))
    if rope_type == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.wrong("high_freq_factor", f"a number above low_freq_factor, {low}")
        factor, original = scaling.number("factor"), _original_context(scaling, fields)
        return RopeConfig(theta, "llama3", factor, low, high, original)
    if rope_type == "yarn":
        return _yarn(scaling, theta, _original_context(scaling, fields))
    if rope_type == "longrope":
        return _longrope(scaling, theta, fields)
    return RopeConfig(theta)


def _original_context(scaling: Fields, fields: Fields) -> int:
    """The tokens of the context before it was extended. Phi's files have it outside of the rope's object."""
    name = "original_max_position_embeddings"
    if fields.has(name) or not scaling.has(name):
        return fields.integer(name, fields.integer("max_position_embeddings"))
    return scaling.integer(name)


def _longrope(scaling: Fields, theta: float, fields: Fields) -> RopeConfig:
    original, context = _original_context(scaling, fields), fields.integer("max_position_embeddings")
    factor = scaling.number("factor", context / original)
    usual = longrope_attention_factor(factor, original)
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_position=original,
        attention_factor=scaling.number("attention_factor", usual),
        context=context,
        short_divisors=scaling.numbers("short_factor"),
        long_divisors=scaling.numbers("long_factor"),
    )


def _yarn(scaling: Fields, theta: float, original_context: int) -> RopeConfig:
    factor, scales = scaling.number("factor"), ("mscale", "mscale_all_dim")
    mscales = [scaling.number(name) if scaling.has(name) else 0.0 for name in scales]
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original_context,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor", yarn_attention_factor(factor, *mscales)),
    )


def no_windows(fields: Fields, num_layers: int) -> Windows:
    return ()


def windows_everywhere(fields: Fields, num_layers: int) -> Windows:
    """The same window in every layer, if there is one."""
    return (fields.integer("sliding_window"),) * num_layers if fields.has("sliding_window") else ()


def mistral_windows(fields: Fields, num_layers: int) -> Windows:
    """The same window in every layer. A config without the key means 4096; null means none."""
    return (
        windows_everywhere(fields, num_layers) if "sliding_window" in fields.values else (4096,) * num_layers
    )


def ministral_windows(fields: Fields, num_layers: int) -> Windows:
    """As mistral's, in the layers that layer_types lists if it is there."""
    windows, kinds = mistral_windows(fields, num_layers), layer_kinds(fields, num_layers)
    if not windows or kinds is None:
        return windows
    return tuple(window if kind == SLIDING else None for window, kind in zip(windows, kinds, strict=True))


def ministral3_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Queries grow with their positions, if the rope's parameters say so."""
    scaling = rope_fields(fields)
    if not scaling.has(QUERY_GROWTH):
        return {}
    strength, period = scaling.number(QUERY_GROWTH), config.rope.original_max_position
    return {"temperature": Temperature(strength, period, offset=0, with_rope=True)}


def qwen_moe_windows(fields: Fields, num_layers: int) -> Windows:
    return windows_everywhere(fields, num_layers) if fields.flag("use_sliding_window", False) else ()


def qwen_windows(fields: Fields, num_layers: int) -> Windows:
    """A window in the layers from max_window_layers on, or in those that layer_types lists."""
    if not fields.flag("use_sliding_window", False):
        return ()
    window = fields.integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28, least=0)
    kinds = layer_kinds(fields, num_layers)
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == SLIDING else None for kind in kinds)


def layer_kinds(fields: Fields, num_layers: int, other: str = SLIDING) -> list[str] | None:
    """The kind of every layer, full attention or the `other` one, if the configuration lists them."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in (other, FULL) for kind in kinds)
    ):
        raise fields.wrong("layer_types", f"{num_layers} entries, each {FULL} or {other}")
    return kinds


def pattern_windows(every: int, default_window: int = 4096) -> Callable[[Fields, int], Windows]:
    """Windows in the layers that layer_types lists; without it, in all but every `every`-th layer."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window = fields.integer("sliding_window", default_window)
        pattern = fields.integer("sliding_window_pattern", every)
        usual = [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(num_layers)]
        kinds = layer_kinds(fields, num_layers) or usual
        return tuple(window if kind == SLIDING else None for kind in kinds)

    return windows


def smollm3_windows(fields: Fields, num_layers: int) -> Windows:
    """Windows in the layers with rope, if the configuration uses any."""
    if not fields.flag("use_sliding_window", False):
        return ()
    return pattern_windows(fields.integer("no_rope_layer_interval", 4))(fields, num_layers)


def gpt_oss_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts with biases in every layer."""
    return replace(mixtral_experts(fields, num_layers), biases=True)


def glm4_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts beside a shared one in all but the first layers, chosen by sigmoid scores."""
    experts = fields.integer("n_routed_experts", 128, most=MAX_EXPERTS)
    width = fields.integer("moe_intermediate_size", 1408)
    groups = fields.integer("n_group", 1, most=experts)
    if experts % groups:
        raise fields.wrong("n_group", f"a divisor of the {experts} experts")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 8, most=experts),
        intermediate_size=width,
        normalize_weights=fields.flag("norm_topk_prob", True),
        layers=frozenset(range(fields.integer("first_k_dense_replace", 1, least=0), num_layers)),
        scoring="sigmoid",
        correction_bias=True,
        groups=groups,
        chosen_groups=fields.integer("topk_group", 1, most=groups),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=width * fields.integer("n_shared_experts", 1, least=0),
    )


def deepseek_v2_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts by softmax scores, of all groups or of those with the best single expert."""
    method, moe = fields.text("topk_method", "greedy"), glm4_experts(fields, num_layers)
    if method not in ("greedy", "group_limited_greedy") or moe.normalize_weights:
        raise UnsupportedModelError(
            f"{fields.source}: topk_method {method!r} with norm_topk_prob {moe.normalize_weights} is not "
            f"supported, only greedy and group_limited_greedy without it. Use another model."
        )
    moe = replace(moe, scoring="softmax", correction_bias=False, group_experts=1)
    return replace(moe, groups=1, chosen_groups=1) if method == "greedy" else moe


def latent_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
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


def glm4_moe_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {"qk_norm": fields.flag("use_qk_norm", False)}


def gpt_oss_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Sinks, and an MLP of which only one setting was ever published."""
    if (fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise UnsupportedModelError(
            f"{fields.source}: only swiglu_alpha 1.702 with swiglu_limit 7 is supported."
        )
    return {"attention_sinks": True, "activation": "clamped_silu"}


def olmo3_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
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


def granite_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logits_scale": 1 / fields.number("logits_scaling", 1.0),
    }


def llama4_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts beside a shared one, whose weights scale what they read."""
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = fields.values.get("moe_layers")
    layers = [*range(step - 1, num_layers, step)] if listed is None else listed
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise fields.wrong("moe_layers", "a list of layer numbers")
    size = fields.integer("intermediate_size")
    experts = fields.integer("num_local_experts", 16, most=MAX_EXPERTS)
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, most=experts),
        intermediate_size=size,
        normalize_weights=False,
        layers=frozenset(layers),
        scoring="sigmoid",
        shared_intermediate_size=size,
        scaled_inputs=True,
    )


def llama4_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Layers with rope attend within chunks; queries of the others grow with their position."""
    blocks = smollm3_blocks(fields, config)
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


def smollm3_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """No rope in every fourth layer, or in those that no_rope_layers marks with 0."""
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


def exaone4_windows(fields: Fields, num_layers: int) -> Windows:
    """Windows in all but every fourth layer; the hub's files also write this as LLLG."""
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return ()
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and set(pattern) == {"L", "G"} and pattern.index("G") == len(pattern) - 1:
        fields = Fields({**fields.values, "sliding_window_pattern": len(pattern)}, fields.source)
    return pattern_windows(4)(fields, num_layers)


def exaone4_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """If some layers have windows, only they have rope."""
    return {"layer_ropes": _ropes_of_windows(config)} if config.sliding_windows else {}


def _ropes_of_windows(config: ModelConfig) -> tuple[RopeConfig | None, ...]:
    return tuple(None if window is None else config.rope for window in config.sliding_windows)


def cohere2_blocks(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Only layers with a window have rope."""
    return {
        "logits_scale": fields.number("logit_scale", 0.0625),
        "layer_ropes": _ropes_of_windows(config),
    }


def mixtral_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts in every layer, their probabilities always normalized."""
    experts = fields.integer("num_local_experts", 8, most=MAX_EXPERTS)
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 2, most=experts),
        intermediate_size=fields.integer("intermediate_size"),
        normalize_weights=True,
        layers=frozenset(range(num_layers)),
    )


def qwen_experts(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts in every decoder_sparse_step-th layer that is not listed in mlp_only_layers."""
    experts_name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    experts = fields.integer(experts_name, most=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 8, most=experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalize_weights=fields.flag("norm_topk_prob", False),
        layers=frozenset(
            layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
        ),
    )
