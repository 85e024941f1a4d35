"""Readers of a config.json's recurrent layers, and of what else families with such layers have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from paceline.errors import UnsupportedModelError
from paceline.models.config import (
    FEED_FORWARD,
    MIXER,
    ModelConfig,
    RecurrentConfig,
    WeightScale,
)
from paceline.models.families import expert_fields, family_fields
from paceline.models.families.fields import Fields
from paceline.models.families.layer_kinds import FULL, layer_kinds

MAX_KERNEL = 64  # tokens that a convolution sees
MAX_HEADS = 10_000
LINEAR = "linear_attention"
NO_STEP_LIMITS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # as transformers 4 and 5 write it


def lfm2(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Short convolutions in the layers that do not attend, and the size of the MLP."""
    attending = fields.values.get("full_attn_idxs")
    if attending is None:
        attending = list(range(config.num_layers))
    if not isinstance(attending, list) or not all(type(layer) is int for layer in attending):
        raise fields.wrong("full_attn_idxs", "a list of layer numbers")
    usual = [FULL if layer in attending else "conv" for layer in range(config.num_layers)]
    recurrent = RecurrentConfig(
        kind="short_conv",
        layers=_layers_of(layer_kinds(fields, config.num_layers, other="conv") or usual),
        conv_kernel=fields.integer("conv_L_cache", 3, least=2, most=MAX_KERNEL),
        conv_bias=fields.flag("conv_bias", False),
    )
    size = fields.integer("block_ff_dim", config.intermediate_size)
    return {"recurrent": recurrent, "intermediate_size": _lfm2_size(fields, size)}


def _lfm2_size(fields: Fields, size: int) -> int:
    """The MLP's size: two thirds of the configured one, in whole multiples, unless it says otherwise."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), fields.integer("block_multiple_of", 256)
    if "block_ffn_dim_multiplier" in fields.values and not fields.has("block_ffn_dim_multiplier"):
        return size  # null: neither a factor nor rounding
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    return multiple * -(-size // multiple)


def granite_hybrid(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Granite's factors; Mamba2 in most layers, and usually no rope; a shared MLP, with experts or alone."""
    if fields.flag("mamba_proj_bias", False) or fields.values.get("time_step_limit") not in NO_STEP_LIMITS:
        raise UnsupportedModelError(
            f"{fields.source}: mamba_proj_bias and a time_step_limit are not supported; use a model without."
        )
    heads, shared = fields.integer("mamba_n_heads", 128), fields.integer("shared_intermediate_size", 1024)
    recurrent = RecurrentConfig(
        kind="mamba2",
        layers=_mamba_layers(fields, config.num_layers),
        conv_kernel=fields.integer("mamba_d_conv", 4, least=2, most=MAX_KERNEL),
        conv_bias=fields.flag("mamba_conv_bias", True),
        key_heads=fields.integer("mamba_n_groups", 1, most=heads),
        value_heads=heads,
        key_dim=fields.integer("mamba_d_state", 256),
        value_dim=fields.integer("mamba_expand", 2) * config.hidden_size // heads,
    )
    if heads % recurrent.key_heads:
        raise fields.wrong("mamba_n_heads", f"a multiple of the {recurrent.key_heads} groups")
    has_rope = fields.has("position_embedding_type") and fields.text("position_embedding_type") == "rope"
    # the smallest models of the family attend in every layer
    blocks = family_fields.granite(fields, config) | {"recurrent": recurrent if recurrent.layers else None}
    if not has_rope:
        blocks["layer_ropes"] = (None,) * config.num_layers
    if not fields.integer("num_local_experts", 8, least=0):
        return blocks | {"intermediate_size": shared}
    return blocks | {
        "moe": replace(expert_fields.mixtral(fields, config.num_layers), shared_intermediate_size=shared)
    }


