"""Experts that are stored as one tensor of their layer, in 16 bits or as MXFP4 blocks. Those of gpt-oss:

    experts.gate_up_proj          [experts, hidden, 2 * intermediate]   gate and up columns alternate
    experts.gate_up_proj_bias     [experts, 2 * intermediate]
    experts.down_proj             [experts, intermediate, hidden]
    experts.down_proj_bias        [experts, hidden]

Files in MXFP4 have, instead of a matrix [experts, in, out], its transpose in groups of 32 values:

    experts.gate_up_proj_blocks   uint8 [experts, out, groups, 16]     two 4-bit numbers per byte, low first
    experts.gate_up_proj_scales   uint8 [experts, out, groups]         exponents of two, less 127
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.models.checkpoint import Stored, Tensor
from paceline.models.config import ModelConfig
from paceline.models.gguf.blocks import FORMATS, dequantize

STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks)?")
ROWS_OF_EXPERTS = re.compile(r"(.*\.mlp)(?:\.experts)?\.(gate_up_proj|down_proj)(?:\.weight)?")
MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
MXFP4_VALUES = np.concatenate((MXFP4_VALUES, -MXFP4_VALUES))  # the highest bit is the sign
MXFP4_BIAS = 127


@dataclass(frozen=True)
class ExpertPart:
    """One expert's matrix or bias out of a stacked tensor; implements checkpoint.Tensor."""

    stacked: Tensor  # [experts, in, out], or a bias: [experts, out]
    expert: int
    columns: slice  # of `out`
    kind: str = "F32"

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return Stored(self.stacked.kind, math.prod(self.shape) * FORMATS[self.stacked.kind].block_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        *inputs, outputs = self.stacked.shape[1:]
        return (len(range(*self.columns.indices(outputs))), *inputs)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32: a new array [out, in], or [out]."""
        lines = 1 if len(self.stacked.shape) == 2 else self.stacked.shape[1]
        own = self.stacked.blocks()[self.expert * lines : (self.expert + 1) * lines]
        values = dequantize(self.stacked.kind, own).reshape(lines, -1)[:, self.columns]
        return np.ascontiguousarray(values.T).reshape(self.shape)

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The bytes of the values: uint8 [rows, bytes per row]."""
        values = self.float32()
        return values.reshape(-1, values.shape[-1]).view(np.uint8)

    def take_rows(self, part: slice) -> ExpertPart:
        """Some rows of the matrix, which are stored as columns: the whole expert is read for them."""
        return replace(self, columns=_narrowed(self.columns, self.stacked.shape[-1], part))


@dataclass(frozen=True)
class Mxfp4Part:
    """One expert's matrix out of MXFP4 blocks; implements checkpoint.Tensor."""

    packed: Tensor  # uint8 [experts, out, groups, 16]
    scales: Tensor  # uint8 [experts, out, groups]
    expert: int
    rows: slice  # of `out`
    kind: str = "F32"

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return Stored("MXFP4", math.prod(self.shape) * 17 // 32)  # 16 bytes and a scale for 32 values

    @property
    def shape(self) -> tuple[int, ...]:
        _, outputs, groups, size = self.packed.shape
        return (len(range(*self.rows.indices(outputs))), groups * size * 2)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32: a new array [out, in]."""
        packed = self.packed.blocks().reshape(self.packed.shape)[self.expert, self.rows]
        exponents = self.scales.blocks().reshape(self.scales.shape)[self.expert, self.rows].astype(np.int32)
        pairs = np.stack((packed & 15, packed >> 4), axis=-1)  # [out, groups, 16, 2]
        values = np.ldexp(MXFP4_VALUES[pairs], exponents[:, :, None, None] - MXFP4_BIAS)
        return values.astype(np.float32).reshape(self.shape)

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The bytes of the values: uint8 [out, bytes per row]."""
        return self.float32().view(np.uint8)

    def take_rows(self, part: slice) -> Mxfp4Part:
        """Some rows of the matrix."""
        return replace(self, rows=_narrowed(self.rows, self.packed.shape[1], part))


@dataclass(frozen=True)
class ExpertRows:
    """One expert's matrix out of a stacked tensor [experts, out, in]; implements checkpoint.Tensor."""

    stacked: Tensor
    expert: int
    rows: slice  # of `out`
    kind: str = "F32"

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        share = math.prod(self.shape) / math.prod(self.stacked.shape)
        return Stored(self.stacked.stored.kind, int(self.stacked.stored.nbytes * share))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(range(*self.rows.indices(self.stacked.shape[1]))), self.stacked.shape[2])

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32: a new array [out, in]."""
        own = self.stacked.take_rows(slice(self.expert, self.expert + 1)).float32()
        return np.ascontiguousarray(own.reshape(self.stacked.shape[1:])[self.rows])

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The bytes of the values: uint8 [out, bytes per row]."""
        return self.float32().view(np.uint8)

    def take_rows(self, part: slice) -> ExpertRows:
        """Some rows of the matrix."""
        return replace(self, rows=_narrowed(self.rows, self.stacked.shape[1], part))


def is_transposed(name: str, tensors: Mapping[str, Tensor], config: ModelConfig) -> bool:
    """Whether this stack of experts is [experts, in, out], instead of [experts, out, in].

    Shapes tell: those of gate_up_proj and down_proj of a layer, because one of them may be square.
    """
    inner, hidden = config.moe.intermediate_size if config.moe else 0, config.expert_hidden
    for part, shape in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner))):
        stack = tensors.get(re.sub("(gate_up|down)_proj", f"{part}_proj", name))
        if stack is not None and shape[0] != shape[1]:
            return stack.shape[1:] == shape[::-1]
    return False


