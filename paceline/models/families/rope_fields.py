"""The reader of a config.json's rope, in all the ways in which contexts are extended."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paceline.errors import UnsupportedModelError
from paceline.models.config import RopeConfig
from paceline.models.families.fields import Fields
from paceline.models.families.layer_kinds import FULL, SLIDING
from paceline.models.transformer.rope import longrope_attention_factor, yarn_attention_factor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_NAMES = {"su": "longrope", "mrope": "default"}  # mrope differs for images only
# what an object of rope parameters may hold; anything else could change the angles
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"}
ROPE_FIELDS |= {"original_max_position_embeddings", "max_position_embeddings", "low_freq_factor"}
ROPE_FIELDS |= {"high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_FIELDS |= {"short_factor", "long_factor", "mrope_section", "mrope_interleaved", "finetuned"}


def rope_config(fields: Fields, default_theta: float, more: Collection[str] = ()) -> RopeConfig:
    """The RopeConfig; its parameters may hold `more`, which the family reads."""
    return scaled_rope(rope_fields(fields), fields.number("rope_theta", default_theta), fields, more)


def rope_fields(fields: Fields) -> Fields:
    """The rope's parameters: transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling.

    Of both, transformers takes rope_scaling.
    """
    return fields.group("rope_scaling" if _has_scaling(fields) else "rope_parameters")


def with_default_rope(fields: Fields, default: Mapping[str, object]) -> Fields:
    """The configuration; if it has no parameters of a rope, with the family's."""
    if not default or fields.has("rope_parameters") or _has_scaling(fields):
        return fields
    return Fields({**fields.values, "rope_parameters": default}, fields.source)


def _has_scaling(fields: Fields) -> bool:
    return bool(fields.group("rope_scaling").values)


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
