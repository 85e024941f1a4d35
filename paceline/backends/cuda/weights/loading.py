"""Loads a checkpoint's weights on a GPU: device, dtype, packing, and the rows of a rank."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from paceline.backends.cuda.kernels.products.packing import BLOCKS, block_lines, step_of
from paceline.backends.cuda.weights.model_weights import Weights, load_weights, packing_for
from paceline.backends.cuda.weights.shard import WHOLE, Shard
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import FEED_FORWARD, ModelConfig
from paceline.models.files.mapped import release_pages
from paceline.models.needs import block_kind
from paceline.models.quantizations import is_packed

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_checkpoint_weights(
    checkpoint: Checkpoint, device: torch.device, dtype: str, quantization: str, shard: Shard = WHOLE
) -> Weights:
    """The weights of a model, or a rank's part of them: no other rows of the file are read."""
    kind = DTYPES[dtype]
    packing = packing_for(quantization, lambda name: _kept_kind(checkpoint.tensors[name]))

    def find(name: str, rows: slice | None) -> Tensor:
        tensor = checkpoint.tensors[name]
        return tensor if rows is None else tensor.take_rows(rows)

    def take(name: str, rows: slice | None = None) -> torch.Tensor:
        tensor, in_full = find(name, rows), is_packed(name) and packing(name) != "none"
        values = _stored(tensor).to(device)
        if tensor.kind in STORED:
            release_pages(tensor.blocks())  # the file's pages are not needed again
        return values.to(torch.float32 if in_full else kind)

    def blocks(name: str, rows: slice | None = None) -> torch.Tensor:
        tensor = find(name, rows)
        return block_lines(torch.tensor(tensor.blocks(), device=device), tensor.kind)

    try:
        return load_weights(checkpoint.config, take, packing, blocks, shard)
    except torch.OutOfMemoryError as error:
        values = sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
        free, total = torch.cuda.mem_get_info(device)
        raise BackendError(
            f"The model does not fit: its weights take {values * kind.itemsize / 1e9:.1f} GB as {dtype}, "
            f"and {device} has {total / 1e9:.1f} GB, of which others use {(total - free) / 1e9:.1f}. "
            "Choose a device with more memory, more devices (tensor_parallel_size), a smaller model, or end "
            "what else runs there."
        ) from error


def _kept_kind(tensor: Tensor) -> str:
    """The block format of a matrix in its file; F32 if its depth is not a multiple of the format's step."""
    kind = block_kind(tensor)
    return "F32" if kind in BLOCKS and tensor.shape[1] % step_of(BLOCKS[kind]) else kind


def _stored(tensor: Tensor) -> torch.Tensor:
    """A tensor's values in the dtype of its file, or as float32 from a block format."""
    kind = STORED.get(tensor.kind)
    if kind is None:
        return torch.from_numpy(tensor.float32())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the file is mapped read-only, and no code writes to it
        stored = torch.from_numpy(np.ascontiguousarray(tensor.blocks()))
    return stored.reshape(-1).view(kind).reshape(tensor.shape)


def check_model(config: ModelConfig) -> None:
    """BackendError if the kernels cannot run such a model."""
    if config.head_dim % 2:
        raise BackendError(
            f"The cuda backend needs an even head size, not {config.head_dim}; use backend='torch'."
        )
    alone = [layer for layer, part in enumerate(config.layer_parts) if part == FEED_FORWARD]
    if any(layer + 1 in alone for layer in alone):
        raise BackendError(
            f"The cuda backend cannot run layers {alone} of this {config.family} model, MLPs of which some "
            "follow each other; use backend='torch'."
        )


def find_device(name: str) -> torch.device:
    """The device of this name. BackendError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"The cuda backend knows no device {name!r}; choose cuda or cuda:N.") from error
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise BackendError(
            f"The cuda backend was asked for on {name!r}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; choose backend='cpu', or install a torch build with "
            "CUDA and its driver."
        )
    return device
