"""The kernel of many rows has the bits of Triton's kernels, however it cuts a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.backends.cuda.kernels.attention import heads
from paceline.backends.cuda.kernels.products import linear
from paceline.backends.cuda.kernels.products.matrix import (
    Matrix,
    Normed,
    Scratch,
    Tiling,
    padded_rows,
    scratch_for,
    tile_heads,
    tile_matrix,
    tile_pair,
)
from paceline.backends.cuda.native import many_rows
from paceline.backends.cuda.native.many_rows import SIZES, Plan, plan_for
from paceline.backends.cuda.native.nvrtc import leaving_out
from paceline.backends.cuda.native.weight_pipeline import supports_pipeline

HIDDEN, DEPTH, EPS, DIM = 512, 1792, 1e-5, 128
ROWS = (100, 129, 300, 384, 512, 2048)
PLANS = [Plan(*size, is_parallel=own) for size in SIZES for own in (False, True)]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports_pipeline(torch.device("cuda")), reason="needs a Hopper GPU"
)
Product = Callable[[Any], dict[str, torch.Tensor]]


class Case:
    """Random rows and matrices of a layer, with room for results."""

    def __init__(self, rows: int, splits: int) -> None:
        torch.manual_seed(rows)
        self.rows, self.padded = rows, padded_rows(rows)
        self.hidden, self.inputs = self.random(self.padded, HIDDEN).float(), self.random(self.padded, DEPTH)
        squares = self.hidden.square().view(self.padded, -1, 64).sum(2)
        self.normed = Normed(self.hidden.to(torch.bfloat16), squares, HIDDEN, EPS)
        self.pair = tile_pair(self.random(DEPTH, HIDDEN), self.random(DEPTH, HIDDEN), Tiling(splits=splits))
        self.down = tile_matrix(self.random(HIDDEN, DEPTH), HIDDEN, Tiling(splits=splits))
        self.qkv = tile_heads(self.random(6 * DIM, HIDDEN), DIM, Tiling(DIM, splits=splits, warps=8))
        self.head = tile_matrix(self.random(DEPTH, HIDDEN), DEPTH - 40, Tiling(splits=splits))
        self.norm, self.angles = 1 + self.random(HIDDEN), 6 * torch.rand(4096, DIM // 2, device="cuda")
        matrices: list[Matrix] = [self.pair, self.down, self.qkv, self.head]
        self.scratch: Scratch = scratch_for(matrices, rows, torch.device("cuda"))

    def random(self, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") / 8).to(torch.bfloat16)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full(shape, torch.nan, device="cuda", dtype=dtype)

    def gate_up(self, run: Any) -> dict[str, torch.Tensor]:
        output = self.empty(self.padded, DEPTH)
        run.gate_up(self.normed, self.pair, output, self.rows, self.scratch)
        return {"activated": output}

    def add(self, run: Any) -> dict[str, torch.Tensor]:
        hidden, output = self.hidden.clone(), self.empty(self.padded, HIDDEN)
        squares = self.empty(self.padded, HIDDEN // 64, dtype=torch.float32)
        written = Normed(output, squares, HIDDEN, EPS)
        run.add_product(self.inputs, self.down, hidden, self.norm, written, self.rows, self.scratch)
        return {"hidden": hidden, "rows": output, "squares": squares}

    def logits(self, run: Any) -> dict[str, torch.Tensor]:
        output = self.empty(self.padded, DEPTH, dtype=torch.float32)
        run.project(self.normed, self.head, output, self.rows, self.scratch)
        return {"logits": output[: self.rows, : self.head.width]}

    def heads(self, run: Any, norms: Any = None) -> dict[str, torch.Tensor]:
        run = heads if run is linear else run
        positions = (torch.arange(self.rows, device="cuda", dtype=torch.int32) * 7) % 4096
        slots = torch.randperm(4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        slots = slots[: self.rows].to(torch.int32)
        slots[11] = -1
        query = self.empty(self.padded, 4, DIM)
        keys, values = (torch.zeros(4096, 1, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        rotation = self.angles.cos(), self.angles.sin()
        to = query, keys, values, self.scratch
        run.project_heads(self.normed, self.qkv, positions, slots, rotation, norms, *to, 1e-4)
        return {"query": query[: self.rows], "keys": keys, "values": values}

    def normed_heads(self, run: Any) -> dict[str, torch.Tensor]:
        return self.heads(run, (self.norm[:DIM], self.norm[DIM : 2 * DIM]))


@needs_hopper
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_all_products_have_the_bits_of_triton(
    rows: int, splits: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, used = Case(rows, splits), []
    monkeypatch.setattr(many_rows, "plan_for", lambda *given: used.append(1) or plan)
    products: dict[str, tuple[Matrix, tuple[Product, ...]]] = {
        "gate_up": (case.pair, (case.gate_up,)),
        "add": (case.down, (case.add,)),
        "project": (case.head, (case.logits,)),
        "heads": (case.qkv, (case.heads, case.normed_heads)),
    }
    fitting = [
        product
        for kind, (matrix, own) in products.items()
        for product in own
        if plan.fits(kind, matrix.padded_width, splits, rows)
    ]
    if not fitting:
        pytest.skip("there is no such plan")
    for number, product in enumerate(fitting):
        found, expected = product(many_rows), product(linear)
        assert len(used) == number + 1
        for name, own in found.items():
            assert torch.isfinite(own[:rows]).all(), name
            assert torch.equal(own[:rows].float(), expected[name][:rows].float()), name
    assert not case.scratch.counters.any()


def matrix(width: int, depth: int, splits: int) -> Matrix:
    """A matrix of which only sizes are read."""
    weight = torch.empty((width // 64, depth // 128, 64, 128), device="meta", dtype=torch.bfloat16)
    return Matrix(weight, width, Tiling(splits=splits))


@pytest.mark.parametrize(("rows", "plan"), [(256, Plan(128, 128, True)), (384, Plan(192, 128, True))])
def test_few_rows_have_narrow_units_or_a_unit_for_each_split(rows: int, plan: Plan) -> None:
    """Otherwise the 8B's down would leave most multiprocessors idle."""
    assert plan_for("add", 4096, 14336, 2, rows, 132) == plan
    assert plan_for("gate_up", 28672, 4096, 1, rows, 132) == Plan(128, 224)


def test_widths_that_no_unit_divides_have_no_plan() -> None:
    assert plan_for("project", 192, 512, 1, 300, 132) is None


def test_the_kernel_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("asked")

    monkeypatch.setattr(many_rows, "supports_pipeline", lambda device: True)
    monkeypatch.setattr(many_rows, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(many_rows, "plan_for", refuse)
    operands, rows = many_rows.Operands({}), torch.zeros(512, 256)
    scratch = Scratch(torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    with leaving_out(["many_rows"]):
        assert not many_rows.run_many_rows("add", rows, matrix(256, 256, 1), 300, scratch, operands)
    with pytest.raises(RuntimeError, match="asked"):
        many_rows.run_many_rows("add", rows, matrix(256, 256, 1), 300, scratch, operands)
