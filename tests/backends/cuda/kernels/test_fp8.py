"""Weights and activations in e4m3: products are those of the rounded numbers, wherever rows are rounded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

WIDTH, DEPTH, ROWS, EPS = 128, 128, 32, 1e-5
# of e4m3; the interpreter halves what it should round up to a power of two
ROUNDING = 0.04 if torch.cuda.is_available() else 0.3


def rounded_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, depth] as e4m3 numbers, and a power of two for each 64: float32 [rows, groups].

    The largest of a group becomes a number from 128 to 256.
    """
    groups = rows.float().view(len(rows), -1, 64)
    exponents = torch.frexp(groups.abs().amax(-1)).exponent - 8
    scales = torch.ldexp(torch.ones(exponents.shape, device=rows.device), exponents)
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).view(len(rows), -1), scales


def as_kernels_read(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, groups] as [rows / 16, groups, 16]."""
    return scales.view(-1, 16, scales.shape[1]).transpose(1, 2).contiguous()


def values_of(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What numbers [rows, depth] and scales [rows / 16, groups, 16] stand for: float32."""
    each = scales.transpose(1, 2).reshape(len(numbers), -1)
    return (numbers.float().view(len(numbers), -1, 64) * each[..., None]).view(len(numbers), -1)


class Case:
    """Random rows and weights, and the products of what they are rounded to."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        from paceline.backends.cuda.kernels.products import matrix
        from paceline.backends.cuda.kernels.products.packing import round_to_fp8

        torch.manual_seed(5)
        spread = torch.logspace(-3, 3, ROWS, device=device)[:, None]  # rows of all sizes
        self.rows = (torch.randn(ROWS, DEPTH, device=device) * spread).to(dtype)
        self.weight = torch.randn(WIDTH, DEPTH, device=device) / 8
        numbers, self.scales = rounded_rows(self.rows)
        codes, column_scales = round_to_fp8(self.weight)
        rounded = codes.view(torch.float8_e4m3fn).float() * column_scales[:, None]
        self.product = values_of(numbers, as_kernels_read(self.scales)) @ rounded.T
        squares = self.rows.float().square().sum(-1, keepdim=True)
        own = numbers, as_kernels_read(self.scales)
        self.normed = matrix.Normed(self.rows, squares, DEPTH, EPS, *own)
        self.factor = (squares / DEPTH + EPS).rsqrt()

    def result(self, device: torch.device, dtype: torch.dtype):  # type: ignore[no-untyped-def]
        """Room for a row that is written, rounded too."""
        from paceline.backends.cuda.kernels.products.matrix import Normed

        numbers = torch.zeros(ROWS, WIDTH, device=device).to(torch.float8_e4m3fn)
        scales = torch.zeros(ROWS // 16, WIDTH // 64, 16, device=device)
        plain = torch.zeros(ROWS, WIDTH, device=device, dtype=dtype)
        return Normed(plain, torch.zeros(ROWS, WIDTH // 64, device=device), WIDTH, EPS, numbers, scales)


def near(got: torch.Tensor, expected: torch.Tensor, bound: float = 1e-3) -> None:
    """Row by row, because rows differ in size. The matrix unit has 13 bits or so beside the largest."""
    assert float(((got.float() - expected).norm(dim=1) / expected.norm(dim=1)).max()) < bound


@pytest.mark.parametrize("step", [64, 128])  # splits are cut at any 64
def test_a_product_is_added_and_the_next_rows_are_quantized(
    step: int, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import add_product

    case = Case(device, dtype)
    own = matrix.tile_matrix(case.weight, WIDTH, matrix.Tiling(64, step, splits=2, packing="e4m3"))
    hidden, norm = torch.zeros(ROWS, WIDTH, device=device), torch.full((WIDTH,), 0.5, device=device)
    written, scratch = case.result(device, dtype), matrix.scratch_for([own], ROWS, device)
    inputs, scales = case.normed.read_by(own)
    add_product(inputs, own, hidden, norm.to(dtype), written, ROWS, scratch, scales)
    near(hidden, case.product)
    near(values_of(written.fp8, written.scales), 0.5 * hidden, ROUNDING)
    assert torch.equal(written.scales, as_kernels_read(rounded_rows(0.5 * hidden)[1]))


def test_gate_and_up_of_quantized_rows(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import gate_up

    case = Case(device, dtype)
    half = WIDTH // 2
    own = matrix.tile_pair(case.weight[:half], case.weight[half:], matrix.Tiling(128, 128, 1, 8, "e4m3"))
    numbers = torch.zeros(ROWS, half, device=device).to(torch.float8_e4m3fn)
    scales, scratch = torch.zeros(2, 1, 16, device=device), matrix.scratch_for([own], ROWS, device)
    gate_up(case.normed, own, numbers, ROWS, scratch, scales)
    gate, up = (case.product * case.factor).chunk(2, -1)
    near(values_of(numbers, scales), F.silu(gate) * up, ROUNDING)


def test_attention_is_quantized_by_parts_of_heads(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.attention.paged_attention import attend, attention_scratch
    from paceline.backends.cuda.kernels.attention.row_tables import RowTables

    rows, heads, dim = 2, 2, 128
    torch.manual_seed(8)
    query, keys, values = (torch.randn(rows, heads, dim, device=device).to(dtype) for _ in range(3))
    values *= torch.logspace(-2, 2, dim, device=device).to(dtype)
    count = torch.arange(rows, dtype=torch.int32, device=device)
    pages = torch.zeros(1, dtype=torch.int32, device=device)
    tables = RowTables(count, count, count + 1, None, count, count * 0 + 1, count * 0, pages)
    scratch = attention_scratch(rows, heads, heads, dim, 64, device)
    plain = torch.zeros(rows, heads * dim, device=device, dtype=dtype)
    attend(query, keys, values, tables, None, rows, plain, scratch)
    numbers = torch.zeros(rows, heads * dim, device=device).to(torch.float8_e4m3fn)
    scales = torch.zeros(1, heads * dim // 64, 16, device=device)
    attend(query, keys, values, tables, None, rows, numbers, scratch, scales=scales)
    own = scales[0, :, :rows].T.contiguous()
    near((numbers.float().view(rows, -1, 64) * own[..., None]).view(rows, -1), plain.float(), ROUNDING)
    assert torch.equal(own, rounded_rows(plain)[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter multiplies by numpy")
def test_a_row_has_the_same_bits_among_any_number_of_rows(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import add_product

    torch.manual_seed(5)
    numbers, scales = rounded_rows(torch.randn(128, 1024, device=device))
    weight = torch.randn(WIDTH, 1024, device=device)
    own = matrix.tile_matrix(weight, WIDTH, matrix.Tiling(64, 128, splits=2, packing="e4m3"))
    found = []
    for rows in (1, 20, 64, 128):
        hidden, norm = torch.zeros(128, WIDTH, device=device), torch.ones(WIDTH, device=device, dtype=dtype)
        squares = torch.zeros(128, WIDTH // 64, device=device)
        written = matrix.Normed(torch.zeros(128, WIDTH, device=device, dtype=dtype), squares, WIDTH, EPS)
        scratch = matrix.scratch_for([own], rows, device)
        add_product(numbers, own, hidden, norm, written, rows, scratch, as_kernels_read(scales))
        found.append(hidden[0])
    assert found[0].any()
    assert all(torch.equal(found[0], other) for other in found)
