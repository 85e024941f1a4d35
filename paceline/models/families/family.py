"""Family: how a model family differs from llama. table.py has them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.models.config import ModelConfig, MoeConfig
from paceline.models.families.fields import Fields
from paceline.models.families.layer_kinds import Windows, no_windows
from paceline.models.files.file_layouts import LLAMA_FILES, FileLayout

# transformers' name -> ours
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


@dataclass(frozen=True)
class Family:
    """A family's differences from llama."""

    qkv_bias: bool = False  # biases on q, k and v, always
    optional_bias: str = "none"  # which projections have biases if there is attention_bias: none, qkv, qkvo
    qk_norm: bool = False
    joint_qk_norm: bool = False
    norm: str = "rms"
    norm_placement: str = "pre"
    activation: str = "silu"  # as transformers names it
    partial_rope: bool = False  # whether a model may rotate a part of each head only
    windows: Callable[[Fields, int], Windows] = no_windows
    moe: Callable[[Fields, int], MoeConfig] | None = None
    more: Callable[[Fields, ModelConfig], dict[str, Any]] | None = None  # further fields of ModelConfig
    derived: Callable[[Fields], dict[str, object]] | None = None  # keys that follow from others
    files: FileLayout = LLAMA_FILES
    # prefix of the tensors of its block for multi-token prediction, with {layers} for the number of layers;
    # empty: it has none
    mtp: str = ""
    activation_name: str = "hidden_act"
    eps_name: str = "rms_norm_eps"
    rope_fields: tuple[str, ...] = ()  # that its rope parameters may have beside rope_fields.ROPE_FIELDS
    rope: Mapping[str, object] = field(default_factory=dict)  # transformers' for a config without any
    quantizations: tuple[str, ...] = ()  # that its safetensors may have beside quantized.method.METHODS
    defaults: Mapping[str, object] = field(default_factory=dict)  # transformers' for keys that a config lacks
