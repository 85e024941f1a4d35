"""A GGUF file as a Checkpoint: metadata to config, tensors under Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import LatentConfig, ModelConfig, RopeConfig
from paceline.models.families.config_reader import model_config
from paceline.models.families.family_fields import QUERY_GROWTH
from paceline.models.families.fields import Fields
from paceline.models.families.layer_kinds import FULL, SLIDING
from paceline.models.families.table import FAMILIES
from paceline.models.files.file_layouts import fused_matrices, half_split_rows, latent_rows, split_joined
from paceline.models.files.layout import select_tensors
from paceline.models.files.mapped import damaged
from paceline.models.files.tensor_views import JoinedHeads, LogOfNegated, RowsOf
from paceline.models.gguf.architectures import (
    ARCHITECTURES,
    BLOCK_NAMES,
    CONFIG_KEYS,
    CONVOLUTIONS,
    WITHOUT_SUFFIX,
    Architecture,
)
from paceline.models.gguf.draft_heads import DRAFT_HEADS
from paceline.models.gguf.fields import mtp_layers
from paceline.models.gguf.reader import GgufFile, GgufTensor
from paceline.models.transformer.rope import yarn_attention_factor

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # of LFM2: the norm before the LM head
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# what files hold that are no models, by general.type
NO_MODELS = {
    "adapter": "a LoRA adapter, not a model. Give the adapter's folder as peft saved it, with --lora-modules "
    "NAME=FOLDER, and serve the model that it was trained on.",
    "mmproj": "the vision or audio part of a model, which is not served. Give its language model.",
    "imatrix": "an importance matrix, which quantizers read. Give the file of the model.",
}
KINDS = {"clip": "mmproj"}  # by general.architecture
BLOCK_NAME = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias|scale))?")
HUGE_DIVISOR = 1e20  # of a frequency: nothing turns by an angle that was divided by it
VECTORS = ("ssm_a", "ssm_d", "ssm_norm")  # which files may store as a matrix
# weights [experts, out, in], biases [experts, out]
STACKED_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
SINGLE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")  # in old files


def gguf_checkpoint(file: GgufFile) -> Checkpoint:
    """The model in an opened GGUF file, its config and tensors checked against each other."""
    known = _architecture(file)
    if "token_embd.weight" not in file.tensors:
        raise damaged(file.path, "the tensor token_embd.weight is missing")
    config = layers_config(file, known, file.tensors["token_embd.weight"].shape[0])
    tensors: dict[str, Tensor] = {}
    fused = fused_matrices(config, FAMILIES[config.family].files.gated_queries)
    for name, stored in renamed(file, known, config):
        for own_name, tensor in split_joined(name, stored, fused):
            if own_name in tensors:
                raise damaged(file.path, f"two tensors stand for {own_name}")
            tensors[own_name] = tensor
    if config.latent is not None:
        tensors = dict(_latent_tensors(file, tensors, config.latent))
    mtp = _mtp_block(file, tensors, known, config)
    return Checkpoint(config, select_tensors(config, tensors, file.path), file.path, mtp)


def architecture_of(file: GgufFile) -> str:
    """The name of the architecture that the file has."""
    return Fields(file.metadata, file.path.name).text("general.architecture")


def draft_method(file: GgufFile) -> str:
    """The method that drafts with the head in a file; empty: it holds none."""
    architecture = architecture_of(file)
    if architecture not in DRAFT_HEADS:
        return ""
    if architecture == "dflash" and "markov_w1.weight" in file.tensors:
        return "dspark"
    return architecture.removeprefix("gemma4-")


def _architecture(file: GgufFile) -> Architecture:
    """What is known of the architecture of a file. UnsupportedModelError if it holds no model that we run."""
    source, architecture = file.path.name, architecture_of(file)
    if method := draft_method(file):
        raise UnsupportedModelError(
            f"{source} is a draft head, not a model. Serve the model that it drafts for, with "
            f"--draft {method}:{file.path}."
        )
    kind = KINDS.get(architecture, file.metadata.get("general.type"))
    if isinstance(kind, str) and kind in NO_MODELS:
        raise UnsupportedModelError(f"{source} is {NO_MODELS[kind]}")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{source}: architecture {architecture!r} is not supported. "
            f"Supported are {', '.join(ARCHITECTURES)} (mistral and mixtral are stored as llama); "
            "or give a folder of safetensors."
        )
    return ARCHITECTURES[architecture]


def metadata_fields(file: GgufFile) -> Fields:
    """The metadata of the file's architecture, without its prefix."""
    architecture = architecture_of(file)
    prefix = architecture + "."
    metadata = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    return Fields(metadata, f"{file.path.name}: {architecture}")


