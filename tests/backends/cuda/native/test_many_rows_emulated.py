"""Products of many rows, compiled for the host: they compute what the products are. See emulated.h."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.backends.cuda.kernels.products.matrix import (
    Normed,
    Scratch,
    Tiling,
    padded_rows,
    tile_heads,
    tile_matrix,
    tile_pair,
)
from paceline.backends.cuda.native import many_rows
from paceline.backends.cuda.native.many_rows import Plan
from tests.backends.cuda.emulating import Emulated, needs_compiler, tensor_map
from tests.large import REPEATS

EPS, DIM, DEPTH = 1e-5, 128, 384
PLANS = [  # with splits, rows; of the first and the last, two programs load weights for each other
    (Plan(128, 256), 1, 200),
    (Plan(192, 128), 2, 300),
    (Plan(128, 128, True), 2, 300),
    (Plan(128, 256), 3, 130),
]
FEW_ROWS = [(Plan(128, 64, True), 2, 100), (Plan(128, 128, True), 2, 97)]
OVER = Plan(192, 128), 2, 500  # the last tile has more rows than buffers
# units with half a tile; of 130 rows, two programs load weights for each other
HALVES = [*((Plan(128, 224), 1, rows) for rows in (100, 130, 300)), (Plan(128, 224, True), 2, 140)]


def repeats(*cases: tuple[Plan, int, int]) -> list[Any]:
    """Cases whose kernels, and ways through them, others have together."""
    return [pytest.param(*case, marks=REPEATS) for case in cases]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(torch.bfloat16)


@pytest.fixture
def run_on_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(kind: str, plan: Plan, rows: int) -> None:
        """Two stages, two or three programs: all are used again and again."""
        sizes = {"ROWS": plan.rows, "COLUMNS": plan.columns, "PROGRAMS": plan.programs(rows)}
        numbers, threads = {**sizes, "STAGES": 2, "KIND": many_rows.KINDS[kind]}, many_rows.threads(plan.rows)
        # those that multiply, and the warp that loads rows, wait for the kernels before
        kernel = Emulated(many_rows.SOURCES, "many_rows", "Arguments", numbers, threads - 96, threads)
        monkeypatch.setattr(many_rows, "tensor_map", tensor_map)
        monkeypatch.setattr(many_rows, "supports_pipeline", lambda device: True)
        monkeypatch.setattr(many_rows, "num_multiprocessors", lambda device: 3)
        monkeypatch.setattr(many_rows, "plan_for", lambda *arguments: plan)
        monkeypatch.setattr(many_rows, "many_rows_kernel", lambda *arguments: kernel)
        for name in ("linear", "triton_heads"):
            monkeypatch.setattr(many_rows, name, None)  # Triton's would not be compared

    return use


def normed_rows(rows: int) -> tuple[Normed, torch.Tensor]:
    """Random rows of the residual stream, and what a product of them reads, in float32."""
    hidden = torch.randn(padded_rows(rows), DEPTH)
    own = Normed(hidden.to(torch.bfloat16), hidden.square().view(len(hidden), -1, 4).sum(2), DEPTH, EPS)
    factor = torch.rsqrt(hidden.square().mean(1, keepdim=True) + EPS)
    return own, own.rows.float() * factor


def scratch(rows: int, width: int, splits: int) -> Scratch:
    return Scratch(
        torch.full((padded_rows(rows) * width * splits,), torch.nan), torch.zeros(64, dtype=torch.int32)
    )


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "splits", "rows"),
    [PLANS[2], *HALVES[:2], HALVES[3], *repeats(PLANS[0], HALVES[2])],
)
def test_gate_and_up(run_on_host: Any, plan: Plan, splits: int, rows: int) -> None:
    torch.manual_seed(5)
    width = 896 if plan.columns == 224 else 512
    assert plan.fits("gate_up", width, splits, rows)
    run_on_host("gate_up", plan, rows)
    gate, up = (random(width // 2, DEPTH, scale=0.06) for _ in range(2))
    matrix, room = tile_pair(gate, up, Tiling(splits=splits)), scratch(rows, width, splits)
    for _ in range(2):  # copies arrive late, then at once
        own, read = normed_rows(rows)
        output = torch.full((padded_rows(rows), width // 2), torch.nan, dtype=torch.bfloat16)
        many_rows.gate_up(own, matrix, output, rows, room)
        expected = torch.nn.functional.silu(read @ gate.float().T) * (read @ up.float().T)
        torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.01)
        assert not room.counters.any(), "counters are zero again"


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "splits", "rows"),
    [*PLANS[2:], FEW_ROWS[0], OVER, *repeats(*PLANS[:2], FEW_ROWS[1])],
)
def test_a_product_is_added(run_on_host: Any, plan: Plan, splits: int, rows: int) -> None:
    torch.manual_seed(6)
    run_on_host("add", plan, rows)
    width, padded = 512, padded_rows(rows)
    weight, norm = random(width, DEPTH, scale=0.06), 1 + random(width, scale=0.2)
    matrix, room = tile_matrix(weight, width, Tiling(splits=splits)), scratch(rows, width, splits)
    for _ in range(2):
        inputs, hidden = random(padded, DEPTH), torch.randn(padded, width)
        expected = hidden + inputs.float() @ weight.float().T
        # no row behind those of a buffer is written
        all_squares = torch.full((padded + 128, width // 64), torch.nan)
        all_written = torch.full((padded + 128, width), torch.nan, dtype=torch.bfloat16)
        behind = torch.cat((hidden, torch.full((128, width), torch.nan)))
        squares, written, hidden = all_squares[:padded], all_written[:padded], behind[:padded]
        many_rows.add_product(inputs, matrix, hidden, norm, Normed(written, squares, width, EPS), rows, room)
        assert all(own[padded:].isnan().all() for own in (all_squares, all_written, behind))
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(written, (hidden * norm.float()).to(torch.bfloat16), rtol=0, atol=0)
        torch.testing.assert_close(squares, hidden.square().view(len(hidden), -1, 64).sum(2))
        assert not room.counters.any(), "counters are zero again"


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "splits", "rows", "has_bias"),
    [(*PLANS[0], False), (*PLANS[2], True), (*FEW_ROWS[1], False)],
    ids=["norms", "bias", "few"],
)
def test_heads(run_on_host: Any, plan: Plan, splits: int, rows: int, has_bias: bool) -> None:
    torch.manual_seed(7)
    run_on_host("heads", plan, rows)
    heads, slots = 2, 400
    weight, bias = random((heads + 2) * DIM, DEPTH, scale=0.06), random((heads + 2) * DIM)
    matrix = tile_heads(weight, DIM, Tiling(DIM, splits=splits), bias if has_bias else None)
    positions = (torch.arange(rows, dtype=torch.int32) * 23 + 3) % 64
    slot_mapping = torch.randperm(slots)[:rows].to(torch.int32)
    slot_mapping[7] = -1
    angles, room = torch.rand(64, DIM // 2) * 6, scratch(rows, (heads + 2) * DIM, splits)
    own, read = normed_rows(rows)
    query = torch.full((padded_rows(rows), heads, DIM), torch.nan, dtype=torch.bfloat16)
    keys, values = (torch.zeros(slots, 1, DIM, dtype=torch.bfloat16) for _ in range(2))
    rotation = angles.cos(), angles.sin()
    norms = None if has_bias else (1 + random(DIM, scale=0.2), 1 + random(DIM, scale=0.2))
    many_rows.project_heads(
        own, matrix, positions, slot_mapping, rotation, norms, query, keys, values, room, 1e-3
    )
    plain = (read[:rows] @ weight.float().T + has_bias * bias.float()).view(rows, -1, DIM)
    normed = plain.clone()
    if norms is not None:
        normed *= torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-3)
        normed[:, :heads] *= norms[0].float()
        normed[:, heads:] *= norms[1].float()
    one, two = normed.chunk(2, -1)
    cosines, sines = (own[positions][:, None] for own in rotation)
    turned = torch.cat((one * cosines - two * sines, two * cosines + one * sines), -1)
    kept = slot_mapping >= 0
    stored = slot_mapping[kept].long()
    for found, expected in (
        (query[:rows], turned[:, :heads]),
        (keys[stored], turned[kept, heads : heads + 1]),
        (values[stored], plain[kept, heads + 1 :]),
    ):
        torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    untouched = torch.ones(slots, dtype=torch.bool)
    untouched[stored] = False
    assert not keys[untouched].any()
    assert not values[untouched].any()


@needs_compiler
def test_logits_of_rows_and_columns_that_are_not_padding(run_on_host: Any) -> None:
    torch.manual_seed(8)
    plan, splits, rows = PLANS[0]
    run_on_host("project", plan, rows)
    weight, width = random(512, DEPTH, scale=0.06), 500
    own, read = normed_rows(rows)
    output = torch.full((padded_rows(rows), 512), torch.nan)
    many_rows.project(own, tile_matrix(weight, width, Tiling()), output, rows, scratch(rows, 512, splits))
    expected = (read @ weight.float().T)[:rows, :width]
    torch.testing.assert_close(output[:rows, :width], expected, rtol=1e-3, atol=1e-3)
    assert output[rows:].isnan().all()
    assert output[:, width:].isnan().all()
