"""The products are those of torch, and a row's bits do not depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

HIDDEN, WIDTH, EPS = 128, 128, 1e-5
COUNTS = (1, 16, 64, 128) if torch.cuda.is_available() else (1, 9)


class Case:
    """Random rows and weights, and room for results."""

    def __init__(self, device: torch.device, dtype: torch.dtype, splits: int = 2, step: int = 64) -> None:
        from paceline.backends.cuda.kernels.products import matrix

        torch.manual_seed(4)
        tiling = matrix.Tiling(columns=64, step=step, splits=splits)
        self.rows = torch.randn(128, HIDDEN, device=device).to(dtype)
        self.weight = (torch.randn(2 * WIDTH, HIDDEN, device=device) / 8).to(dtype)
        self.bias = torch.randn(WIDTH, device=device).to(dtype)
        squares = self.rows.float().square().view(128, 2, -1).sum(-1)
        self.normed = matrix.Normed(self.rows, squares, HIDDEN, EPS)
        self.matrix = matrix.tile_matrix(self.weight[:WIDTH], WIDTH, tiling, self.bias)
        self.pair = matrix.tile_pair(self.weight[:WIDTH], self.weight[WIDTH:], tiling)
        self.scratch = matrix.scratch_for([self.matrix, self.pair], 128, device)

    def plain(self, rows: int) -> torch.Tensor:
        """The rows, normed."""
        return F.rms_norm(self.rows[:rows].float(), (HIDDEN,), eps=EPS)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((got.float() - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize("rows", COUNTS)
def test_a_product_of_normed_rows(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products.linear import project

    case = Case(device, dtype)
    output = torch.full((128, WIDTH), torch.nan, device=device)
    project(case.normed, case.matrix, output, rows, case.scratch)
    near(output[:rows], case.plain(rows) @ case.weight[:WIDTH].float().T + case.bias.float())
    assert not case.scratch.counters.any()


def test_rows_of_a_tile_that_are_padding_are_not_read(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products.linear import project

    case, output = Case(device, dtype), torch.full((128, WIDTH), torch.nan, device=device)
    case.rows[9:] = torch.nan
    project(case.normed, case.matrix, output, 9, case.scratch)
    near(output[:9], case.plain(9) @ case.weight[:WIDTH].float().T + case.bias.float())
    assert (output[9:16] == case.bias.float()).all()


def test_gate_and_up(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products.linear import gate_up

    case, rows = Case(device, dtype, splits=1), COUNTS[-1]
    output = torch.full((128, WIDTH), torch.nan, device=device, dtype=dtype)
    gate_up(case.normed, case.pair, output, rows, case.scratch)
    gate, up = (case.plain(rows) @ case.weight.float().T).chunk(2, -1)
    near(output[:rows], F.silu(gate) * up)


@pytest.mark.parametrize("splits", [1, 2])
def test_an_mlp_without_a_gate(splits: int, device: torch.device, dtype: torch.dtype) -> None:
    """Its squared ReLU, as in nemotron-h; the matrix has one column for each that is written."""
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import gate_up

    case, rows = Case(device, dtype), COUNTS[-1]
    ups = matrix.tile_matrix(case.weight, 2 * WIDTH, matrix.Tiling(columns=64, step=64, splits=splits))
    output = torch.full((128, 2 * WIDTH), torch.nan, device=device, dtype=dtype)
    scratch = matrix.scratch_for([ups], 128, device)
    gate_up(case.normed, ups, output, rows, scratch, None, "relu2")
    near(output[:rows], F.relu(case.plain(rows) @ case.weight.float().T).square())


def test_with_many_rows_a_program_may_have_two_or_four_tiles(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.kernels.products import linear, matrix

    monkeypatch.setattr(matrix, "MANY_TILES", {4: 4, 2: 2})
    monkeypatch.setattr(matrix, "FEW_PROGRAMS", 0)
    case, rows = Case(device, dtype, splits=1, step=128), 70
    launches = [matrix.launch_for(own, rows, matrix.MAX_TILES) for own in (case.matrix, case.pair)]
    assert [launch.options["tiles"] for launch in launches] == [2, 4]
    product = torch.full((128, WIDTH), torch.nan, device=device)
    linear.project(case.normed, case.matrix, product, rows, case.scratch)
    near(product[:rows], case.plain(rows) @ case.weight[:WIDTH].float().T + case.bias.float())
    mixed = torch.full((128, WIDTH), torch.nan, device=device, dtype=dtype)
    linear.gate_up(case.normed, case.pair, mixed, rows, case.scratch)
    gate, up = (case.plain(rows) @ case.weight.float().T).chunk(2, -1)
    near(mixed[:rows], F.silu(gate) * up)


def test_with_many_rows_a_program_may_have_two_tiles_and_all_splits(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it gives has the bits of splits that are programs of their own, the sums of squares among it."""
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import add_product

    for name, number in (("MAX_TOKENS", 16), ("SMALL_BYTES", 0)):
        monkeypatch.setattr(matrix, name, number)
    case, rows, results = Case(device, dtype), 30, []
    norm, before = torch.randn(WIDTH, device=device).to(dtype), torch.randn(128, WIDTH, device=device)
    for enough, multiprocessors, cut in ((2, 4, (2, 1, 1)), (3, 4, (2, 1, 2)), (3, 8, (2, 2, 2))):
        monkeypatch.setattr(matrix, "ENOUGH_PROGRAMS", enough)
        monkeypatch.setattr(matrix, "MULTIPROCESSORS", multiprocessors)
        assert matrix.launch_for(case.matrix, rows, matrix.MAX_TILES).grid == cut
        squares = torch.full((128, case.matrix.tiles), torch.nan, device=device)
        normed = matrix.Normed(torch.zeros(128, WIDTH, device=device, dtype=dtype), squares, WIDTH, EPS)
        hidden = before.clone()
        add_product(case.rows, case.matrix, hidden, norm, normed, rows, case.scratch)
        results.append((hidden, normed.rows, squares[:rows]))
    assert all(torch.equal(*same) for other in results[1:] for same in zip(results[0], other, strict=True))
    near(
        hidden[:rows], (before + case.rows.float() @ case.weight[:WIDTH].float().T + case.bias.float())[:rows]
    )


