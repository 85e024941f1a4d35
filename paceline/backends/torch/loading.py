"""Loads a checkpoint as a torch model: devices, dtype, and the pieces of a rank."""

from __future__ import annotations

import warnings
from typing import cast

import torch

from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.quantizations import is_packed
from paceline.models.quantized.rounded import rounded, slabs
from paceline.models.transformer.blocks import Take, Weight
from paceline.models.transformer.model import Transformer
from paceline.models.transformer.tensor_parallel import Communicator, SingleRank, TensorParallel, count_pieces

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_pieces(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Communicator | None = None,
    row_by_row: bool = False,
    quantization: str = "none",
) -> Transformer:
    """The model, or a rank's pieces of it. The number of pieces does not depend on that of ranks."""
    config = checkpoint.config
    if device.type == "cpu" and dtype == torch.bfloat16:
        settle_bfloat16_kernels()
    parallel = TensorParallel(count_pieces(config.shared_heads), ranks or SingleRank())
    try:
        return Transformer(config, _take_from(checkpoint, device, dtype, quantization), parallel, row_by_row)
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"The model does not fit into the memory of {device} as {str(dtype).removeprefix('torch.')}; "
            "choose bfloat16, a device with more memory, more devices (tensor_parallel_size), or a smaller "
            "model."
        ) from error


def settle_bfloat16_kernels() -> None:
    """Make torch choose the CPU's bfloat16 kernels now, before any result depends on them.

    On a CPU without bfloat16 the first wide product fails in oneDNN: torch warns, and computes it and all
    later products without oneDNN. In the middle of a run that would change the order of summation.
    """
    wide = torch.ones(64, 64, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.functional.linear(wide, wide)


def _take_from(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantization: str) -> Take:
    """A function that reads one tensor, or some of its rows, so that weights are never in memory twice."""

    def take(name: str, rows: slice | None = None) -> Weight:
        tensor = checkpoint.tensors[name]
        tensor = tensor if rows is None else tensor.take_rows(rows)
        if quantization != "none" and is_packed(name):
            return rounded(tensor, quantization, device, dtype)
        # copied into torch's aligned memory: a product's summation order may depend on alignment
        values = torch.empty(tensor.shape, dtype=dtype, device=device)
        for part in slabs(tensor.shape):
            values[part] = torch.from_numpy(tensor.take_rows(part).float32())
        return values

    return cast(Take, take)  # a quantized weight replaces a tensor in products only


def find_dtype(name: str) -> torch.dtype:
    """The dtype of this name. BackendError if the torch backend does not have it."""
    if name not in DTYPES:
        raise BackendError(f"The torch backend has no dtype {name!r}; choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def find_devices(name: str, count: int = 1) -> list[torch.device]:
    """The device of each rank: as many GPUs, or one CPU for all. BackendError if one is missing."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(
            f"The torch backend knows no device {name!r}; choose cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"The torch backend does not run on {name!r}; choose cpu, cuda or cuda:N.")
    if device.type == "cpu":
        return [device] * count
    found = torch.cuda.device_count()
    if (device.index or 0) >= found:
        raise BackendError(
            f"Device {name!r} was asked for, but torch {torch.__version__} sees {found} "
            "CUDA devices; choose device cpu, or install a torch build with CUDA and its driver."
        )
    if count == 1:
        return [device]
    if ":" in name:
        raise BackendError(
            f"Device {name!r} is one GPU, but tensor_parallel_size is {count}; choose device cuda, and set "
            "CUDA_VISIBLE_DEVICES to use certain GPUs."
        )
    if count > found:
        raise BackendError(
            f"tensor_parallel_size is {count}, but torch sees {found} CUDA devices; use at most {found}, "
            "or device cpu."
        )
    return [torch.device("cuda", index) for index in range(count)]
