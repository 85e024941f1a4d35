"""Products of many rows by the kernel of CUDA C++ have the bits of those by Triton.

There is no interpreter for it: without a Hopper only the way around it is tested.
"""

from __future__ import annotations

import logging
from importlib import resources
from typing import Any

import pytest
import torch

HIDDEN, EPS, MOST_ROWS = 1408, 1e-6, 400
GATES, VOCAB_SIZE = 4608, 34000  # so many that programs go over the depth twice, and the last has padding
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")


@pytest.mark.parametrize(
    ("blocks", "rows", "cut"),
    [
        (448, 96, (96, 1, 132, 4)),  # all columns of a program at a time
        (2004, 96, (96, 1, 132, 4)),  # it goes over the depth four times
        (144, 65, (96, 1, 132, 2)),
        (448, 128, (128, 1, 132, 4)),
        (448, 384, (192, 2, 66, 3)),
        (448, 512, (128, 4, 33, 4)),
    ],
)
def test_programs_share_a_product_with_few_rows_of_padding(
    blocks: int, rows: int, cut: tuple[int, int, int, int]
) -> None:
    from paceline.backends.cuda.kernels.wide import WideCut, wide_cut

    assert wide_cut(blocks, rows) == WideCut(*cut)


def test_the_source_comes_with_the_package() -> None:
    kernels = resources.files("paceline.backends.cuda.kernels")
    assert "wide_product" in (kernels / "wide.cu").read_text()


def test_a_kernel_that_does_not_compile_is_a_warning_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.backends.cuda.kernels import wide

    def broken(*known: Any) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(wide, "NativeKernel", broken)
    wide._kernel.cache_clear()
    made = [wide._kernel(wide.PROJECT, 96, 4, 64, 64, torch.device("cpu")) for _ in range(2)]
    wide._kernel.cache_clear()
    assert made == [None, None]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the driver is too old" in caplog.text


def test_a_torch_without_the_compiler_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.backends.cuda.kernels import native

    caplog.set_level(logging.INFO)
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    native.compiler.cache_clear()
    assert [native.compiler(), native.compiler()] == [None, None]
    native.compiler.cache_clear()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "_compile_kernel" in caplog.text


class Products:
    """Matrices with many columns, and rows for them."""

    def __init__(self) -> None:
        from paceline.backends.cuda.kernels.matrix import Normed, scratch_for, tile_pair
        from paceline.backends.cuda.weights import _matrix, tiling_for

        torch.manual_seed(3)
        gate, up = _random(GATES, HIDDEN), _random(GATES, HIDDEN)
        self.pair = tile_pair(gate, up, tiling_for(2 * GATES, HIDDEN))
        self.vocabulary = _matrix(_random(VOCAB_SIZE, HIDDEN), _random(VOCAB_SIZE))
        self.scratch = scratch_for([self.pair, self.vocabulary], MOST_ROWS, torch.device("cuda"))
        rows = torch.randn(MOST_ROWS, HIDDEN, device="cuda")
        squares = rows.square().view(MOST_ROWS, -1, 64).sum(-1)
        self.normed = Normed(rows.bfloat16(), squares, HIDDEN, EPS)

    def project(self, rows: int) -> torch.Tensor:
        from paceline.backends.cuda.kernels.linear import project

        logits = torch.full((MOST_ROWS, VOCAB_SIZE), torch.nan, device="cuda")
        project(self.normed, self.vocabulary, logits, rows, self.scratch)
        return logits[:rows]

    def gate_up(self, rows: int) -> torch.Tensor:
        from paceline.backends.cuda.kernels.linear import gate_up

        mixed = torch.full((MOST_ROWS, GATES), torch.nan, device="cuda", dtype=torch.bfloat16)
        gate_up(self.normed, self.pair, mixed, rows, self.scratch)
        return mixed[:rows]


def _random(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()


@pytest.fixture(scope="module")
def products() -> Products:
    return Products()


@needs_hopper
@pytest.mark.parametrize("rows", [65, 96, 127, 130, 300])
@pytest.mark.parametrize("kind", ["project", "gate_up"])
def test_many_rows_have_the_bits_of_triton(
    kind: str, rows: int, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.kernels import wide

    monkeypatch.setattr(wide, "LEAST_BYTES", 0)
    wide._kernel.cache_clear()
    ours = getattr(products, kind)(rows)
    assert wide._kernel.cache_info().misses == 1
    monkeypatch.setattr(wide, "LEAST_ROWS", MOST_ROWS)
    expected = getattr(products, kind)(rows)
    assert torch.isfinite(expected).all()
    assert torch.equal(ours, expected)