def falcon(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Mamba2 beside attention in every layer, and factors of many weights."""
    for name in ("mamba_proj_bias", "projectors_bias"):
        if fields.flag(name, False):
            raise UnsupportedModelError(f"{fields.source}: {name} is not supported; use a model without it.")
    if fields.values.get("time_step_limit") not in NO_STEP_LIMITS:
        raise UnsupportedModelError(
            f"{fields.source}: time_step_limit is not supported; use a model without."
        )
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    size = fields.integer("mamba_expand", 2) * config.hidden_size
    if fields.values.get("mamba_d_ssm", 0) is not None:
        size = fields.integer("mamba_d_ssm", 1024)
    if heads % groups or size % heads:
        raise fields.wrong("mamba_n_heads", f"a divisor of {size} and a multiple of the {groups} groups")
    recurrent = RecurrentConfig(
        kind="mamba2",
        layers=frozenset(range(config.num_layers)),
        conv_kernel=fields.integer("mamba_d_conv", 4, least=2, most=MAX_KERNEL),
        conv_bias=fields.flag("mamba_conv_bias", True),
        key_heads=groups,
        value_heads=heads,
        key_dim=fields.integer("mamba_d_state", 256),
        value_dim=size // heads,
        norm_groups=groups if fields.flag("mamba_rms_norm", False) else 0,
        gated_norm=not fields.flag("mamba_norm_before_gate", True),
        beside_attention=True,
    )
    return {
        "recurrent": recurrent,
        "weight_scales": _falcon_scales(fields, recurrent),
        "hidden_factors": fields.flag("hidden_factors", False),  # of GGUF files
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "logits_scale": fields.number("lm_head_multiplier", 1.0),
    }


def _falcon_scales(fields: Fields, recurrent: RecurrentConfig) -> tuple[WeightScale, ...]:
    """A factor of what a matrix reads or gives is one of the matrix."""

    def listed(name: str, count: int) -> tuple[float, ...]:
        found = fields.numbers(name) if fields.has(name) else (1.0,) * count
        if len(found) != count:
            raise fields.wrong(name, f"{count} numbers")
        return found

    attention_in = fields.number("attention_in_multiplier", 1.0)
    gate, down = listed("mlp_multipliers", 2)
    ssm_in = fields.number("ssm_in_multiplier", 1.0)
    values, keys = recurrent.value_heads * recurrent.value_dim, recurrent.key_heads * recurrent.key_dim
    factors = tuple(factor * ssm_in for factor in listed("ssm_multipliers", 5))
    single = {
        "self_attn.q_proj.weight": attention_in,
        "self_attn.k_proj.weight": attention_in * fields.number("key_multiplier", 1.0),
        "self_attn.v_proj.weight": attention_in,
        "self_attn.o_proj.weight": fields.number("attention_out_multiplier", 1.0),
        "mamba.out_proj.weight": fields.number("ssm_out_multiplier", 1.0),
        "mlp.gate_proj.weight": gate,
        "mlp.down_proj.weight": down,
    }
    parts = (values, values, keys, keys, recurrent.value_heads)  # gate, values, keys, queries, steps
    scales = [WeightScale(name, (factor,)) for name, factor in single.items()]
    return (*scales, WeightScale("mamba.in_proj.weight", factors, parts))


NEMOTRON_KINDS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}  # by letters of the hub's files


def nemotron_kinds(fields: Fields) -> list[str]:
    """What the one block of each layer is."""
    kinds = fields.values.get("layers_block_type")
    if kinds is None:
        kinds = [NEMOTRON_KINDS.get(letter, letter) for letter in fields.text("hybrid_override_pattern")]
    names = {"mamba": LINEAR, "attention": FULL}
    known = NEMOTRON_KINDS.values()
    found = [names.get(str(kind), str(kind)) for kind in kinds] if isinstance(kinds, list) else []
    if not found or not all(kind in known for kind in found):
        raise fields.wrong("layers_block_type", f"a list, each one of {', '.join(known)}")
    return found


def nemotron_sizes(fields: Fields) -> dict[str, object]:
    """The number of layers, which configurations need not say."""
    return {"num_hidden_layers": len(nemotron_kinds(fields))}


def nemotron(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Each layer is one block: Mamba2, attention without rope, an MLP or experts."""
    for name in ("mamba_proj_bias", "use_bias", "sliding_window"):
        if fields.values.get(name) not in (None, False):
            raise UnsupportedModelError(f"{fields.source}: {name} is not supported; use a model without it.")
    if fields.values.get("time_step_limit") not in NO_STEP_LIMITS:
        raise UnsupportedModelError(
            f"{fields.source}: time_step_limit is not supported; use a model without."
        )
    kinds = nemotron_kinds(fields)
    heads = fields.integer("mamba_num_heads", 128, most=MAX_HEADS)
    groups = fields.integer("n_groups", 8, most=heads)
    if heads % groups:
        raise fields.wrong("mamba_num_heads", f"a multiple of the {groups} groups")
    experts = frozenset(layer for layer, kind in enumerate(kinds) if kind == "moe")
    moe = replace(
        expert_fields.glm4(fields, config.num_layers),
        layers=experts,
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        latent_size=fields.integer("moe_latent_size", 0, least=0),
    )
    return {
        "layer_parts": tuple(MIXER if kind in (LINEAR, FULL) else FEED_FORWARD for kind in kinds),
        "layer_ropes": (None,) * config.num_layers,
        "moe": moe if experts else None,
        "recurrent": RecurrentConfig(
            kind="mamba2",
            layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
            conv_kernel=fields.integer("conv_kernel", 4, least=2, most=MAX_KERNEL),
            conv_bias=fields.flag("use_conv_bias", True),
            key_heads=groups,
            value_heads=heads,
            key_dim=fields.integer("ssm_state_size", 128),
            value_dim=fields.integer("mamba_head_dim", 64),
            norm_groups=groups,
        ),
    }


def _mamba_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """transformers 5 names the kinds of layers as for other families; 4 and the hub's files differently."""
    names = {"mamba": LINEAR, "attention": FULL}
    kinds = fields.values.get("layer_types") or [LINEAR] * num_layers
    if isinstance(kinds, list):
        kinds = [names.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    own = Fields({"layer_types": kinds}, fields.source)
    return _layers_of(layer_kinds(own, num_layers, other=LINEAR) or [])


def qwen_hybrid(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """Gated delta nets in three of four layers, or where layer_types says so; attention has a gate."""
    every = fields.integer("full_attention_interval", 4)
    usual = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(config.num_layers)]
    recurrent = RecurrentConfig(
        kind="gated_delta",
        layers=_layers_of(layer_kinds(fields, config.num_layers, other=LINEAR) or usual),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4, least=2, most=MAX_KERNEL),
        key_heads=fields.integer("linear_num_key_heads", 16, most=MAX_HEADS),
        value_heads=fields.integer("linear_num_value_heads", 32, most=MAX_HEADS),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
    )
    if recurrent.value_heads % recurrent.key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of the {recurrent.key_heads} key heads")
    return {"recurrent": recurrent, "attention_gate": True}


def _layers_of(kinds: list[str]) -> frozenset[int]:
    """The layers that do not attend."""
    return frozenset(layer for layer, kind in enumerate(kinds) if kind != FULL)
