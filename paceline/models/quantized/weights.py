"""A quantized matrix of a file as a checkpoint.Tensor: decoded by rows, when a backend asks for them.

Every format is the same arithmetic, and only stores its three parts differently (see layouts.py):

    value[row, column] = (code[row, column] - zero[row, group]) * scale[row, group]

It is computed in float32 without a rounding in between; codes of up to 8 bits times a 16-bit scale are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.models.checkpoint import Stored
from paceline.models.gguf.blocks import Bytes, Floats, by_rows

BLOCK = 32  # values of a block of Q4_0 and Q8_0
MIDDLES = {4: ("Q4_0", 8), 8: ("Q8_0", 0)}  # bits -> the block format with this one zero point
WITH_ZEROS = "Q4_1"  # the block format for other zero points of 4 bits
MAX_SCALE = 4096.0  # times the largest zero point, a float16 must hold it
_ROWS = 128  # decoded at a time: of outputs that are stored as columns, whole cache lines
_LOOK = 64  # rows whose zero points are looked at first: most files with other ones show it at once

Rows = Callable[[slice], npt.NDArray[Any]]  # some rows of a matrix


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix [out, in] in which the values of a group share a scale; implements checkpoint.Tensor.

    Where a block format of GGUF holds the same values, `kind` is that format, so that backends with kernels
    for it keep the small form; else it is F32. Q4_0 and Q8_0 hold them bit for bit. Q4_1 does for 4 bits with
    zero points but for its minimum, -zero * scale, which is rounded to float16: by at most a 136th of a step.
    """

    shape: tuple[int, ...]
    stored: Stored
    bits: int
    codes: Rows  # [rows, in]
    scales: Rows  # float32 [rows, groups]
    zeros: Rows | None  # [rows, groups]; None: 0
    column_groups: npt.NDArray[np.intp]  # [in] the group of each column
    kind: str = "F32"
    first: int = 0  # of the rows, for those of a part

    def float32(self) -> Floats:
        """The values as float32, a new array of `shape`."""
        values = np.empty(self.shape, dtype=np.float32)
        run = self._run()

        def decode(rows: slice) -> None:
            part, out = self._in_file(rows), values[rows].reshape(rows.stop - rows.start, -1, run)
            out[:] = self.codes(part).reshape(out.shape)
            if self.zeros is not None:
                out -= self._spread(self.zeros(part), run)
            # a damaged scale may be infinite or NaN: it must show as such a value, not as a warning
            with np.errstate(all="ignore"):
                out *= self._spread(self.scales(part), run)

        by_rows(self.shape, decode, least=_ROWS)
        return values

    def blocks(self) -> Bytes:
        """The values in the format `kind`: uint8 [rows, bytes per row]."""
        if self.kind == "F32":
            return self.float32().view(np.uint8)
        part = self._in_file(slice(0, self.shape[0]))
        scales = self.scales(part)[:, self.column_groups[::BLOCK]].astype(np.float16)
        blocks = self.codes(part).reshape(len(scales), -1, BLOCK)
        if self.kind == "Q8_0":
            packed = blocks.view(np.uint8)
        else:  # value i of a block beside value i + 16
            packed = blocks[:, :, :16] | (blocks[:, :, 16:] << np.uint8(4))
        parts = [scales[:, :, None].view(np.uint8), packed]
        if self.kind == "Q4_1":
            parts.insert(1, self._minimums(part)[:, :, None].view(np.uint8))
        return np.concatenate(parts, axis=2).reshape(len(scales), -1)

    def take_rows(self, part: slice) -> GroupedWeight:
        """Some rows of the matrix; only they are ever read."""
        count = len(range(*part.indices(self.shape[0])))
        return replace(self, shape=(count, self.shape[1]), first=self.first + part.start)

    def in_blocks(self) -> GroupedWeight:
        """This matrix, under the block format that holds the same values if there is one."""
        kind, middle = MIDDLES.get(self.bits, ("", 0))
        groups = self.column_groups
        if not kind or len(groups) % BLOCK or (groups.reshape(-1, BLOCK) != groups[::BLOCK, None]).any():
            return self
        for rows in (slice(0, min(_LOOK, self.shape[0])), slice(0, self.shape[0])):
            scales = self.scales(rows)
            with np.errstate(all="ignore"):
                is_exact = scales.astype(np.float16).astype(np.float32) == scales
            if not is_exact.all() or np.abs(scales).max() > MAX_SCALE:
                return self
            if kind != WITH_ZEROS and self.zeros is not None and (self.zeros(rows) != middle).any():
                if self.bits != 4:
                    return self
                kind = WITH_ZEROS
        return replace(self, kind=kind)

    def _minimums(self, part: slice) -> npt.NDArray[np.float16]:
        """The value of code 0 in each block: [rows, blocks]."""
        zeros = np.zeros((1, 1)) if self.zeros is None else self.zeros(part)
        by_group = -zeros.astype(np.float32) * self.scales(part)
        return by_group[:, self.column_groups[::BLOCK]].astype(np.float16)

    def _in_file(self, rows: slice) -> slice:
        return slice(self.first + rows.start, self.first + rows.stop)

    def _run(self) -> int:
        """The columns of a group, if all groups are as many neighbours; else 1."""
        columns, last = len(self.column_groups), int(self.column_groups[-1])
        run = columns // (last + 1)
        is_even = (self.column_groups == np.arange(columns) // run).all() if run else False
        return run if is_even and run * (last + 1) == columns else 1

    def _spread(self, by_group: npt.NDArray[Any], run: int) -> npt.NDArray[Any]:
        """Numbers [rows, groups] for runs of columns [rows, runs, run]: [rows, runs, 1]."""
        by_run = by_group if by_group.shape[1] == 1 else by_group[:, self.column_groups[::run]]
        return by_run[:, :, None]
