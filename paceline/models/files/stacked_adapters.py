"""LoRA adapters of experts that are one parameter of their layer (peft's target_parameters).

    lora_A [experts * rank, in]     expert e has the rows e * rank to (e + 1) * rank
    lora_B [out, rank * experts]    and the columns e, e + experts, e + 2 * experts and so on

peft calls the second axis of a parameter `in`, and the third `out`, whatever they are; later versions swap
them where a family stores [experts, out, in]. Shapes tell. A second parameter of the same module is below
`base_layer`, so that its name does not tell which one it is; shapes do that too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from paceline.core.arrays import Float32Array
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.checkpoint import Tensor
from paceline.models.config import ModelConfig
from paceline.models.files.file_layouts import FileLayout

STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts)(\.base_layer)*")


def expert_changes(
    folder: Path, module: str, found: Mapping[str, Tensor], layout: FileLayout, config: ModelConfig
) -> Iterator[tuple[str, str, Float32Array, Float32Array]]:
    """What such a module changes: its parameter, matrices by name, and down and up of each, not scaled."""
    match, moe = STACK.fullmatch(module), config.moe
    assert match is not None, "asked before"
    assert moe is not None, "asked before"
    first, second = checked_sides(folder, module, found)
    hidden, inner, sides = config.expert_hidden, moe.intermediate_size, 2 if config.is_gated else 1
    layer = int(module.split(".")[2])
    if layer not in moe.layers or layer >= config.num_layers:
        raise UnsupportedModelError(
            f"{folder.name} changes {module}, which this model lacks. Train it with other target_parameters, "
            "or merge it into its model."
        )
    axes = first.shape[1], second.shape[0]
    first_parameter = "gate_up_proj" if config.is_gated else "up_proj"
    ours = {first_parameter: (hidden, sides * inner), "down_proj": (inner, hidden)}  # (in, out)
    fits = [
        (parameter, is_swapped)
        for parameter, own in ours.items()
        for is_swapped in (False, True)
        if axes == (own[::-1] if is_swapped else own)
    ]
    if not fits or first.shape[0] % moe.num_experts:
        raise wrong_shape(folder, module)
    if len(fits) > 1:
        raise UnsupportedModelError(
            f"{folder.name}: {module} may be read in several ways, because the experts' matrices are square "
            "or alike. Merge the adapter into the model, and serve that."
        )
    ((parameter, is_swapped),) = fits
    rank = first.shape[0] // moe.num_experts
    downs = first.float32().reshape(moe.num_experts, rank, -1)
    ups = second.float32().reshape(-1, rank, moe.num_experts).transpose(2, 0, 1)
    if is_swapped:
        downs, ups = ups.transpose(0, 2, 1), downs.transpose(0, 2, 1)
    for expert in range(moe.num_experts):
        name, down = f"{match[1]}.{expert}", np.ascontiguousarray(downs[expert])
        for own, rows in _parts(parameter, layout, config).items():
            yield parameter, f"{name}.{own}", down, np.ascontiguousarray(ups[expert][rows])


def _parts(parameter: str, layout: FileLayout, config: ModelConfig) -> dict[str, slice]:
    """The matrices of an expert in a parameter, and the rows of each."""
    if parameter != "gate_up_proj":
        return {parameter: slice(None)}
    if layout.stacked_experts == "alternating":
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    assert config.moe is not None
    half = config.moe.intermediate_size
    return {"gate_proj": slice(0, half), "up_proj": slice(half, None)}


def checked_sides(folder: Path, module: str, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A and B of a module. CheckpointError if one is missing, or they do not fit each other."""
    down, up = found.get("A"), found.get("B")
    if (
        down is None
        or up is None
        or not len(down.shape) == len(up.shape) == 2
        or up.shape[1] != down.shape[0]
        or not down.shape[0]
    ):
        raise wrong_shape(folder, module)
    return down, up


def wrong_shape(folder: Path, module: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.name}: what is there for {module} does not fit this model's matrix. The adapter belongs to "
        "another model: serve that one."
    )
