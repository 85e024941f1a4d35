"""The names of a model's matrices, in the order of the descriptor tables of job.py."""

from __future__ import annotations

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.weights.latent_weights import input_names
from paceline.models.config import FEED_FORWARD, ModelConfig, MoeConfig
from paceline.models.files.layout import RECURRENT_MATRICES

LAYER = "model.layers.{}."


def mixer_names(config: ModelConfig, layer: int) -> list[str | None]:
    """The names of a layer's mixer matrices: those that read the input norm, then the output projections."""
    prefix, inputs, outputs = LAYER.format(layer), list[str | None](), list[str | None]([None, None])
    if layer in config.attending_layers:
        attention, shape = [*"qkv", "gate"] if config.attention_gate else [*"qkv"], config.shape_of(layer)
        left_out = "kv" if shape.shared_with is not None else "v" if shape.values_are_keys else ""
        names = [None if part in left_out else f"{prefix}self_attn.{part}_proj.weight" for part in attention]
        inputs += names if config.latent is None else input_names(config.latent, layer)
        outputs[0] = f"{prefix}self_attn.o_proj.weight"
    if config.recurrent is not None and config.is_recurrent(layer):
        place, parts, output = RECURRENT_MATRICES[config.recurrent.kind]
        inputs += [f"{prefix}{place}.{part}.weight" for part in parts]
        outputs[1] = f"{prefix}{place}.{output}.weight"
    return [*inputs, *[None] * (fields.INPUTS - len(inputs)), *outputs]


def bias_name(name: str | None) -> str:
    """The name of a matrix's bias."""
    return (name or "").replace(".weight", ".bias")


def matrix_names(config: ModelConfig) -> list[str | None]:
    """Tensor names in the order of the descriptor table of job.py.

    In a layer with experts, the MLP is the shared expert, or None.
    """
    sparse = config.moe.layers if config.moe else frozenset()
    shared = "mlp.shared_experts" if config.moe and config.moe.shared_intermediate_size else None
    names: list[str | None] = []
    for layer in range(config.num_layers):
        names += mixer_names(config, layer)
        mlp = shared if layer in sparse else "mlp"
        if not config.has_part(layer, FEED_FORWARD):
            mlp = None
        parts = _mlp_parts(config)
        names += [LAYER.format(layer) + f"{mlp}.{part}.weight" if mlp else None for part in parts]
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return [*names, "model.embed_tokens.weight", head]


def layer_input_names(config: ModelConfig) -> list[str]:
    """The names of the matrices of per-layer embeddings, in the order of layer_inputs.py."""
    names = ["model.per_layer_model_projection.weight", "model.embed_tokens_per_layer.weight"]
    for layer in range(config.num_layers if config.per_layer_input else 0):
        prefix = LAYER.format(layer)
        names += [f"{prefix}per_layer_input_gate.weight", f"{prefix}per_layer_projection.weight"]
    return names if config.per_layer_input else []


def _mlp_parts(config: ModelConfig) -> tuple[str, str, str]:
    """The names of an MLP's matrices: gate, up, down. In an MLP without a gate the second is not read."""
    return ("gate_proj" if config.is_gated else "up_proj", "up_proj", "down_proj")


def expert_latent_names(config: ModelConfig) -> list[str | None]:
    """The names of the matrices to the latent space of experts and from it, two for each layer; else none."""
    if config.moe is None or not config.moe.latent_size:
        return []
    return [
        LAYER.format(layer) + f"mlp.{part}_latent_proj.weight" if layer in config.moe.layers else None
        for layer in range(config.num_layers)
        for part in ("fc1", "fc2")
    ]


def expert_names(config: ModelConfig, moe: MoeConfig, layer: int) -> list[str]:
    prefix, parts = LAYER.format(layer), _mlp_parts(config)
    return [
        f"{prefix}mlp.experts.{expert}.{part}.weight" for expert in range(moe.num_experts) for part in parts
    ]