def experts_of_rows(tensors: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors; experts that are stored as one tensor [experts, out, in] come one by one.

    Gates are the first half of the rows of gate_up_proj. Qwen3-VL has the transposes.
    """
    for name, tensor in tensors.items():
        match = ROWS_OF_EXPERTS.fullmatch(name)
        if match is None or len(tensor.shape) != 3:
            yield name, tensor
            continue
        prefix, joined = match.groups()
        transposed = is_transposed(name, tensors, config)
        half, view = tensor.shape[2 if transposed else 1] // 2, ExpertPart if transposed else ExpertRows
        parts = {"gate": slice(0, half), "up": slice(half, None)}
        for part, rows in (parts if joined == "gate_up_proj" else {"down": slice(None)}).items():
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.experts.{expert}.{part}_proj.weight", view(tensor, expert, rows)


def _narrowed(chosen: slice, length: int, part: slice) -> slice:
    """The indices `part` among the indices that `chosen` selects from `length`, as one slice."""
    narrowed = range(length)[chosen][part]
    return slice(narrowed.start, narrowed.stop, narrowed.step)


def single_experts(tensors: Mapping[str, Tensor], alternating: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors with stacked experts one by one, under the names of checkpoint.py.

    Columns of gate and up alternate; else gates are the first half of them.
    """
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None:
            if not re.fullmatch(r".*\.mlp\.experts\.\w+_scales", name):  # read with their blocks
                yield name, tensor
            continue
        prefix, joined, kind = match.groups()
        half = tensor.shape[-1] // 2
        parts = {"gate": slice(0, half), "up": slice(half, None)}
        if alternating:
            parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for part, columns in (parts if joined == "gate_up_proj" else {"down": slice(None)}).items():
            for expert in range(tensor.shape[0]):
                own = f"{prefix}.{expert}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"
                if kind == "_blocks":
                    yield own, Mxfp4Part(tensor, tensors[f"{prefix}.{joined}_scales"], expert, columns)
                else:
                    yield own, ExpertPart(tensor, expert, columns)
