"""MTP heads: the blocks for multi-token prediction in some targets' own files.

Families differ in tensor names and in three details; LAYOUTS has an entry per family. Families that
paceline.models does not support have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import CheckpointError, ConfigError
from paceline.models.checkpoint import Tensor
from paceline.models.config import ModelConfig
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import HeadConfig, expected_tensors
from paceline.models.safetensors_writer import encode


@dataclass(frozen=True)
class MtpLayout:
    """How a family stores its MTP block, and the block's inputs."""

    prefix: str  # of its tensors
    names: Mapping[str, str]  # prefixes of names as in config.py: the family's, after `prefix`
    embedding_first: bool  # the projection reads [embedding, state], not [state, embedding]
    norm_features: bool  # it reads the target's last state after the final norm, not before
    norm_output: bool  # its own state is fed back after its last norm, not before


LAYOUTS = {
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
    found = {name: _tensor(layout, name, shape, tensors) for name, shape in expected_tensors(config)}
    if not layout.embedding_first:
        found["fc.weight"] = encode(np.roll(found["fc.weight"].float32(), config.hidden_size, axis=1))
    return HeadCheckpoint(config, found, None, Path(layout.prefix))


def _config(target: ModelConfig, layout: MtpLayout) -> HeadConfig:
    """The HeadConfig of the block, which has the sizes of a layer of its target."""
    return HeadConfig(
        kind="mtp",
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_position=target.max_position,
        feature_layers=(target.num_layers,),
        norm_features=layout.norm_features,
        norm_output=layout.norm_output,
        qkv_bias=target.qkv_bias,
        own_lm_head=False,
    )


def _tensor(layout: MtpLayout, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of this name as in config.py. CheckpointError if it is missing or has the wrong shape."""
    ours = next(ours for ours in layout.names if name.startswith(ours))
    theirs = layout.prefix + layout.names[ours] + name.removeprefix(ours)
    if theirs not in tensors:
        raise CheckpointError(
            f"the method mtp looked for the tensor {theirs}, which the target's files do not have. Fetch the "
            "model again with its block for multi-token prediction, as safetensors, or use another method."
        )
    if tensors[theirs].shape != shape:
        raise CheckpointError(
            f"tensor {theirs} has shape {list(tensors[theirs].shape)}; the target's configuration asks for "
            f"{list(shape)}. They do not belong together: fetch the model again."
        )
    return tensors[theirs]
