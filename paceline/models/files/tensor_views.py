"""Tensors of files as backends read them: some rows, shifted or scaled. Still mapped, not yet converted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from paceline.models.checkpoint import Stored, Tensor
from paceline.models.gguf.blocks import dequantize


@dataclass(frozen=True)
class RowsOf:
    """Some rows of a tensor; implements checkpoint.Tensor."""

    tensor: Tensor
    rows: npt.NDArray[np.intp]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.tensor.shape[1:])

    @property
    def kind(self) -> str:
        return self.tensor.kind

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return Stored(
            self.tensor.stored.kind, self.tensor.stored.nbytes * len(self.rows) // self.tensor.shape[0]
        )

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        if len(self.shape) == 1:
            return self.tensor.float32()[self.rows]
        return dequantize(self.kind, self.blocks()).reshape(self.shape)

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The stored bytes: uint8 [rows, bytes per row]; a vector is one row."""
        if len(self.shape) == 1:
            return self.tensor.blocks().reshape(self.tensor.shape[0], -1)[self.rows].reshape(1, -1)
        return self.tensor.blocks()[self.rows]

    def take_rows(self, part: slice) -> RowsOf:
        """Some of these rows."""
        return RowsOf(self.tensor, self.rows[part])


@dataclass(frozen=True)
class _Computed(ABC):
    """A tensor whose values are computed from those of another; its classes implement checkpoint.Tensor."""

    tensor: Tensor

    @property
    def kind(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return self.tensor.stored

    @abstractmethod
    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        ...

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The bytes of the values: uint8 [rows, bytes per row]; a vector is one row."""
        values = self.float32()
        return values.view(np.uint8).reshape(1 if values.ndim == 1 else len(values), -1)


@dataclass(frozen=True)
class Shifted(_Computed):
    """The weights of a norm; files hold their difference to `offset`."""

    offset: float

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        return self.tensor.float32() + np.float32(self.offset)

    def take_rows(self, part: slice) -> Shifted:
        """Some of these values."""
        return Shifted(self.tensor.take_rows(part), self.offset)


@dataclass(frozen=True)
class Scaled(_Computed):
    """A matrix whose rows are to be scaled."""

    factors: npt.NDArray[np.float32]  # [rows]

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        scaled: npt.NDArray[np.float32] = self.tensor.float32() * self.factors[:, None]
        return scaled

    def take_rows(self, part: slice) -> Scaled:
        """Some of these rows."""
        return Scaled(self.tensor.take_rows(part), self.factors[part])


@dataclass(frozen=True)
class Flattened(_Computed):
    """A vector of which files hold a matrix of one row."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[1:]

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        return self.tensor.float32().reshape(self.shape)

    def take_rows(self, part: slice) -> RowsOf:
        """Some of these values."""
        return RowsOf(self, np.arange(self.shape[0])[part])


@dataclass(frozen=True)
class LogOfNegated(_Computed):
    """A vector; files hold its negative exponentials."""

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`, by decimal arithmetic: libraries differ in bits."""
        values = [float(Decimal(-float(value)).ln()) for value in self.tensor.float32()]
        return np.array(values, dtype=np.float32)

    def take_rows(self, part: slice) -> LogOfNegated:
        """Some of these values."""
        return LogOfNegated(self.tensor.take_rows(part))


@dataclass(frozen=True)
class JoinedHeads(_Computed):
    """W_uk and W_uv of latent attention as one matrix; files hold both apart, and the first transposed."""

    values: Tensor  # [heads, value, rank], beside `tensor` [heads, rank, nope]
    part: slice | None = None  # of the rows; None: all

    @property
    def shape(self) -> tuple[int, ...]:
        heads, rank, nope = self.tensor.shape
        return len(range(heads * (nope + self.values.shape[1]))[self.part or slice(None)]), rank

    @property
    def stored(self) -> Stored:
        """What the file holds of it."""
        return Stored(self.tensor.stored.kind, self.tensor.stored.nbytes + self.values.stored.nbytes)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, a new array of `shape`."""
        both = np.concatenate((self.tensor.float32().swapaxes(1, 2), self.values.float32()), axis=1)
        return both.reshape(-1, both.shape[2])[self.part or slice(None)]

    def take_rows(self, part: slice) -> JoinedHeads:
        """Some of these rows."""
        assert self.part is None
        return JoinedHeads(self.tensor, self.values, part)
