"""FP8 matrices of all experts of a layer as one tensor, with scales beside it:

    experts.gate_up_proj             e4m3 [experts, out, in]  or, as Qwen3-VL is published, [experts, in, out]
    experts.gate_up_proj_scale_inv        [experts, lines, columns] in the same order, [experts], or one

Gates are the first half of the outputs. Each half has scales of its own if it has whole blocks, or if there
are two lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError
from paceline.models.checkpoint import Stored, Tensor
from paceline.models.config import ModelConfig
from paceline.models.files.stacked_experts import is_transposed
from paceline.models.quantized.layouts import fp8
from paceline.models.quantized.method import Quantization

MATRIX = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
OF_ACTIVATIONS = "_activation_scale"  # which are not quantized here


@dataclass(frozen=True)
class Plane:
    """A matrix of a mapped file, bytes or floats; implements checkpoint.Tensor."""

    values: npt.NDArray[Any]
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return Stored(self.kind, self.values.nbytes)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values of scales, a new array of `shape`."""
        return self.values.astype(np.float32)

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The bytes of a matrix in e4m3."""
        return self.values

    def take_rows(self, part: slice) -> Plane:
        """Some rows."""
        return Plane(self.values[part], self.kind)


def without_stacks(
    tensors: Mapping[str, Tensor], quantization: Quantization, config: ModelConfig
) -> dict[str, Tensor]:
    """The tensors, with stacked FP8 experts one by one, decoded when they are read."""
    made, used = dict[str, Tensor](), set[str]()
    for name, tensor in tensors.items():
        if tensor.kind == "F8_E4M3" and len(tensor.shape) == 3 and (match := MATRIX.fullmatch(name)):
            scale = tensors.get(f"{name}_scale_inv")
            if scale is None:
                raise CheckpointError(
                    f"{name} is in FP8, but has no {name}_scale_inv. The file is incomplete: fetch it again."
                )
            used |= {name, f"{name}_scale_inv", f"{name}{OF_ACTIVATIONS}"}
            for part, weight, scales in _matrices(
                match[2], tensor, scale, is_transposed(name, tensors, config)
            ):
                own = f"{match[1]}.{part}"
                made[f"{own}.weight"] = fp8(own, {"weight": weight, "weight_scale": scales}, quantization)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | made


def _matrices(
    name: str, tensor: Tensor, scale: Tensor, transposed: bool
) -> Iterator[tuple[str, Plane, Plane]]:
    """The matrix [out, in] of each expert and its scales; gates and ups apart where scales are."""
    experts = tensor.shape[0]
    codes = tensor.blocks().reshape(tensor.shape)
    numbers = scale.float32()
    if numbers.size == 1:
        numbers = np.broadcast_to(numbers.ravel()[0], (experts, 1, 1))
    elif numbers.shape == (experts,):
        numbers = numbers[:, None, None]
    if numbers.ndim != 3 or len(numbers) != experts:
        raise CheckpointError(
            f"{name}: scales {list(scale.shape)} do not fit {experts} experts. The file is damaged: fetch "
            "the model again."
        )
    if transposed:
        codes, numbers = codes.swapaxes(1, 2), numbers.swapaxes(1, 2)
    halves = name == "gate_up_proj" and numbers.shape[1] % 2 == 0
    for expert in range(experts):
        if not halves:
            yield f"{expert}.{name}", Plane(codes[expert], tensor.kind), Plane(numbers[expert], scale.kind)
            continue
        for part, *both in zip(
            ("gate_proj", "up_proj"), np.split(codes[expert], 2), np.split(numbers[expert], 2), strict=True
        ):
            yield f"{expert}.{part}", Plane(both[0], tensor.kind), Plane(both[1], scale.kind)
