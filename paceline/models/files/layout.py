"""The names and shapes of a model's tensors, from its config, and the check that a file has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.checkpoint import Tensor
from paceline.models.config import (
    FEED_FORWARD,
    AttentionShape,
    LatentConfig,
    ModelConfig,
    MoeConfig,
    RecurrentConfig,
)
from paceline.models.gguf.blocks import FORMATS
from paceline.models.quantized.method import REMEDY

# written by some converters; we compute them
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.masked_bias")
MAX_NAMES_IN_ERROR = 5
NORMS = {  # of a layer, by ModelConfig.norm_placement
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("attention_output_norm", "feed_forward_output_norm"),
    "sandwich": (
        "input_layernorm",
        "attention_output_norm",
        "post_attention_layernorm",
        "feed_forward_output_norm",
    ),
    "parallel": ("input_layernorm",),
}


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor that a model of this config has."""
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in layer_tensors(config, layer):
            yield f"model.layers.{layer}.{name}", shape
    if inputs := config.per_layer_input:
        width = config.num_layers * inputs.size
        yield "model.embed_tokens_per_layer.weight", (inputs.vocab_size, width)
        yield "model.per_layer_model_projection.weight", (width, config.hidden_size)
        yield "model.per_layer_projection_norm.weight", (inputs.size,)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)


