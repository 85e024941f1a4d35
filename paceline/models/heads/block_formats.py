"""The formats of parallel heads: DFlash, DFlash2, JetSpec and DSpark, as their authors and speculators write.

plain        config.json of a Qwen3 model with block_size; fields that Qwen3 lacks may be in dflash_config
speculators  config.json with speculators_model_type and a transformer_layer_config

Two fields mean different things in them:

    target_layer_ids              plain: numbers of layers, so i is the hidden state i + 1
    aux_hidden_state_layer_ids    speculators: numbers of hidden states
    sample_from_anchor            where it is missing: true for DSpark, false for DFlash
    layers with a window          see only slots before them in speculators and DFlash2, if not said otherwise
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models.families.fields import Fields
from paceline.models.heads.config import BlockAttention, BlockConfig, HeadConfig, usual_block_layers
from paceline.models.heads.formats import (
    SPECULATORS_VERSION,
    qwen_fields,
    read_sizes,
    refuse_activation,
    speculators_part,
)

KINDS = ("dflash", "dspark")
NESTED = ("dflash_config", "dspark_config")  # where plain configs keep some of the fields
LAYER_IDS, AUX_LAYER_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
SLIDING = "sliding_attention"  # in layer_types
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
DFLASH2, DFLASH2_TYPE = "DFlash2DraftModel", "dflash2"  # architecture; speculators_model_type
SPECULATORS = {"dflash": "DFlashSpeculator", DFLASH2_TYPE: DFLASH2, "dspark": "DSparkSpeculator"}
TAPS = 2  # of the convolutions
Shapes = Mapping[str, tuple[int, ...]]


def is_block_config(values: Mapping[str, object]) -> bool:
    """Whether a config.json is that of a parallel head."""
    named = values.get("speculators_model_type") in (*KINDS, DFLASH2_TYPE) or any(
        name in values for name in NESTED
    )
    return named or any(kind in _architectures(values) for kind in KINDS)


def block_tensor_name(name: str) -> str:
    """The name as in config.py of a tensor in a file of a parallel head."""
    return name.removeprefix("model.")


def read_block_config(values: Mapping[str, object], source: str, shapes: Shapes) -> HeadConfig:
    """The HeadConfig of a parallel head's config.json, for tensors of these shapes."""
    top = Fields(values, source)
    nested = {key: value for name in NESTED for key, value in top.group(name).values.items()}
    fields = Fields({**nested, **values}, source)
    speculators = fields.has("speculators_model_type")
    layer = fields.group("transformer_layer_config") if speculators else fields
    is_dspark = "dspark" in _architectures(values) or values.get("speculators_model_type") == "dspark"
    _refuse_unsupported(fields, layer)
    sizes = read_sizes(fields, layer, shapes, max_position=32768)
    width = sizes["target_hidden_size"]
    num_features = shapes.get("fc.weight", (0, width))[1] // width
    return HeadConfig(
        kind="dspark" if is_dspark else "dflash",
        **sizes,
        feature_layers=_feature_layers(fields, num_features),
        fc_norm=fields.flag("fc_norm", False),
        qkv_bias="layers.0.self_attn.q_proj.bias" in shapes,
        qk_norm="layers.0.self_attn.q_norm.weight" in shapes,
        block=_block(fields, layer, is_dspark, sizes["vocab_size"], shapes),
    )


def _block(fields: Fields, layer: Fields, is_dspark: bool, vocab: int, shapes: Shapes) -> BlockConfig:
    own_mask = "mask_embedding" in shapes
    mask = fields.integer("mask_token_id", least=0)
    if mask >= vocab and not own_mask:
        raise fields.wrong("mask_token_id", f"a token below {vocab}, or a mask_embedding.pt beside the file")
    confidence = "confidence_head.proj.weight" in shapes
    is_dflash2 = _is_dflash2(fields)
    group = fields.integer("conv_group_size", least=1) if is_dflash2 else 0
    if group and layer.integer("hidden_size") % group:
        raise fields.wrong("conv_group_size", "a divisor of hidden_size")
    return BlockConfig(
        size=fields.integer("block_size", least=1 if is_dspark else 2),
        mask_token_id=mask,
        layers=_attention(fields, layer),
        sample_from_anchor=fields.flag("sample_from_anchor", is_dspark),
        mask_embedding=own_mask,
        markov_rank=shapes.get("markov_head.markov_w1.weight", (0, 0))[1],
        confidence=confidence,
        confidence_with_markov=confidence and fields.flag("confidence_head_with_markov", True),
        convolution_group=group,
        selector_rank=fields.integer("selector_rank", least=1) if is_dflash2 else 0,
        selector_candidates=fields.integer("selector_top_k", least=1) if is_dflash2 else 0,
    )


def _architectures(values: Mapping[str, object]) -> str:
    """The names of the architectures, in lower case."""
    return str(values.get("architectures", "")).lower()


def _is_dflash2(fields: Fields) -> bool:
    named = fields.values.get("speculators_model_type") == DFLASH2_TYPE
    return named or DFLASH2.lower() in _architectures(fields.values)


def _refuse_unsupported(fields: Fields, layer: Fields) -> None:
    refuse_activation(layer)
    if _is_dflash2(fields) and (taps := fields.integer("conv_kernel_size", TAPS)) != TAPS:
        raise _unsupported(fields, f"conv_kernel_size {taps}", f"a head with {TAPS}")
    if (markov := fields.text("markov_head_type", "vanilla")) != "vanilla":
        raise _unsupported(fields, f"the Markov head {markov!r}", "a head with markov_head_type vanilla")
    if fields.flag("shift_label", False):  # of speculators: every slot guesses one token further
        raise _unsupported(fields, "shift_label", "a head without it")
    if fields.integer("topk_context", 0, least=0):
        raise _unsupported(fields, "topk_context", "a head that attends to the whole context")
    # Targets here rotate halves (neox). A head with the other layout would load, and guess badly.
    interleaved = layer.flag("rope_interleave", False) or layer.flag("rope_interleaved", False)
    if interleaved or not fields.flag("rope_is_neox_style", True):
        raise _unsupported(fields, "interleaved rotary embedding", "a head of a target that rotates halves")


