"""The per-head matrices of latent attention (MLA), W_uk and W_uv, stacked for the compiled pass.

Checkpoints have W_uk and W_uv of all heads in one matrix, kv_b_proj [heads * (nope + value), rank]. A pass
reads

    to_latents    of each head [padded rank, nope]: W_uk transposed
    to_values     of each head [padded value, rank]

both zero-padded to whole groups of 32 rows, so that a head's results are whole groups too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.tiles.weight_tile import GROUP
from paceline.models.checkpoint import Stored, Tensor
from paceline.models.config import LatentConfig, ModelConfig

_ATTENTION = "model.layers.{}.self_attn."


@dataclass(frozen=True)
class HeadMatrices:
    """The stacked matrices of all heads, made from kv_b_proj; implements checkpoint.Tensor."""

    tensor: Tensor
    heads: int
    latent: LatentConfig
    to_latents: bool  # else to values
    part: slice | None = None  # of the rows; None: all

    @property
    def shape(self) -> tuple[int, int]:
        own = self.latent
        given, read = (own.rank, own.nope_dim) if self.to_latents else (own.value_dim, own.rank)
        rows = self.heads * -(-given // GROUP) * GROUP
        return len(range(rows)[self.part or slice(None)]), read

    @property
    def kind(self) -> str:
        return "F32"

    @property
    def stored(self) -> Stored:
        """How the file stores it."""
        return self.tensor.stored

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        both = self.tensor.float32().reshape(self.heads, -1, self.latent.rank)
        nope = self.latent.nope_dim
        own = both[:, :nope].swapaxes(1, 2) if self.to_latents else both[:, nope:]
        padded = np.pad(own, ((0, 0), (0, -own.shape[1] % GROUP), (0, 0)))
        return np.ascontiguousarray(padded.reshape(-1, own.shape[2])[self.part or slice(None)])

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The bytes of the values: uint8 [rows, bytes per row]."""
        return self.float32().view(np.uint8)

    def take_rows(self, part: slice) -> HeadMatrices:
        """Some of these rows."""
        assert self.part is None
        return replace(self, part=part)


def input_names(latent: LatentConfig, layer: int) -> list[str]:
    """The names of a layer's matrices that read its input norm."""
    query = "q_a_proj" if latent.query_rank else "q_proj"
    return [f"{_ATTENTION.format(layer)}{name}.weight" for name in (query, "kv_a_proj_with_mqa")]


def latent_names(config: ModelConfig) -> list[str | None]:
    """The names of the matrices in the order of LATENT_MATRICES of job.py."""
    assert config.latent is not None
    names: list[str | None] = []
    for layer in range(config.num_layers):
        prefix = _ATTENTION.format(layer)
        query = f"{prefix}q_b_proj.weight" if config.latent.query_rank else None
        names += [query, f"{prefix}to_latents.weight", f"{prefix}to_values.weight"]
    return names


def norm_names(config: ModelConfig) -> list[str]:
    """The names of the norms of query and KV latents, layer by layer."""
    norms = ("q_a_layernorm", "kv_a_layernorm")
    return [f"{_ATTENTION.format(i)}{name}.weight" for i in range(config.num_layers) for name in norms]


def with_head_matrices(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model and, if it has latent attention, its stacked per-head matrices."""
    latent, made = config.latent, dict[str, Tensor]()
    for layer in range(config.num_layers if latent else 0):
        assert latent is not None
        prefix = _ATTENTION.format(layer)
        both = tensors[f"{prefix}kv_b_proj.weight"]
        for name in ("to_latents", "to_values"):
            made[f"{prefix}{name}.weight"] = HeadMatrices(
                both, config.num_heads, latent, name == "to_latents"
            )
    return {**tensors, **made}
