"""Adapters add B (A x) to the products of their rows, and change no bit of other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.backends.cuda.kernels.test_linear import EPS, HIDDEN, WIDTH, Case, near

# of each row: none, and both in one tile; a tile without any; more rows than a tile
MIXED = [1, -1, 0, 0, -1, 1, -1, -1, 0]
ROWS = [MIXED, [-1] * 16 + MIXED]
RANK = 32  # two chunks


class Adapted(Case):
    """Two adapters of a product, and the rows that have them."""

    def __init__(
        self, adapters: list[int], device: torch.device, dtype: torch.dtype, splits: int = 2
    ) -> None:
        from paceline.backends.cuda.kernels.products import low_rank

        super().__init__(device, dtype, splits)
        self.adapters = torch.tensor(adapters, dtype=torch.int32, device=device)
        down = torch.randn(2, RANK, HIDDEN, device=device) / 8
        up = torch.randn(2, 2 * WIDTH, RANK, device=device) / 8
        self.change = low_rank.LowRank(down.to(dtype), up.to(dtype))
        self.buffers = low_rank.make_low_rank_buffers(2, RANK, 128, self.rows)

    def added(self, inputs: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What is added to the product of each row: [rows, width]."""
        change, found = self.change.down.float(), []
        for row, adapter in zip(inputs.float(), self.adapters.tolist(), strict=True):
            low = change[adapter] @ row
            found.append(up[adapter].float() @ low if adapter >= 0 else row.new_zeros(up.shape[1]))
        return torch.stack(found)

    def shrunk(self, inputs: Any, up: torch.Tensor, rows: list[int] | None = None) -> Any:
        """What a product's kernel needs; of some rows alone, the first of the inputs."""
        from paceline.backends.cuda.kernels.products.low_rank import LowRank, shrink

        adapters = self.adapters if rows is None else self.adapters[rows].contiguous()
        return shrink(LowRank(self.change.down, up.contiguous()), inputs, adapters, self.buffers)

    def products(self) -> dict[str, Callable[[Any], torch.Tensor]]:
        """Each product of all rows, with a change or none."""
        from paceline.backends.cuda.kernels.products import linear, matrix

        rows, like = len(self.adapters), self.rows

        def project(change: Any) -> torch.Tensor:
            output = torch.zeros(128, WIDTH, device=like.device)
            linear.project(self.normed, self.matrix, output, rows, self.scratch, change)
            return output[:rows]

        def gate_up(change: Any) -> torch.Tensor:
            output = torch.zeros(128, WIDTH, device=like.device, dtype=like.dtype)
            linear.gate_up(self.normed, self.pair, output, rows, self.scratch, change=change)
            return output[:rows]

        def add_product(change: Any) -> torch.Tensor:
            squares = torch.zeros(128, self.matrix.tiles, device=like.device)
            normed = matrix.Normed(torch.zeros_like(like), squares, WIDTH, EPS)
            hidden, norm = torch.ones(128, WIDTH, device=like.device), torch.ones_like(self.bias)
            linear.add_product(like, self.matrix, hidden, norm, normed, rows, self.scratch, change=change)
            near(squares[:rows].sum(-1), hidden[:rows].square().sum(-1))
            return hidden[:rows]

        return {"project": project, "gate_up": gate_up, "add_product": add_product}


@pytest.mark.parametrize("adapters", ROWS, ids=["one tile", "two tiles"])
def test_products_with_what_adapters_add(
    adapters: list[int], device: torch.device, dtype: torch.dtype
) -> None:
    case, rows = Adapted(adapters, device, dtype), len(adapters)
    products, weight, ups = case.products(), case.weight.float(), case.change.up
    normed, half = case.plain(rows), WIDTH // case.pair.tiling.columns * 2
    one, bias = ups[:, :WIDTH], case.bias.float()
    got = products["project"](case.shrunk(case.normed, one))
    near(got, normed @ weight[:WIDTH].T + bias + case.added(normed, one))
    got = products["add_product"](case.shrunk(case.rows, one))
    near(got, 1 + case.rows[:rows].float() @ weight[:WIDTH].T + bias + case.added(case.rows[:rows], one))
    gate, up = (normed @ weight.T + case.added(normed, ups)).chunk(2, -1)
    # half a tile is of gates, half of ups
    tiled = torch.stack([part.unflatten(1, (half, -1)) for part in ups.chunk(2, 1)], 2).flatten(1, 3)
    near(products["gate_up"](case.shrunk(case.normed, tiled)), F.silu(gate) * up)
    assert not case.buffers.counters.any()
    assert not case.scratch.counters.any()


