"""Checkpoint: a loaded model from any file format, as a config and named tensors.

Names are those of Hugging Face checkpoints, for GGUF files too:

    model.embed_tokens.weight                      [vocab, hidden]
    model.layers.{i}.input_layernorm.weight        [hidden]
    model.layers.{i}.self_attn.{q,k,v}_proj.weight [heads * head_dim, hidden]   (.bias: [heads * head_dim])
    model.layers.{i}.self_attn.{q,k}_norm.weight   [head_dim]
    model.layers.{i}.self_attn.o_proj.weight       [hidden, heads * head_dim]
    model.layers.{i}.post_attention_layernorm.weight        (before the MLP)
    model.layers.{i}.{attention,feed_forward}_output_norm.weight    (families with norms there)
    model.layers.{i}.mlp.{gate,up}_proj.weight     [intermediate, hidden]
    model.layers.{i}.mlp.down_proj.weight          [hidden, intermediate]
    model.layers.{i}.mlp.gate.weight               [experts, hidden]            (router)
    model.layers.{i}.mlp.experts.{e}.{gate,up,down}_proj.weight
    model.norm.weight                              [hidden]
    lm_head.weight                                 [vocab, hidden]              (absent when tied)

Matrices are [out, in]; q and k rows are in the half-split rope order of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.models.config import ModelConfig


class Stored(NamedTuple):
    """What a file holds of a tensor."""

    kind: str  # F32, F16, BF16, Q4_K, FP8, AWQ 4-bit, ...
    nbytes: int  # scales and zero points included


class Tensor(Protocol):
    """One tensor on disk, mapped and not yet converted."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """What `blocks` gives: F32, F16, BF16, or a GGML block format such as Q4_K."""
        ...

    @property
    def stored(self) -> Stored:
        """What the file holds, which may be another form than `kind`."""
        ...

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        ...

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The bytes in the form `kind`, one line per row of the matrix: uint8 [rows, bytes per row]."""
        ...

    def take_rows(self, part: slice) -> Tensor:
        """These rows of a matrix, or values of a vector; still mapped, so only they are ever read."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to be given to a backend."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    source: Path
    # the tensors of a block for multi-token prediction, if its files have one, under the family's own names
    mtp: Mapping[str, Tensor] = field(default_factory=dict)
    quantization: str = ""  # of its safetensors, in words; empty: none
