"""The head formats of other projects: their config.json and tensor names.

SafeAILab    config.json of a llama with draft_vocab_size; tensors midlayer.* (eagle: layers.0.*)
SGLang       the same with an architecture of its own; vLLM loads it too
speculators  config.json with speculators_model_type and a transformer_layer_config; tensors layers.0.*
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models.config import RopeConfig
from paceline.models.families.fields import Fields
from paceline.models.families.rope_fields import rope_config
from paceline.models.heads.config import HeadConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")
P_EAGLE_TYPE = "peagle"  # speculators_model_type
FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
SPECULATORS_VERSION = "0.9.0"
SPECULATIVE_TOKENS = 5  # the recommendation that a speculators file carries

# prefixes of names in files -> ours
PREFIXES = {"model.": "", "layers.0.": "midlayer.", "transformer.": "midlayer.", "fusion_fc.": "fc."}
# copies of the target's weights that some trainers write to their files
COPIES = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")


def our_name(name: str) -> str:
    """The name as in config.py of a tensor in a file."""
    for theirs, ours in PREFIXES.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name


def read_config(
    values: Mapping[str, object], source: str, shapes: Mapping[str, tuple[int, ...]]
) -> HeadConfig:
    """The HeadConfig of a config.json in any of the formats, for tensors of these shapes."""
    fields = Fields(values, source)
    speculators = fields.has("speculators_model_type")
    layer = fields.group("transformer_layer_config") if speculators else fields
    refuse_activation(layer)
    eagle3 = "midlayer.hidden_norm.weight" in shapes
    num_layers = layer.integer("num_hidden_layers", 1, most=64)
    if num_layers != 1 and not eagle3:
        raise UnsupportedModelError(f"{source}: only eagle3 heads may have several layers, not {num_layers}.")
    # as vLLM, which most heads are served with: true where a speculators file of EAGLE-3 lacks it
    is_p_eagle = values.get("speculators_model_type") == P_EAGLE_TYPE
    defaults = {"norm_before_residual": speculators and eagle3 and not is_p_eagle}
    flags: dict[str, Any] = {name: fields.flag(name, defaults.get(name, False)) for name in FLAGS}
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise fields.wrong("fc_norm", "false where norm_before_fc is true")
    return HeadConfig(
        kind="eagle3" if eagle3 else "eagle",
        **read_sizes(fields, layer, shapes, max_position=2048),
        feature_layers=_feature_layers(fields) if eagle3 else None,
        fc_bias="fc.bias" in shapes,
        **flags,
        num_layers=num_layers,
        mask_token_id=_mask_token(fields, layer.integer("vocab_size")) if "mask_hidden" in shapes else None,
    )


def read_sizes(
    fields: Fields, layer: Fields, shapes: Mapping[str, tuple[int, ...]], max_position: int
) -> dict[str, Any]:
    """The fields of a HeadConfig that every format has. `max_position`: of a file that does not tell it."""
    hidden, heads = layer.integer("hidden_size"), layer.integer("num_attention_heads")
    vocab, own_lm_head = layer.integer("vocab_size"), "lm_head.weight" in shapes
    return {
        "vocab_size": vocab,
        "draft_vocab_size": shapes["lm_head.weight"][0] if own_lm_head else vocab,
        "hidden_size": hidden,
        "target_hidden_size": fields.integer("target_hidden_size", hidden),
        "num_heads": heads,
        "num_kv_heads": layer.integer("num_key_value_heads", heads),
        "head_dim": layer.integer("head_dim", max(1, hidden // heads)),
        "intermediate_size": layer.integer("intermediate_size"),
        "rms_norm_eps": layer.number("rms_norm_eps", 1e-6),
        "rope": rope_config(layer, 10000.0),
        "max_position": layer.integer("max_position_embeddings", max_position),
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_lm_head": own_lm_head,
    }


def _mask_token(fields: Fields, vocab: int) -> int:
    """The token that the slots of a P-EAGLE head after the first read; trainers name it differently."""
    name = next((name for name in MASK_IDS if fields.has(name)), MASK_IDS[0])
    mask = fields.integer(name, least=0)
    if mask >= vocab:
        raise fields.wrong(name, f"a token below {vocab}")
    return mask


def refuse_activation(layer: Fields) -> None:
    """UnsupportedModelError if the MLPs of a head have another activation than silu."""
    if (activation := layer.text("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{layer.source}: hidden_act {activation!r} is not supported, only silu.")


def _feature_layers(fields: Fields) -> tuple[int, ...] | None:
    """The hidden states that the head reads; None: usual_feature_layers."""
    nested = fields.group("eagle_config")
    at_top = fields.has(LAYER_IDS)
    found = (fields if at_top else nested).values.get(LAYER_IDS)
    if found is None:
        return None
    if not isinstance(found, list) or not found or not all(type(layer) is int for layer in found):
        raise fields.wrong(LAYER_IDS, "a list of layer numbers")
    # vLLM numbers hidden states, 0 is the embedding; SGLang numbers layers
    return tuple(layer if at_top else layer + 1 for layer in found)


@dataclass(frozen=True)
class Format:
    """One format to write heads in."""

    config: Callable[[HeadConfig, str], dict[str, object]]  # (config, name of the target): its config.json
    layer: str  # prefix of the layer's tensors


def _sglang_config(config: HeadConfig, target: str) -> dict[str, object]:
    if config.norm_before_residual:
        raise ConfigError("SGLang does not know norm_before_residual: export this head as speculators.")
    eagle3 = config.kind == "eagle3"
    values = _llama_fields(config)
    values |= {
        "architectures": ["LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLMEagle"],
        "tie_word_embeddings": False,
    }
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    if eagle3 and config.own_lm_head:
        values["draft_vocab_size"] = config.draft_vocab_size
    if config.feature_layers is not None:
        values[LAYER_IDS] = list(config.feature_layers)
        values["eagle_config"] = {LAYER_IDS: [layer - 1 for layer in config.feature_layers]}
    values |= _mask_fields(config)
    return values | {name: True for name in FLAGS if getattr(config, name)}


def _speculators_config(config: HeadConfig, target: str) -> dict[str, object]:
    if config.kind != "eagle3":
        raise ConfigError(
            f"only eagle3 heads are written as speculators; export this {config.kind} head as sglang."
        )
    kind = "eagle3" if config.mask_token_id is None else P_EAGLE_TYPE
    return {
        "architectures": [{"eagle3": "Eagle3Speculator", P_EAGLE_TYPE: "PEagleSpeculator"}[kind]],
        **speculators_part(kind, target, SPECULATIVE_TOKENS),
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": _llama_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        LAYER_IDS: None if config.feature_layers is None else list(config.feature_layers),
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in FLAGS},
        **_mask_fields(config),
    }


def _mask_fields(config: HeadConfig) -> dict[str, object]:
    mask = config.mask_token_id
    return {} if mask is None else {MASK_IDS[0]: mask, "parallel_drafting": True}


def speculators_part(method: str, target: str, tokens: int) -> dict[str, object]:
    """What the configs of all speculators have: `tokens` is the recommended length of a draft."""
    return {
        "model_type": "speculators",
        "speculators_model_type": method,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target or None, "architectures": []},
        },
    }


def qwen_fields(config: HeadConfig) -> dict[str, object]:
    """The config.json keys of a qwen3 with the layers of a parallel head."""
    assert config.block is not None
    layers = len(config.block.layers)
    return {
        **_llama_fields(config),
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "attention_bias": config.qkv_bias,
    }


def _llama_fields(config: HeadConfig) -> dict[str, object]:
    """The config.json keys of a llama with the layers of a head."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        **_rope_fields(config.rope),
    }


def _rope_fields(rope: RopeConfig) -> dict[str, object]:
    if rope.frequency_divisors:
        raise ConfigError(
            "the rotary embedding of this head has divisors from a GGUF file, which no config.json can say. "
            "Train the head for a safetensors folder of its target."
        )
    if rope.scaling == "none":
        return {"rope_theta": rope.theta}
    scaling: dict[str, object] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling not in ("linear", "dynamic"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    more = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
        "longrope": ("attention_factor",),
    }
    scaling |= {name: getattr(rope, name) for name in more.get(rope.scaling, ())}
    if rope.scaling == "longrope":
        scaling |= {"short_factor": [*rope.short_divisors], "long_factor": [*rope.long_divisors]}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


FORMATS = {
    "sglang": Format(_sglang_config, "midlayer."),
    "vllm": Format(_sglang_config, "midlayer."),
    "speculators": Format(_speculators_config, "layers.0."),
}