def layers_config(file: GgufFile, known: Architecture, vocab_size: int) -> ModelConfig:
    """The ModelConfig of a GGUF file, through the equivalent config.json; of a draft head, of its layers."""
    config = model_config(layers_values(file, known, vocab_size), file.path.name)
    if known.ropes_by_kind:
        return config
    config = _with_rope_size(metadata_fields(file), config)
    parts = {name.split(".", 2)[-1] for name in file.tensors}  # of any layer
    if "attn_q.bias" in parts and not config.qkv_bias:
        config = replace(config, qkv_bias=True)
    recurrent = config.recurrent
    if known.tiled_values and recurrent and recurrent.key_heads < recurrent.value_heads:
        config = replace(config, recurrent=replace(recurrent, tiled_values=True))
    if "rope_freqs.weight" in file.tensors:
        divisors = _frequency_divisors(file, config.rope.dim or config.head_dim)
        config = _with_rope(config, replace(config.rope, frequency_divisors=divisors))
    return config


def layers_values(file: GgufFile, known: Architecture, vocab_size: int) -> dict[str, object]:
    """The config.json that says what the file's metadata and the names of its tensors say."""
    fields = metadata_fields(file)
    metadata = fields.values
    keys = {**CONFIG_KEYS, **known.keys}
    values: dict[str, object] = {key: metadata.get(name) for key, name in keys.items()}
    values["num_key_value_heads"] = metadata.get(
        "attention.head_count_kv", metadata.get("attention.head_count")
    )
    values["norm_topk_prob"] = fields.flag("expert_weights_norm", True)
    values["rope_theta"] = fields.number("rope.freq_base", 10000.0)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    parts = {name.split(".", 2)[-1] for name in file.tensors}  # of any layer
    values["attention_bias"] = "attn_output.bias" in parts
    values["use_qk_norm"] = "attn_q_norm.weight" in parts
    values["mamba_conv_bias"] = values["use_conv_bias"] = "ssm_conv1d.bias" in parts
    values["mamba_rms_norm"] = "ssm_norm.weight" in parts
    values |= {"model_type": known.family, "vocab_size": vocab_size} | known.more(fields)
    if known.ropes_by_kind:
        return values | _kinds_of_layers(file, fields)
    ropes = _rope_parameters(file, fields, known) | {"truncate": known.truncated_yarn}
    return values | {"rope_parameters": ropes}


def _kinds_of_layers(file: GgufFile, fields: Fields) -> dict[str, object]:
    """What Gemma 4's layers with and without a window have, as far as tensors say it: ropes, values.

    Without a window only some angles turn; the others are divided by a huge number.
    """
    full: dict[str, object] = {
        "rope_type": "proportional",
        "rope_theta": fields.number("rope.freq_base", 1e6),
    }
    if "rope_freqs.weight" in file.tensors:
        divisors = file.tensors["rope_freqs.weight"].float32()
        turning = int((divisors == 1).sum())
        if not turning or (divisors[:turning] != 1).any() or (divisors[turning:] < HUGE_DIVISOR).any():
            raise damaged(file.path, "rope_freqs.weight are not ones, and then numbers that stop the rest")
        full["partial_rotary_factor"] = (turning + 0.5) / len(divisors)  # rounded down to whole angles
    sliding = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    layers = {
        part: {name.split(".")[1] for name in file.tensors if name.endswith(f".attn_{part}.weight")}
        for part in "kv"
    }
    values: dict[str, object] = {"rope_parameters": {FULL: full, SLIDING: sliding}}
    values["attention_k_eq_v"] = not layers["k"] <= layers["v"]
    if "per_layer_token_embd.weight" in file.tensors:
        values["vocab_size_per_layer_input"] = file.tensors["per_layer_token_embd.weight"].shape[0]
    return values


