"""MTP heads: the blocks for multi-token prediction in some targets' own files.

Families differ in tensor names and in three details; LAYOUTS has an entry per family. Families that
paceline.models does not support have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.errors import CheckpointError, ConfigError
from paceline.models.checkpoint import Tensor
from paceline.models.config import ModelConfig
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import HeadConfig, expected_tensors


@dataclass(frozen=True)
class MtpLayout:
    """How a family stores its MTP block, and the block's inputs."""

    prefix: str  # of its tensors
    names: Mapping[str, str]  # prefixes of names as in config.py: the family's, after `prefix`
    embedding_first: bool  # the projection reads [embedding, state], not [state, embedding]
    norm_features: bool  # it reads the target's last state after the final norm, not before
    norm_output: bool  # its own state is fed back after its last norm, not before
    own_layer: bool = False  # its layer is one of its target's family, not one of llama's shape


# the embedding and the output matrix are there again: they are the target's
_DEEPSEEK = MtpLayout(
    prefix="model.layers.{layers}.",
    names={
        "embedding_norm.": "enorm.",
        "state_norm.": "hnorm.",
        "fc.": "eh_proj.",
        "midlayer.": "",
        "norm.": "shared_head.norm.",
    },
    embedding_first=True,
    norm_features=True,
    norm_output=True,
    own_layer=True,
)
_QWEN = replace(
    _DEEPSEEK,
    prefix="mtp.",
    names={
        "embedding_norm.": "pre_fc_norm_embedding.",
        "state_norm.": "pre_fc_norm_hidden.",
        "fc.": "fc.",
        "midlayer.": "layers.0.",
        "norm.": "norm.",
    },
)
LAYOUTS = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"), _DEEPSEEK),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "mimo": MtpLayout(
        prefix="model.mtp_layers.0.",
        names={
            "embedding_norm.": "token_layernorm.",
            "state_norm.": "hidden_layernorm.",
            "fc.": "input_proj.",
            "midlayer.": "",
            "norm.": "final_layernorm.",
        },
        embedding_first=False,
        norm_features=False,
        norm_output=True,
    ),
}


def mtp_head(target: ModelConfig, tensors: Mapping[str, Tensor]) -> HeadCheckpoint:
    """The MTP block of a target as a head; `tensors` is `Checkpoint.mtp`.

    ConfigError if the target's family has none, CheckpointError if tensors are missing.
    """
    layout = LAYOUTS.get(target.family)
    if layout is None:
        raise ConfigError(
            "the method mtp needs a target with a block for multi-token prediction, as models of the family "
            f"{', '.join(LAYOUTS)} have; this one is a {target.family} model. Use another method."
        )
    config = _config(target, layout)
    layout = replace(layout, prefix=layout.prefix.format(layers=target.num_layers))
    found = {name: _tensor(layout, name, shape, tensors) for name, shape in expected_tensors(config)}
    if not layout.embedding_first:
        found["fc.weight"] = encode(np.roll(found["fc.weight"].float32(), config.hidden_size, axis=1))
    return HeadCheckpoint(config, found, None, Path(layout.prefix))


def _config(target: ModelConfig, layout: MtpLayout) -> HeadConfig:
    """The HeadConfig of the block, which has the sizes of a layer of its target."""
    return HeadConfig.beside(
        target,
        "mtp",
        feature_layers=(target.num_layers,),
        norm_features=layout.norm_features,
        norm_output=layout.norm_output,
        qkv_bias=target.qkv_bias,
        own_lm_head=False,
        layer=_one_layer(target) if layout.own_layer else None,
    )


def _one_layer(target: ModelConfig) -> ModelConfig:
    """A model of one layer, which attends, and has experts if the target has any."""
    moe = target.moe and replace(target.moe, layers=frozenset({0}))
    return replace(target, num_layers=1, moe=moe, recurrent=None)


def _tensor(layout: MtpLayout, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of this name as in config.py. CheckpointError if it is missing or has the wrong shape."""
    ours = next(ours for ours in layout.names if name.startswith(ours))
    theirs = layout.prefix + layout.names[ours] + name.removeprefix(ours)
    if theirs not in tensors:
        raise CheckpointError(
            f"the method mtp looked for the tensor {theirs}, which the target's files do not have. Fetch the "
            "model again with its block for multi-token prediction, as safetensors or as a GGUF file with "
            "it, or use another method."
        )
    if tensors[theirs].shape != shape:
        raise CheckpointError(
            f"tensor {theirs} has shape {list(tensors[theirs].shape)}; the target's configuration asks for "
            f"{list(shape)}. They do not belong together: fetch the model again."
        )
    return tensors[theirs]
