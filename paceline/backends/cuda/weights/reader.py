"""Reader: reads a rank's tensors from a checkpoint, and chooses the packing of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.backends.cuda.kernels.products.matrix import Matrix
from paceline.backends.cuda.kernels.products.packing import FP8_GROUP, SCALE_WORDS, step_of
from paceline.backends.cuda.weights.shard import Shard
from paceline.backends.cuda.weights.tiled import matrix, padded_line
from paceline.models.config import ModelConfig
from paceline.models.transformer.blocks import Take

PACKINGS = (
    "mxfp4",
    "int4",
    "q41",
    "q4k",
    "q6k",
    "fp8",
    "fp8_blocks",
    "int8",
    "none",
)  # in order of precision
MULTIPLIES_E4M3 = (8, 9)  # compute capability
FP8_HEAD_SIZES = (64, 128, 256)  # head sizes whose attention output can be quantized to e4m3


@dataclass(frozen=True)
class Reader:
    """Reads a rank's part of a checkpoint."""

    config: ModelConfig
    take: Take
    packing: Callable[[str], str]
    blocks: Take | None
    shard: Shard

    def part(self, take: Take, name: str, rows: slice | None) -> torch.Tensor:
        """A tensor, or these rows of it: all of them, on one GPU."""
        return take(name) if rows is None or self.shard.size == 1 else take(name, rows)

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weights [hidden of all ranks]."""
        line = self.take(name)
        return padded_line(line, self.shard.padded(len(line)))

    def vocabulary(self, name: str) -> Matrix:
        """The rows of a matrix [vocab, hidden] that this rank has."""
        size, shard = self.config.vocab_size, self.shard
        return replace(matrix(self.part(self.take, name, shard.rows(size)), None, size, shard), shard=shard)

    def matrices(
        self, names: list[str], rows: Sequence[slice | None], dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], str]:
        """Matrices to concatenate, and their common packing, which is that of the most precise one.

        Blocks of a file are kept only if all of these matrices have the same format.
        """
        kinds = {self.packing(own) for own in names}
        kind = max(kinds, key=PACKINGS.index)
        if kind in SCALE_WORDS and len(kinds) == 1 and self.blocks is not None:
            return [self.part(self.blocks, *own) for own in zip(names, rows, strict=True)], kind
        kind = "int8" if kind in SCALE_WORDS else kind
        weights = [self.part(self.take, *own) for own in zip(names, rows, strict=True)]
        if kind == "fp8" and _has_fp8_input(self.config, names[0]) and _multiplies_e4m3(weights[0].device):
            kind = "e4m3"
        if kind != "none" and weights[0].shape[1] % step_of(kind) == 0:
            return weights, kind
        return [weight.to(dtype) for weight in weights], "none"


def has_residual(config: ModelConfig) -> bool:
    scales = config.embedding_scale, config.residual_scale
    return config.norm_placement != "pre" or config.norm != "rms" or scales != (1, 1)


def _has_fp8_input(config: ModelConfig, name: str) -> bool:
    """Whether a matrix can read e4m3 activations: not those of experts, nor with unsupported sizes."""
    if config.recurrent or config.latent or has_residual(config):
        return False
    if ".mlp.experts." in name or config.hidden_size % FP8_GROUP:
        return False
    return ".self_attn.o_proj." not in name or config.head_dim in FP8_HEAD_SIZES


def _multiplies_e4m3(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 numbers; Triton's interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MULTIPLIES_E4M3
