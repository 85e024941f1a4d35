"""From a config.json, or its equivalent, to a ModelConfig.

What table.py says of a family is applied here; everything else is read the same way for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.families.family import ACTIVATIONS, Family
from paceline.models.families.fields import Fields
from paceline.models.families.rope_fields import rope_config, rope_fields, with_default_rope
from paceline.models.families.table import FAMILIES, OTHER_NAMES

MAX_LAYERS = 10_000
MAX_CONTEXT = 1 << 24  # tokens; backends have tables of this size. The longest published is 10 million


def model_config(values: Mapping[str, object], source: str) -> ModelConfig:
    """The ModelConfig of a config.json (or its equivalent), every field checked.

    `source` names the file in errors. An architecture or a feature that we do not run is an
    UnsupportedModelError; a missing or impossible number is a CheckpointError.
    """
    if is_assistant(values):
        raise UnsupportedModelError(
            f"{source} is an assistant of Gemma 4, which drafts from its target's keys and values. Serve the "
            "target, and give the assistant as --draft assistant:PATH."
        )
    fields = text_fields(Fields(values, source))
    name, more = OTHER_NAMES.get(fields.text("model_type"), (fields.text("model_type"), {}))
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{source}: model_type {name!r} is not supported. Supported are {', '.join(FAMILIES)}."
        )
    family = FAMILIES[name]
    fields = Fields({**family.defaults, **more, **fields.values}, fields.source)
    fields = with_default_rope(fields, family.rope)
    if family.derived:
        fields = Fields({**fields.values, **family.derived(fields)}, fields.source)
    _refuse_unsupported(fields, family)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly. "
            f"The file is damaged: fetch the model again."
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"{source}: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    attention_bias = fields.flag("attention_bias", False)
    rope = _with_partial_rope(rope_config(fields, 10000.0, family.rope_fields), fields, family, head_dim)
    _check_divisors(rope, head_dim, fields)
    config = ModelConfig(
        family=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number(family.eps_name, 1e-6),
        rope=rope,
        max_position=fields.integer("max_position_embeddings", most=MAX_CONTEXT),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or (attention_bias and family.optional_bias != "none"),
        output_bias=attention_bias and family.optional_bias == "qkvo",
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(fields, num_layers),
        moe=family.moe(fields, num_layers) if family.moe else None,
        activation=ACTIVATIONS[fields.text(family.activation_name, family.activation)],
        norm=family.norm,
        norm_placement=family.norm_placement,
        joint_qk_norm=family.joint_qk_norm,
    )
    return replace(config, **family.more(fields, config)) if family.more else config


def is_assistant(values: Mapping[str, object]) -> bool:
    """Whether a config.json is that of an assistant: see heads/assistant.py."""
    return str(values.get("model_type")).endswith("_assistant")


def text_fields(fields: Fields) -> Fields:
    """The configuration of the language model, if the file describes other models beside it."""
    text = fields.group("text_config")
    if not text.values:
        return fields
    outer = {name: fields.values[name] for name in ("tie_word_embeddings",) if fields.has(name)}
    return Fields({**outer, **text.values}, text.source)


def _with_partial_rope(rope: RopeConfig, fields: Fields, family: Family, head_dim: int) -> RopeConfig:
    """The rope of families that may rotate a part of each head only."""
    share = _rotary_share(fields)
    if share == 1 or fields.has("qk_rope_head_dim"):  # of latents: that is how much
        return rope
    if not family.partial_rope or not 0 < share < 1 or int(head_dim * share) % 2:
        raise UnsupportedModelError(
            f"{fields.source}: partial rotary embedding ({share:g} of heads of {head_dim}) is not supported "
            f"in this family. Use a model of another one."
        )
    return replace(rope, dim=int(head_dim * share))


def _check_divisors(rope: RopeConfig, head_dim: int, fields: Fields) -> None:
    """CheckpointError if longrope does not have a number for each frequency."""
    expected = (rope.dim or head_dim) // 2
    for name, divisors in (("short_factor", rope.short_divisors), ("long_factor", rope.long_divisors)):
        if rope.scaling == "longrope" and len(divisors) != expected:
            raise CheckpointError(
                f"{fields.source} has {len(divisors)} numbers in {name}; expected {expected}, one for each "
                "rotated pair. The file is damaged or was edited: fetch the model again."
            )


def _rotary_share(fields: Fields) -> float:
    """The share of a head that is rotated."""
    return rope_fields(fields).number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """UnsupportedModelError for features that would silently change outputs if they were ignored."""
    activation = fields.text(family.activation_name, family.activation)
    if activation != family.activation:
        raise UnsupportedModelError(
            f"{fields.source}: {family.activation_name} {activation!r} is not supported, only "
            f"{family.activation}: use a model that has it."
        )
    if fields.flag("mlp_bias", False):
        raise UnsupportedModelError(f"{fields.source}: mlp_bias is not supported; use a model without it.")
    # "vision": of images only
    if fields.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModelError(
            f"{fields.source}: bidirectional attention is not supported; use a model without."
        )
