"""The interpreter of the tests computes what Triton's own does, and refuses the same."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
COLUMNS = 13  # of 16: the last ones are masked


@triton.jit
def _mixed_kernel(rows_at, half_at, out_at, columns, scale, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers, halves, doubles, bits, pointers; scalars, rows and columns that are broadcast."""
    row, column = tl.arange(0, 4), tl.arange(0, WIDE)
    inside = (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    half = tl.load(half_at + at, mask=inside, other=-2.0)
    number = tl.load(rows_at + row)[:, None]
    word = at.to(tl.uint32) * 0x9E3779B9 ^ number.to(tl.uint32)
    value = half * scale + tl.sum(half.to(tl.float32), axis=1)[:, None] / (1 + number)
    value = tl.where(word & 1 == 0, value, -value) + (word >> 8).to(tl.float64) * 1e-6
    value += tl.dot(half, tl.trans(half), out_dtype=tl.float32).sum(1)[:, None]
    # numbers on either side, of both signs of zero, in halves that are divided as floats and in truth values
    value += tl.where(1 / (half * -0.0) > 0, 2.0, 3.0) - tl.where(1 / (half * 0.0) > 0, 5, column + 1)
    value += 1 / tl.maximum(half, 0.75) - tl.where(columns > 13, 1.5, half) * (half / 3 - 7 // (column + 2))
    value += (2 - (half < 0.5)) * (5 % (1 + column)) - (column - row[:, None]) * (True - inside)
    top = tl.max(value, axis=1)
    tl.store(out_at + at, value - top[:, None] * 0.5, mask=inside)


@triton.jit
def _negative_kernel(out_at):  # type: ignore[no-untyped-def]
    tl.store(out_at, tl.arange(0, 4).to(tl.uint32) + -1)


@triton.jit
def _unequal_kernel(out_at):  # type: ignore[no-untyped-def]
    tl.store(out_at + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@triton.jit
def _odd_kernel(out_at):  # type: ignore[no-untyped-def]
    tl.store(out_at, tl.sum(tl.full((3,), 1.0, tl.float32), axis=0))


@pytest.fixture(params=["quick", "plain"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        from tests.backends.cuda.quick_interpreter import PLAIN

        for where, name, own in PLAIN:
            assert getattr(where, name) is not own
            monkeypatch.setattr(where, name, own)
    return str(request.param)


def mixed() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(4, COLUMNS, generator=generator).half()
    out = torch.empty(4, COLUMNS, dtype=torch.float64)
    _mixed_kernel[(1,)](torch.tensor([3, 0, 1 << 20, 7]), half, out, COLUMNS, 0.37, WIDE=16)
    return out


def test_a_kernel_of_many_types_and_shapes_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.backends.cuda.quick_interpreter import PLAIN

    quick = mixed()
    for where, name, own in PLAIN:
        assert getattr(where, name) is not own
        monkeypatch.setattr(where, name, own)
    assert torch.equal(quick.view(torch.int64), mixed().view(torch.int64))
    assert quick.isfinite().all()
    assert quick.unique().numel() == quick.numel()


def test_negative_numbers_blocks_of_other_sizes_and_odd_sizes_are_refused(kind: str) -> None:
    for _ in range(2):  # what is refused is not kept
        with pytest.raises(InterpreterError, match="unsigned tensor and a negative scalar"):
            _negative_kernel[(1,)](torch.empty(4))
        with pytest.raises(InterpreterError, match="incompatible dimensions at index 0: 4 and 8"):
            _unequal_kernel[(1,)](torch.empty(8))
        with pytest.raises(InterpreterError, match="must be a power of 2"):
            _odd_kernel[(1,)](torch.empty(1))