@pytest.mark.parametrize("splits", [1, 2])
def test_with_many_rows_the_rows_are_the_left_operand(
    splits: int, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products are those of few rows; test_bits.py compares their bits at the sizes of real models."""
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import add_product, gate_up

    sizes = {"MAX_TOKENS": 64 if device.type == "cuda" else 16, "SMALL_BYTES": 0}
    sizes |= {"MANY_ROW_TILES": 2, "MANY_COLUMNS": 128, "MANY_WARPS": 4, "MANY_DEPTH": 1}
    for name, number in sizes.items():
        monkeypatch.setattr(matrix, name, number)
    case, rows, results = Case(device, dtype, splits=splits), sizes["MAX_TOKENS"] + 5, []
    norm, before = torch.randn(WIDTH, device=device).to(dtype), torch.randn(128, WIDTH, device=device)
    for enough, rows_first in ((1, True), (1000, False)):
        monkeypatch.setattr(matrix, "ENOUGH_PROGRAMS", enough)
        assert matrix.launch_for(case.pair, rows, matrix.MAX_TILES).options["rows_first"] == rows_first
        mixed = torch.zeros((128, WIDTH), device=device, dtype=dtype)
        gate_up(case.normed, case.pair, mixed, rows, case.scratch)
        squares = torch.zeros((128, case.matrix.tiles), device=device)
        normed = matrix.Normed(torch.zeros(128, WIDTH, device=device, dtype=dtype), squares, WIDTH, EPS)
        hidden = before.clone()
        add_product(case.rows, case.matrix, hidden, norm, normed, rows, case.scratch)
        results.append([own[:rows] for own in (mixed, hidden, normed.rows, squares)])
    for one, other in zip(*results, strict=True):
        if device.type == "cuda":
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)  # the interpreter sums as it likes


def test_programs_of_a_small_matrix_share_the_rows_as_long_as_they_are_few(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.kernels.products import matrix

    case, rows = Case(device, dtype), 70
    programs = case.matrix.tiles * case.matrix.tiling.splits

    def tokens(few: int) -> int:
        monkeypatch.setattr(matrix, "FEW_PROGRAMS", few)
        cut = matrix.launch_for(case.matrix, rows)
        assert cut.grid[0] == -(-rows // cut.options["tokens"])
        return int(cut.options["tokens"])

    assert [tokens(few) for few in (programs, 2 * programs, 3 * programs, 5 * programs)] == [128, 64, 32, 16]


def test_a_product_added_to_the_residual_stream_prepares_the_next_norm(
    device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.kernels.products.linear import add_product
    from paceline.backends.cuda.kernels.products.matrix import Normed

    case, rows = Case(device, dtype), COUNTS[-1]
    hidden = torch.randn(128, WIDTH, device=device)
    norm = torch.randn(WIDTH, device=device).to(dtype)
    squares = torch.full((128, case.matrix.tiles), torch.nan, device=device)
    normed = Normed(torch.empty(128, WIDTH, device=device, dtype=dtype), squares, WIDTH, EPS)
    expected = hidden + case.rows.float() @ case.weight[:WIDTH].float().T + case.bias.float()
    add_product(case.rows, case.matrix, hidden, norm, normed, rows, case.scratch)
    near(hidden[:rows], expected[:rows])
    near(normed.rows[:rows], (expected * norm.float())[:rows])
    near(squares[:rows].sum(-1), expected[:rows].square().sum(-1))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, which sums as it likes"
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products.linear import project

    case, outputs = Case(device, dtype), []
    for rows in COUNTS:
        output = torch.zeros((128, WIDTH), device=device)
        project(case.normed, case.matrix, output, rows, case.scratch)
        outputs.append(output[0])
    assert all(torch.equal(output, outputs[0]) for output in outputs)
