"""Readers of a config.json's experts."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import UnsupportedModelError
from paceline.models.config import MoeConfig
from paceline.models.families.fields import Fields

MAX_EXPERTS = 10_000


def sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """The layers with experts: those that mlp_layer_types lists, else all but the first ones."""
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(fields.integer("first_k_dense_replace", 1, least=0), num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in ("dense", "sparse") for kind in kinds)
    ):
        raise fields.wrong("mlp_layer_types", f"{num_layers} entries, each dense or sparse")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def gpt_oss(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts with biases in every layer."""
    return replace(mixtral(fields, num_layers), biases=True)


def glm4(fields: Fields, num_layers: int) -> MoeConfig:
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
        layers=sparse_layers(fields, num_layers),
        scoring="sigmoid",
        correction_bias=True,
        groups=groups,
        chosen_groups=fields.integer("topk_group", 1, most=groups),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=width * fields.integer("n_shared_experts", 1, least=0),
    )


def deepseek_v2(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts by softmax scores, of all groups or of those with the best single expert."""
    method, moe = fields.text("topk_method", "greedy"), glm4(fields, num_layers)
    if method not in ("greedy", "group_limited_greedy") or moe.normalize_weights:
        raise UnsupportedModelError(
            f"{fields.source}: topk_method {method!r} with norm_topk_prob {moe.normalize_weights} is not "
            f"supported, only greedy and group_limited_greedy without it. Use another model."
        )
    moe = replace(moe, scoring="softmax", correction_bias=False, group_experts=1)
    return replace(moe, groups=1, chosen_groups=1) if method == "greedy" else moe


def llama4(fields: Fields, num_layers: int) -> MoeConfig:
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


def mixtral(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts in every layer, their probabilities always normalized."""
    experts = fields.integer("num_local_experts", 8, most=MAX_EXPERTS)
    return MoeConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 2, most=experts),
        intermediate_size=fields.integer("intermediate_size"),
        normalize_weights=True,
        layers=frozenset(range(num_layers)),
    )


def qwen(fields: Fields, num_layers: int) -> MoeConfig:
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


def qwen2(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts as in qwen3_moe, beside a shared one with a gate."""
    shared = fields.integer("shared_expert_intermediate_size")
    return replace(qwen(fields, num_layers), shared_intermediate_size=shared, shared_gate=True)


def mellum(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts as in qwen3_moe, in the layers that mlp_layer_types lists."""
    return replace(qwen(fields, num_layers), layers=sparse_layers(fields, num_layers))


def granite(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts as in mixtral, with or without a shared one."""
    shared = fields.integer("shared_intermediate_size", 0, least=0)
    return replace(mixtral(fields, num_layers), shared_intermediate_size=shared)


def minimax(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts as in mixtral, by corrected sigmoid scores."""
    return replace(mixtral(fields, num_layers), scoring="sigmoid", correction_bias=True)


def lfm2(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts in all but the first layers, by sigmoid scores, which may be corrected."""
    moe = glm4(fields, num_layers)
    is_corrected = fields.flag("use_expert_bias", True)
    return replace(moe, shared_intermediate_size=0, correction_bias=is_corrected)


def softmax(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts as in glm4_moe, by softmax scores that nothing corrects."""
    return replace(glm4(fields, num_layers), scoring="softmax", correction_bias=False)


def ernie(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts by corrected softmax scores, in every moe_layer_interval-th layer of a range."""
    moe = glm4(fields, num_layers)
    first, last = fields.integer("moe_layer_start_index", 1, least=0), num_layers - 1
    if fields.has("moe_layer_end_index") and fields.values["moe_layer_end_index"] != -1:
        last = fields.integer("moe_layer_end_index", least=0)
    every = fields.integer("moe_layer_interval", 1)
    layers = {layer for layer in range(num_layers) if first <= layer <= last and (layer + 1) % every == 0}
    return replace(moe, scoring="softmax", layers=frozenset(layers))


def cohere2(fields: Fields, num_layers: int) -> MoeConfig:
    """Experts by softmax scores of the chosen ones or by sigmoid scores, and shared ones that are added."""
    strategy = fields.text("shared_expert_combination_strategy", "average")
    shared = fields.integer("num_shared_experts", 0, least=0)
    if shared and strategy != "sum":
        raise UnsupportedModelError(
            f"{fields.source}: shared_expert_combination_strategy {strategy!r} is not supported, only sum: "
            "use a model that has it."
        )
    scoring = fields.text("expert_selection_fn", "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise fields.wrong("expert_selection_fn", "softmax or sigmoid")
    moe = mixtral(fields, num_layers)
    return replace(
        moe,
        normalize_weights=scoring == "softmax" or fields.flag("norm_topk_prob", True),
        layers=sparse_layers(fields, num_layers),
        scoring=scoring,
        shared_intermediate_size=shared * moe.intermediate_size,
    )