def test_rows_without_an_adapter_keep_their_bits_and_others_have_them_alone(
    device: torch.device, dtype: torch.dtype
) -> None:
    together = Adapted(MIXED, device, dtype)
    for name, product in together.products().items():
        up = together.change.up if name == "gate_up" else together.change.up[:, :WIDTH]
        inputs = together.rows if name == "add_product" else together.normed
        plain, got = product(None), product(together.shrunk(inputs, up))
        for row, adapter in enumerate(MIXED):
            alone = Adapted([adapter], device, dtype)
            alone.rows[0], alone.normed.squares[0] = together.rows[row], together.normed.squares[row]
            own = alone.rows if name == "add_product" else alone.normed
            single = alone.products()[name](alone.shrunk(own, up))
            assert torch.equal(single[0], got[row])
            assert torch.equal(plain[row], got[row]) == (adapter < 0)


def test_the_bits_do_not_depend_on_the_other_adapters(device: torch.device, dtype: torch.dtype) -> None:
    case = Adapted(MIXED, device, dtype)
    one = case.change.up[:, :WIDTH]
    before = case.products()["project"](case.shrunk(case.normed, one))
    for part in (case.change.down, case.change.up):
        part[1] = torch.nan
    after = case.products()["project"](case.shrunk(case.normed, case.change.up[:, :WIDTH]))
    others = [row for row, adapter in enumerate(MIXED) if adapter != 1]
    assert torch.equal(before[others], after[others])
    assert after[0].isnan().all()


def test_heads_are_changed_before_they_are_turned(device: torch.device, dtype: torch.dtype) -> None:
    """The product with heads of weights that have the change inside."""
    from paceline.backends.cuda.kernels.attention.heads import project_heads
    from paceline.backends.cuda.kernels.products import low_rank, matrix

    case, count, dim = Adapted(MIXED, device, dtype), 4, 24
    rows, tiling = len(MIXED), matrix.Tiling(columns=64, step=64, splits=2)
    weight = (torch.randn(count * dim, HIDDEN, device=device) / 8).to(dtype)
    up, down = case.change.up[:, : count * dim], case.change.down
    spread = matrix.spread_heads(up.transpose(0, 1), dim, 64).transpose(0, 1).contiguous()
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    angles = positions[:, None] * torch.rand(dim // 2, device=device)

    def heads(own: torch.Tensor, change: Any) -> torch.Tensor:
        query = torch.zeros(128, 2, dim, dtype=dtype, device=device)
        keys, values = torch.zeros(2, rows, 1, dim, dtype=dtype, device=device)
        tiled = matrix.tile_heads(own, dim, tiling)
        rotation, scratch = (angles.cos(), angles.sin()), matrix.scratch_for([tiled], 128, device)
        to = query, keys, values, scratch, None, change
        project_heads(case.normed, tiled, positions, positions, rotation, None, *to)
        return torch.cat((query[:rows], keys, values), 1)

    changed = low_rank.LowRank(down, spread)
    got = heads(weight, low_rank.shrink(changed, case.normed, case.adapters, case.buffers))
    plain = heads(weight, None)
    merged = [heads((weight.float() + up[own].float() @ down[own].float()).to(dtype), None) for own in (0, 1)]
    for row, adapter in enumerate(MIXED):
        if adapter < 0:
            assert torch.equal(got[row], plain[row])
        else:
            near(got[row], merged[adapter][row].float())


def test_inputs_in_e4m3_have_scales(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products.low_rank import shrink

    case, rows = Adapted(MIXED, device, dtype), len(MIXED)
    scales = torch.exp2(torch.randint(-2, 3, (8, HIDDEN // 64, 16), device=device).float())
    by_row = scales.transpose(1, 2).reshape(128, -1, 1)  # scale_offset: those of 16 rows are contiguous
    small = (case.rows.float().view(128, -1, 64) / by_row).to(torch.float8_e4m3fn)
    whole = (small.float() * by_row).view(128, HIDDEN)
    found = shrink(case.change, small.view(128, HIDDEN), case.adapters, case.buffers, scales)
    assert found is not None
    low = found.low[:rows].float()
    for row, adapter in enumerate(MIXED):
        if adapter >= 0:
            near(low[row], case.change.down[adapter].float() @ whole[row])