def layer_tensors(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name, without its layer's, and shape of every tensor of a layer."""
    hidden = config.hidden_size
    for name in ("input_layernorm",) if config.layer_parts else NORMS[config.norm_placement]:
        yield f"{name}.weight", (hidden,)
    recurrent = config.recurrent
    if recurrent is not None and config.is_recurrent(layer):
        yield from RECURRENT_TENSORS[recurrent.kind](recurrent, hidden)
    if layer in config.attending_layers:
        yield from _attention_tensors(config, config.shape_of(layer))
    if config.layer_scales:
        yield "layer_scalar", (1,)
    if inputs := config.per_layer_input:
        yield "per_layer_input_gate.weight", (inputs.size, hidden)
        yield "per_layer_projection.weight", (hidden, inputs.size)
        yield "post_per_layer_input_norm.weight", (hidden,)
    if not config.has_part(layer, FEED_FORWARD):
        return
    if config.moe is None or layer not in config.moe.layers:
        yield from _mlp_tensors("mlp", hidden, config.intermediate_of(layer), gated=config.is_gated)
        return
    yield from _moe_tensors(config.moe, hidden, config.is_gated)


def _attention_tensors(config: ModelConfig, shape: AttentionShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = config.hidden_size, shape.head_dim
    query_size, kv_size = config.num_heads * head_dim, shape.num_kv_heads * head_dim
    projections = {"q": query_size}
    if shape.shared_with is None:
        projections |= {"k": kv_size} if shape.values_are_keys else {"k": kv_size, "v": kv_size}
    if config.latent:
        yield from _latent_tensors(config, config.latent)
        query_size = config.num_heads * config.latent.value_dim
    else:
        for projection, size in projections.items():
            yield f"self_attn.{projection}_proj.weight", (size, hidden)
            if config.qkv_bias:
                yield f"self_attn.{projection}_proj.bias", (size,)
    yield "self_attn.o_proj.weight", (hidden, query_size)
    if config.output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if config.qk_norm or config.joint_qk_norm:
        yield "self_attn.q_norm.weight", (query_size if config.joint_qk_norm else head_dim,)
        if shape.shared_with is None:
            yield "self_attn.k_norm.weight", (kv_size if config.joint_qk_norm else head_dim,)
    if config.attention_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    if config.attention_gate:
        yield "self_attn.gate_proj.weight", (query_size, hidden)
        if config.qkv_bias:
            yield "self_attn.gate_proj.bias", (query_size,)


def _short_conv_tensors(config: RecurrentConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows, rest in (
        ("in_proj", 3 * hidden, (hidden,)),
        ("conv", hidden, (1, config.conv_kernel)),
        ("o_proj", hidden, (hidden,)),
    ):
        yield f"conv.{name}.weight", (rows, *rest)
        if config.conv_bias:
            yield f"conv.{name}.bias", (rows,)


def _gated_delta_tensors(config: RecurrentConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    value_size = config.value_heads * config.value_dim
    yield "linear_attn.in_proj_qkv.weight", (config.conv_size, hidden)
    yield "linear_attn.in_proj_z.weight", (value_size, hidden)
    yield "linear_attn.in_proj_a.weight", (config.value_heads, hidden)
    yield "linear_attn.in_proj_b.weight", (config.value_heads, hidden)
    yield "linear_attn.conv1d.weight", (config.conv_size, 1, config.conv_kernel)
    yield "linear_attn.A_log", (config.value_heads,)
    yield "linear_attn.dt_bias", (config.value_heads,)
    yield "linear_attn.norm.weight", (config.value_dim,)
    yield "linear_attn.out_proj.weight", (hidden, value_size)


def _mamba2_tensors(config: RecurrentConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    value_size = config.value_heads * config.value_dim
    yield "mamba.in_proj.weight", (value_size + config.conv_size + config.value_heads, hidden)
    yield "mamba.conv1d.weight", (config.conv_size, 1, config.conv_kernel)
    if config.conv_bias:
        yield "mamba.conv1d.bias", (config.conv_size,)
    for name in ("A_log", "D", "dt_bias"):
        yield f"mamba.{name}", (config.value_heads,)
    if config.norm_groups:
        yield "mamba.norm.weight", (value_size,)
    yield "mamba.out_proj.weight", (hidden, value_size)


# where a recurrence is in a layer, the matrices that read the residual stream, and the one that adds to it
RECURRENT_MATRICES = {
    "short_conv": ("conv", ("in_proj",), "o_proj"),
    "gated_delta": ("linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"), "out_proj"),
    "mamba2": ("mamba", ("in_proj",), "out_proj"),
}
RECURRENT_TENSORS = {
    "short_conv": _short_conv_tensors,
    "gated_delta": _gated_delta_tensors,
    "mamba2": _mamba2_tensors,
}


def _latent_tensors(config: ModelConfig, latent: LatentConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, rank = config.hidden_size, latent.rank
    sizes = {"kv_a_proj_with_mqa": latent.rope_dim + rank}
    if latent.query_rank:
        sizes["q_a_proj"] = latent.query_rank
        yield "self_attn.q_a_layernorm.weight", (latent.query_rank,)
    query = "q_b_proj" if latent.query_rank else "q_proj"
    queries = config.num_heads * (latent.rope_dim + latent.nope_dim)
    yield f"self_attn.{query}.weight", (queries, latent.query_rank or hidden)
    for name, size in sizes.items():
        yield f"self_attn.{name}.weight", (size, hidden)
        if latent.biases:
            yield f"self_attn.{name}.bias", (size,)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield "self_attn.kv_b_proj.weight", (config.num_heads * (latent.nope_dim + latent.value_dim), rank)


def _moe_tensors(moe: MoeConfig, hidden: int, gated: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mlp.gate.weight", (moe.num_experts, hidden)
    if moe.biases:
        yield "mlp.gate.bias", (moe.num_experts,)
    if moe.correction_bias:
        yield "mlp.gate.e_score_correction_bias", (moe.num_experts,)
    if moe.latent_size:
        yield "mlp.fc1_latent_proj.weight", (moe.latent_size, hidden)
        yield "mlp.fc2_latent_proj.weight", (hidden, moe.latent_size)
    for expert in range(moe.num_experts):
        own, width = f"mlp.experts.{expert}", moe.intermediate_size
        yield from _mlp_tensors(own, moe.latent_size or hidden, width, moe.biases, gated)
    if moe.shared_intermediate_size:
        yield from _mlp_tensors("mlp.shared_experts", hidden, moe.shared_intermediate_size, gated=gated)
    if moe.own_norms:
        for name in (
            "gate.scale",
            "experts_norm.weight",
            "experts_output_norm.weight",
            "shared_output_norm.weight",
        ):
            yield f"mlp.{name}", (hidden,)
        yield "mlp.gate.per_expert_scale", (moe.num_experts,)
    if moe.shared_gate:
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _mlp_tensors(
    prefix: str, hidden: int, intermediate: int, biases: bool = False, gated: bool = True
) -> Iterator[tuple[str, tuple[int, ...]]]:
    shapes = {"gate": (intermediate, hidden)} if gated else {}
    for part, shape in (shapes | {"up": (intermediate, hidden), "down": (hidden, intermediate)}).items():
        yield f"{prefix}.{part}_proj.weight", shape
        if biases:
            yield f"{prefix}.{part}_proj.bias", shape[:1]


def _unused_tensors(config: ModelConfig) -> set[str]:
    """Tensors that files may have though the model does not use them."""
    unused = {"lm_head.weight"} if config.tie_embeddings else set()
    for layer, shape in enumerate(config.layer_shapes):
        if shape.shared_with is not None:
            prefix = f"model.layers.{layer}.self_attn"
            unused |= {f"{prefix}.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
    return unused


def _is_zero_bias(name: str, tensor: Tensor) -> bool:
    """Whether it is a bias that changes nothing: older files of GPTQ have one for every matrix."""
    return name.endswith(".bias") and tensor.kind in FORMATS and not tensor.float32().any()


def select_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The tensors that `config` requires. CheckpointError if one is missing or has the wrong shape.

    A tensor that the config does not explain is an error too: ignoring it would run another model than the
    one in the file.
    """
    selected: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config):
        if name not in tensors:
            raise CheckpointError(
                f"{source.name} lacks the tensor {name}, which a {config.family} model of "
                f"{config.num_layers} layers has. The file is incomplete: fetch the model again."
            )
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{source.name}: tensor {name} has shape {list(tensors[name].shape)}; its configuration "
                f"asks for {list(shape)}. They do not belong together: fetch the model again."
            )
        if tensors[name].kind not in FORMATS:
            raise UnsupportedModelError(
                f"{source.name}: tensor {name} is stored as {tensors[name].kind}, and no "
                f"quantization_config says how to read that. {REMEDY}"
            )
        selected[name] = tensors[name]
    allowed = _unused_tensors(config)
    others = (n for n in tensors if n not in selected and n not in allowed)
    unknown = sorted(
        n for n in others if not n.endswith(IGNORED_SUFFIXES) and not _is_zero_bias(n, tensors[n])
    )
    if unknown:
        more = f" and {len(unknown) - MAX_NAMES_IN_ERROR} more" if len(unknown) > MAX_NAMES_IN_ERROR else ""
        raise CheckpointError(
            f"{source.name} has tensors that a {config.family} model of this configuration does not have: "
            f"{', '.join(unknown[:MAX_NAMES_IN_ERROR])}{more}. The configuration belongs to another model."
        )
    return selected