def _unsupported(fields: Fields, what: str, remedy: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fields.source}: {what} is not supported. Use {remedy}.")


def _feature_layers(fields: Fields, count: int) -> tuple[int, ...]:
    """The hidden states that the head reads, as in Hugging Face."""
    name = AUX_LAYER_IDS if fields.has(AUX_LAYER_IDS) else LAYER_IDS
    found = fields.values.get(name)
    if found is None and fields.has("num_target_layers"):
        return usual_block_layers(fields.integer("num_target_layers"), count)
    if not isinstance(found, list) or not found or not all(type(layer) is int for layer in found):
        raise fields.wrong(name, "a list of layer numbers")
    return tuple(layer if name == AUX_LAYER_IDS else layer + 1 for layer in found)


def _attention(fields: Fields, layer: Fields) -> tuple[BlockAttention, ...]:
    """What the slots of a block see, layer by layer."""
    count = layer.integer("num_hidden_layers", most=1024)
    windows = layer if layer.has("layer_types") else fields  # some speculators files have it at the top
    types = windows.values.get("layer_types")
    if types is None:
        types = [SLIDING if fields.flag("use_swa", False) else "full_attention"] * count
    if not isinstance(types, list) or len(types) != count:
        raise windows.wrong("layer_types", f"a list of {count} types of attention")
    causal = any(fields.flag(name, False) for name in ("causal", "causal_head", "is_causal"))
    if SLIDING not in types:
        return (BlockAttention(None, causal),) * count
    window = fields.integer("swa_window_size", windows.integer("sliding_window", 0, least=0) or None)
    backwards = fields.has("speculators_model_type") or _is_dflash2(fields)
    if fields.flag("sliding_window_non_causal", False) or not fields.flag("is_causal", True):
        backwards = False
    sliding = BlockAttention(window, causal or backwards)
    return tuple(sliding if kind == SLIDING else BlockAttention(None, causal) for kind in types)


def _plain_config(config: HeadConfig, target: str) -> dict[str, object]:
    block, layers = _checked_block(config), config.feature_layers or ()
    special: dict[str, object] = {
        "mask_token_id": block.mask_token_id,
        LAYER_IDS: [layer - 1 for layer in layers],
    }
    if block.layers[0].causal:
        special["causal_head"] = True
    special |= _dflash2_fields(block)
    values = qwen_fields(config) | {
        "architectures": [DFLASH2 if block.convolution_group else ARCHITECTURES[config.kind]],
        "tie_word_embeddings": False,
        "block_size": block.size,
    }
    if config.own_lm_head:
        values["draft_vocab_size"] = config.draft_vocab_size
    values |= _norm_fields(config)
    if config.kind == "dflash":
        return values | {"dflash_config": special, "sample_from_anchor": block.sample_from_anchor}
    return values | special | _dspark_fields(block)


def _speculators_config(config: HeadConfig, target: str) -> dict[str, object]:
    block = _checked_block(config)
    if block.layers[0].causal:
        raise ConfigError("speculators does not know causal heads: export this head as vllm or sglang.")
    kind = DFLASH2_TYPE if block.convolution_group else config.kind
    values = {
        "architectures": [SPECULATORS[kind]],
        **speculators_part(kind, target, block.num_drafts),
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": qwen_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "block_size": block.size,
        "mask_token_id": block.mask_token_id,
        AUX_LAYER_IDS: list(config.feature_layers or ()),
        "tie_word_embeddings": False,
        "sample_from_anchor": block.sample_from_anchor,
    }
    values |= _norm_fields(config) | _dflash2_fields(block)
    return values | _dspark_fields(block) if config.kind == "dspark" else values


def _norm_fields(config: HeadConfig) -> dict[str, object]:
    """Our own field: other engines know no norms of a parallel head's features."""
    return {"fc_norm": True} if config.fc_norm else {}


def _dflash2_fields(block: BlockConfig) -> dict[str, object]:
    if not block.convolution_group:
        return {}
    return {
        "conv_kernel_size": TAPS,
        "conv_group_size": block.convolution_group,
        "selector_rank": block.selector_rank,
        "selector_top_k": block.selector_candidates,
    }


def _dspark_fields(block: BlockConfig) -> dict[str, object]:
    return {
        "sample_from_anchor": block.sample_from_anchor,
        "markov_rank": block.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": block.confidence,
        "confidence_head_with_markov": block.confidence_with_markov,
    }


def _checked_block(config: HeadConfig) -> BlockConfig:
    """The block of a head that another engine can load. ConfigError if none can."""
    block = config.block
    assert block is not None
    if block.mask_embedding or not config.qk_norm or len(set(block.layers)) > 1 or block.layers[0].window:
        raise ConfigError(
            "a head with an embedding of its own for MASK, with windows or without q/k norms cannot be "
            "exported: give the other engine the files that this head was loaded from."
        )
    return block


# by format: the config.json of a head, given the name of its target
BLOCK_FORMATS: dict[str, Callable[[HeadConfig, str], dict[str, object]]] = {
    "sglang": _plain_config,
    "vllm": _plain_config,
    "speculators": _speculators_config,
}