def _rope_parameters(file: GgufFile, fields: Fields, known: Architecture) -> dict[str, object]:
    kind = fields.text("rope.scaling.type", "none")
    lists = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    if all(name in file.tensors for name in lists.values()):
        found = {key: file.tensors[name].float32().tolist() for key, name in lists.items()}
        attention = fields.number("rope.scaling.attn_factor", 1.0)
        original = fields.integer("rope.scaling.original_context_length")
        found |= {"attention_factor": attention, "original_max_position_embeddings": original}
        return {"rope_type": "longrope", **found}
    if kind == "longrope":
        raise UnsupportedModelError(
            f"{fields.source} has longrope without the tensors {' and '.join(lists.values())}. "
            "Use a file that has them, or safetensors."
        )
    names = {
        "factor": "rope.scaling.factor",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    parameters = {key: fields.values.get(name) for key, name in names.items()}
    if kind == "yarn" and fields.has("rope.scaling.attn_factor"):
        usual = yarn_attention_factor(fields.number("rope.scaling.factor"))
        parameters["attention_factor"] = usual * fields.number("rope.scaling.attn_factor")
    if fields.has("rope.scaling.yarn_log_multiplier"):  # stands for both numbers
        scale = round(fields.number("rope.scaling.yarn_log_multiplier") / known.yarn_multiplier, 6)
        parameters |= {"mscale": scale, "mscale_all_dim": scale}
    if fields.has("attention.temperature_scale"):
        parameters[QUERY_GROWTH] = fields.number("attention.temperature_scale")
    elif known.query_growth is not None:
        parameters[QUERY_GROWTH] = known.query_growth
    return {"rope_type": "default" if kind == "none" else kind, **parameters}


def _with_rope_size(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The config with as many rotated values of a head as the file says.

    UnsupportedModelError if its family always rotates whole heads, or if values are not as wide as keys.
    """
    if config.latent is not None:
        return config
    width = config.head_dim
    rotated = fields.integer("rope.dimension_count", config.rope.dim or width)
    if config.layer_ropes and not any(config.layer_ropes):
        rotated = width  # nothing is rotated
    is_partial = FAMILIES[config.family].partial_rope and rotated < width and rotated % 2 == 0
    sizes = {
        "rope.dimension_count": width if is_partial else rotated,
        "attention.value_length": fields.integer("attention.value_length", width),
    }
    for name, size in sizes.items():
        if size != width:
            raise UnsupportedModelError(
                f"{fields.source}.{name} is {size}, but heads have {width} values; "
                f"only models where both are equal are supported. Use one, or safetensors."
            )
    return _with_rope(config, replace(config.rope, dim=rotated if is_partial else 0))


def _with_rope(config: ModelConfig, rope: RopeConfig) -> ModelConfig:
    """The config with another rope, also in the layers that have the model's own."""
    ropes = tuple(rope if own == config.rope else own for own in config.layer_ropes)
    return replace(config, rope=rope, layer_ropes=ropes)


def _frequency_divisors(file: GgufFile, rotated: int) -> tuple[float, ...]:
    """llama 3.x rope scaling as GGUF files store it: one divisor per rotated pair."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.shape != (rotated // 2,):
        raise damaged(file.path, f"rope_freqs.weight has shape {tensor.shape}, not ({rotated // 2},)")
    divisors = tuple(float(value) for value in tensor.float32())
    if not all(0 < value < math.inf for value in divisors):
        raise damaged(file.path, "rope_freqs.weight has values that are not positive numbers")
    return divisors


def renamed(file: GgufFile, known: Architecture, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name, experts one by one, rope rows in half-split order."""
    top_names = {**TOP_NAMES, **known.top_names}
    names = {**BLOCK_NAMES, **known.names}
    unused = _unused_prefixes(file, known, config)
    names |= {part[:-1]: part[:-1] for part in known.mtp if part}
    for name, tensor in file.tensors.items():
        if name in ROPE_TENSORS or name.startswith(unused):
            continue
        if name in top_names:
            yield top_names[name], tensor
        elif match := STACKED_EXPERTS.fullmatch(name):
            if len(tensor.shape) != (3 if match[3] == "weight" else 2):
                raise damaged(file.path, f"tensor {name} has shape {tensor.shape}, not [experts, out, in]")
            for expert, part in enumerate(tensor.slices()):
                yield f"model.layers.{match[1]}.mlp.experts.{expert}.{match[2]}_proj.{match[3]}", part
        elif match := SINGLE_EXPERT.fullmatch(name):
            yield f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight", tensor
        elif (match := BLOCK_NAME.fullmatch(name)) and match[2] in names:
            if known.interleaved_rope and match[2] in ("attn_q", "attn_k"):
                tensor = _half_split(file, name, tensor, config)
            suffix = "" if match[2] in WITHOUT_SUFFIX else f".{match[3] or 'weight'}"
            own_name = f"model.layers.{match[1]}.{names[match[2]]}{suffix}"
            yield (
                own_name if config.moe else own_name.replace(".mlp.shared_experts.", ".mlp."),
                _as_we_store(file, name, match[2], match[3], tensor),
            )
        elif name.startswith("rope_factors_"):
            raise UnsupportedModelError(
                f"{file.path.name}: rope scaling 'longrope' ({name}) is not supported. "
                f"Use the variant of this model with the short context."
            )
        else:
            raise CheckpointError(
                f"{file.path.name}: tensor {name!r} is not one that {architecture_of(file)} models have. "
                f"The file holds another kind of model, or was made by a converter we do not know."
            )


def _latent_tensors(
    file: GgufFile, tensors: Mapping[str, Tensor], latent: LatentConfig
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of latent attention in our order of rows, and W_uk and W_uv of all heads as one matrix."""
    for name, tensor in tensors.items():
        if name.endswith(".v_b_proj.weight"):
            continue
        if name.endswith(".k_b_proj.weight"):
            values = tensors.get(name.replace(".k_b_proj.", ".v_b_proj."))
            shape = (tensor.shape[0], latent.value_dim, latent.rank)
            if values is None or values.shape != shape or tensor.shape[1:] != (latent.rank, latent.nope_dim):
                raise damaged(file.path, f"{name} and v_b_proj are not matrices of the same heads")
            yield name.replace(".k_b_proj.", ".kv_b_proj."), JoinedHeads(tensor, values)
            continue
        rows = latent_rows(name, tensor.shape[0], latent)
        yield name, tensor if rows is None else RowsOf(tensor, rows)


def _as_we_store(file: GgufFile, name: str, part: str, suffix: str | None, tensor: GgufTensor) -> Tensor:
    """A tensor of a layer in the shape and with the values that checkpoint.py's tensors have."""
    shape = tensor.shape
    if part in CONVOLUTIONS and suffix == "weight" and len(shape) == 2:  # files leave out the axis of 1
        return replace(tensor, shape=(shape[0], 1, shape[1]))
    if part == "ffn_gate_inp_shexp" and len(shape) == 1:
        return replace(tensor, shape=(1, *shape))
    if part in VECTORS and len(shape) == 2 and tensor.row_order is None:
        tensor = replace(tensor, shape=(math.prod(shape),), data=tensor.data.reshape(1, -1))
    if part != "ssm_a":
        return tensor
    if not (tensor.float32() < 0).all():
        raise damaged(file.path, f"{name} has values that are not negative")
    return LogOfNegated(tensor)


def _mtp_block(
    file: GgufFile, tensors: dict[str, Tensor], known: Architecture, config: ModelConfig
) -> dict[str, Tensor]:
    """The block for multi-token prediction, taken out of `tensors`, as the family's safetensors name it."""
    layer = f"model.layers.{config.num_layers}."
    prefix = FAMILIES[config.family].mtp.format(layers=config.num_layers)
    block = dict[str, Tensor]()
    for name in [name for name in tensors if name.startswith(layer)] if _mtp_count(file) else ():
        own = name.removeprefix(layer)
        part = next(part for part in known.mtp if own.startswith(part))
        block[prefix + known.mtp[part] + own.removeprefix(part)] = tensors.pop(name)
    return block


def _mtp_count(file: GgufFile) -> int:
    """How many layers for multi-token prediction follow the model's."""
    return mtp_layers(metadata_fields(file))


def _unused_prefixes(file: GgufFile, known: Architecture, config: ModelConfig) -> tuple[str, ...]:
    """How names begin that are left out: of all blocks but the first, and of what the target has, too."""
    blocks = [f"blk.{config.num_layers + layer}." for layer in range(_mtp_count(file))]
    if not known.mtp or not blocks:
        return tuple(blocks)
    return (*(f"{blocks[0]}nextn.{name}." for name in ("embed_tokens", "shared_head_head")), *blocks[1:])


def _half_split(file: GgufFile, name: str, tensor: GgufTensor, config: ModelConfig) -> GgufTensor:
    rows = tensor.shape[0]
    if rows % config.head_dim:
        raise damaged(
            file.path, f"tensor {name} has {rows} rows, which heads of {config.head_dim} cannot share"
        )
    if len(tensor.shape) == 1 and tensor.kind not in ("F32", "F16", "BF16"):
        raise damaged(file.path, f"tensor {name} is a vector in {tensor.kind} blocks")
    return tensor.reordered(half_split_rows(rows, config))
