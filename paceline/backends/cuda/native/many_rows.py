"""Matrix products of hundreds of rows (prefill, large batches) by a compute-bound kernel.

It is CUDA C++ for Hopper (source/many_rows*.cu): persistent and warp-specialized, with TMA copies and WGMMA.
The functions have the contracts and bits of kernels/products/linear.py and heads.py, which are the fallback.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.backends.cuda.kernels.attention import heads as triton_heads
from paceline.backends.cuda.kernels.attention.heads import Rotation
from paceline.backends.cuda.kernels.experts.router import Scores
from paceline.backends.cuda.kernels.products import linear
from paceline.backends.cuda.kernels.products.low_rank import LowRankRows
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, Scratch, padded_rows
from paceline.backends.cuda.native.nvrtc import (
    MAP_BYTES,
    NativeKernel,
    is_left_out,
    native_kernel,
    tensor_map,
)
from paceline.backends.cuda.native.weight_pipeline import (
    LINE,
    TILE,
    argument,
    can_stream,
    num_multiprocessors,
    supports_pipeline,
    wgmma_source,
)
from paceline.backends.cuda.passes.compiling import cached_kernel

SOURCES = "instructions", "activations", "many_rows_products", "many_rows_epilogues", "many_rows"
LEAST = 97  # fewest rows; the fused layer kernel and Triton are for fewer


@dataclass(frozen=True)
class Size:
    """A tile size of programs, with its measured times in units of 0.6 microseconds."""

    stages: int  # pipeline stages
    stage: float  # time of a stage
    one: float  # epilogue time of a work unit with the only split
    all: float  # epilogue time of a work unit with all of several splits
    parallel: float  # epilogue time of a work unit with one of several splits


SIZES = {  # by rows and columns
    (128, 256): Size(4, 1.0, 12, 21, 34),
    (128, 224): Size(5, 0.9, 11, 19, 32),
    (128, 128): Size(6, 0.53, 10, 15, 28),
    (192, 128): Size(5, 0.76, 11, 16, 30),
    (128, 64): Size(9, 0.3, 8, 12, 22),
}
PAIRED_COLUMNS = (224, 256)  # columns of programs that can form clusters and share loaded weights (multicast)
HALVED_COLUMNS = 224  # three tiles and a half
NARROW_COLUMNS = 64  # only if there is a single tile of rows
KINDS = {"gate_up": 0, "add": 1, "heads": 2, "project": 3}
HEAD = 128  # size of heads
MAX_GROUPS = 128  # most partial sums of squares of a row
TENSORS = (  # of `Arguments`, in order
    "squares",
    "written_squares",
    "output",
    "hidden",
    "norm",
    "bias",
    "query_norm",
    "key_norm",
    "positions",
    "slot_mapping",
    "cosines",
    "sines",
    "keys",
    "values",
)


@dataclass(frozen=True)
class Plan:
    """How a product is divided into work units. It does not affect the bits."""

    rows: int  # of a program
    columns: int
    is_parallel: bool = False  # each split is a separate work unit (split-K)

    def row_tiles(self, rows: int) -> int:
        """The number of tiles of this many rows."""
        return -(-rows // self.rows)

    def programs(self, rows: int) -> int:
        """The number of programs of a cluster: two, if the number of row tiles is even."""
        return 2 if self.columns in PAIRED_COLUMNS and self.row_tiles(rows) % 2 == 0 else 1

    def fits(self, kind: str, width: int, splits: int, rows: int) -> bool:
        """Whether a product of this kind can be divided like this."""
        has_half, is_narrow = self.columns == HALVED_COLUMNS, self.columns == NARROW_COLUMNS
        # only sums that are added may have more rows than buffers, and only if they need no memory
        reaches_over = self.row_tiles(rows) * self.rows > padded_rows(rows)
        return (
            width % (2 * self.columns if has_half else self.columns) == 0
            and (splits == 2 or not self.is_parallel)
            and (kind == "gate_up" or not has_half)
            and (not is_narrow or (kind == "add" and self.row_tiles(rows) == 1))
            and not (reaches_over and (kind != "add" or self.is_parallel or self.columns > 128))
        )

    def occupies(self, width: int, splits: int, rows: int, multiprocessors: int) -> bool:
        """Whether there are enough work units to be faster than Triton's more numerous, smaller programs."""
        return self.row_tiles(rows) > 1 or 2 * self.units(width, splits, rows) >= multiprocessors

    def units(self, width: int, splits: int, rows: int) -> int:
        """The number of work units of a matrix of this padded width."""
        return self.row_tiles(rows) * (width // self.columns) * (splits if self.is_parallel else 1)

    def time(self, width: int, depth: int, splits: int, rows: int, multiprocessors: int) -> float:
        """The time of the multiprocessor with most work units, where a stage of 256 columns takes 1."""
        turns = -(-self.units(width, splits, rows) // multiprocessors)
        stages = depth / LINE / (splits if self.is_parallel else 1)
        size = SIZES[self.rows, self.columns]
        epilogue = size.parallel if self.is_parallel else size.all if splits > 1 else size.one
        return turns * (stages * size.stage + epilogue)


@lru_cache
def plan_for(kind: str, width: int, depth: int, splits: int, rows: int, multiprocessors: int) -> Plan | None:
    """The fastest plan for a matrix of this padded width; None if none fits."""
    plans = [
        plan
        for size in SIZES
        for plan in (Plan(*size), Plan(*size, is_parallel=True))
        if plan.fits(kind, width, splits, rows) and plan.occupies(width, splits, rows, multiprocessors)
    ]
    return min(plans, key=lambda plan: plan.time(width, depth, splits, rows, multiprocessors), default=None)


@cached_kernel
def many_rows_kernel(
    kind: str, rows: int, columns: int, programs: int, device: torch.device
) -> NativeKernel | None:
    """The compiled kernel for clusters of such programs; None if it is not available."""
    stages = SIZES[rows, columns].stages
    sizes = {"ROWS": rows, "COLUMNS": columns, "STAGES": stages, "PROGRAMS": programs}
    numbers = sizes | {"KIND": KINDS[kind]}
    shared = stages * (rows + columns) * LINE * 2 + 1024
    return native_kernel("many_rows", SOURCES, numbers, wgmma_source(columns), shared, device)


def threads(rows: int) -> int:
    """The threads of a program: a warpgroup for each 64 rows, and one that loads."""
    return 2 * rows + 128


@dataclass(frozen=True)
class Operands:
    """The kernel's operands besides its rows: members of `Arguments` in many_rows_products.cu."""

    tensors: Mapping[str, torch.Tensor | None]  # some of TENSORS
    width: int = 0
    query_heads: int = 0
    kv_heads: int = 0
    columns: int = 0
    size: int = 1
    eps: float = 0.0
    head_eps: float = 0.0

    @property
    def addresses(self) -> list[int]:
        tensors = [self.tensors.get(name) for name in TENSORS]
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def run_many_rows(
    kind: str, inputs: torch.Tensor, matrix: Matrix, rows: int, scratch: Scratch, operands: Operands
) -> bool:
    """Run a product of many rows; False if the kernel does not support it."""
    device = matrix.weight.device
    if rows < LEAST or not supports_pipeline(device) or not can_stream(matrix) or is_left_out("many_rows"):
        return False
    width, splits, multiprocessors = matrix.padded_width, matrix.tiling.splits, num_multiprocessors(device)
    plan = plan_for(kind, width, matrix.depth, splits, rows, multiprocessors)
    if plan is None or len(inputs) < padded_rows(rows):
        return False
    cluster = plan.programs(rows)
    kernel = many_rows_kernel(kind, plan.rows, plan.columns, cluster, device)
    if kernel is None:
        return False
    programs = min(multiprocessors, plan.units(width, splits, rows)) // cluster * cluster
    argument_bytes = _argument(plan, inputs, matrix, rows, scratch, operands)
    kernel.launch(argument_bytes, (programs, 1), (cluster, 1), threads(plan.rows))
    return True


def _argument(
    plan: Plan, inputs: torch.Tensor, matrix: Matrix, rows: int, scratch: Scratch, operands: Operands
) -> bytes:
    """The `Arguments` of source/many_rows_products.cu."""
    columns, step, depth = matrix.tiling.columns, matrix.tiling.step, matrix.depth
    steps, has_half = depth // step, plan.columns == HALVED_COLUMNS
    each = 1 if has_half else plan.columns // plan.programs(rows) // columns
    sizes, strides = (step, columns, steps, matrix.tiles), (step, columns * step, columns * depth)
    weights = tensor_map(matrix.weight.data_ptr(), sizes, strides, (LINE, columns, 1, each))
    lines = tensor_map(inputs.data_ptr(), (depth, len(inputs)), (depth,), (LINE, plan.rows))
    other = _half_tiles_map(matrix) if has_half else _residual_map(plan, operands)
    addresses = [scratch.partial.data_ptr(), scratch.counters.data_ptr(), *operands.addresses]
    squares = operands.tensors.get("squares")
    groups = 0 if squares is None else squares.shape[1]
    cut = (
        steps,
        matrix.tiling.splits,
        columns,
        plan.row_tiles(rows),
        matrix.padded_width // plan.columns,
        plan.is_parallel,
    )
    rest = operands.width, groups, rows, operands.query_heads, operands.kv_heads, operands.columns
    limits = *rest, padded_rows(rows)
    numbers = struct.pack("<13i3f", *cut, *limits, float(operands.size), operands.eps, operands.head_eps)
    return argument(weights, lines, other, struct.pack(f"<{len(addresses)}Q", *addresses), numbers)


def _residual_map(plan: Plan, operands: Operands) -> bytes:
    """The TMA descriptor of the residual stream, if the product is added to it."""
    hidden = operands.tensors.get("hidden")
    if hidden is None or "norm" not in operands.tensors:
        return bytes(MAP_BYTES)
    width = 2 * operands.width  # in pairs of bfloat16
    return tensor_map(hidden.data_ptr(), (width, len(hidden)), (width,), (LINE, plan.rows))


def _half_tiles_map(matrix: Matrix) -> bytes:
    """The TMA descriptor of half tiles: half of a tile's gate columns and the same half of its up columns."""
    step, part, half = matrix.tiling.step, TILE // 4, TILE // 2
    sizes = step, part, 2, 2, matrix.tiles * (matrix.depth // step)
    strides = step, part * step, half * step, TILE * step
    return tensor_map(matrix.weight.data_ptr(), sizes, strides, (LINE, part, 1, 2, 1))


def _is_normed(normed: Normed) -> bool:
    """Whether the kernel can compute the norm factors of such rows."""
    groups = normed.squares.shape[1]
    return groups <= MAX_GROUPS and groups % 4 == 0


def project(
    normed: Normed,
    matrix: Matrix,
    output: torch.Tensor,
    rows: int,
    scratch: Scratch,
    change: LowRankRows | None = None,
) -> None:
    """`project` of kernels/products/linear.py."""
    stride, width, read = output.stride(0), matrix.width, {"squares": normed.squares, "hidden": output}
    operands = Operands(read, stride, columns=width, size=normed.size, eps=normed.eps)
    fits = _is_normed(normed) and matrix.bias is None and stride % 2 == width % 2 == 0
    fits = fits and output.dtype == torch.float32 and change is None
    if not fits or not run_many_rows("project", normed.rows, matrix, rows, scratch, operands):
        linear.project(normed, matrix, output, rows, scratch, change)


def gate_up(
    normed: Normed,
    matrix: Matrix,
    output: torch.Tensor,
    rows: int,
    scratch: Scratch,
    scales: torch.Tensor | None = None,
    activation: str = "silu",
    change: LowRankRows | None = None,
) -> None:
    """`gate_up` of kernels/products/linear.py."""
    tensors = {"squares": normed.squares, "output": output}
    operands = Operands(tensors, matrix.padded_width // 2, size=normed.size, eps=normed.eps)
    fits = _is_normed(normed) and matrix.tiling.columns == TILE and scales is None and activation == "silu"
    fits = fits and change is None
    if not fits or not run_many_rows("gate_up", normed.rows, matrix, rows, scratch, operands):
        linear.gate_up(normed, matrix, output, rows, scratch, scales, activation, change)


def add_product(
    inputs: torch.Tensor,
    matrix: Matrix,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    normed: Normed,
    rows: int,
    scratch: Scratch,
    scales: torch.Tensor | None = None,
    scores: Scores | None = None,
    change: LowRankRows | None = None,
) -> None:
    """`add_product` of kernels/products/linear.py."""
    tensors = {"written_squares": normed.squares, "output": normed.rows, "hidden": hidden, "norm": norm}
    fits = matrix.bias is None and normed.fp8 is None and matrix.tiling.columns == TILE and scores is None
    fits = fits and change is None
    operands = Operands(tensors, matrix.padded_width)
    if not fits or not run_many_rows("add", inputs, matrix, rows, scratch, operands):
        linear.add_product(inputs, matrix, hidden, norm, normed, rows, scratch, scales, scores, change)


def project_heads(
    normed: Normed,
    matrix: Matrix,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: Rotation | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scratch: Scratch,
    head_eps: float | None = None,
    change: LowRankRows | None = None,
) -> None:
    """`project_heads` of kernels/attention/heads.py."""
    tensors: dict[str, torch.Tensor | None] = {
        "squares": normed.squares,
        "output": query,
        "bias": matrix.bias,
    }
    tensors |= {"positions": positions, "slot_mapping": slot_mapping, "keys": keys, "values": values}
    tensors |= dict(zip(("query_norm", "key_norm"), norms or (None, None), strict=True))
    tensors |= dict(zip(("cosines", "sines"), rotation or (None, None), strict=True))
    counts, own_eps = (query.shape[1], keys.shape[1]), normed.eps if head_eps is None else head_eps
    operands = Operands(tensors, 0, *counts, size=normed.size, eps=normed.eps, head_eps=own_eps)
    fits = _is_normed(normed) and rotation is not None and matrix.tiling.columns == HEAD == query.shape[2]
    fits, rows = fits and change is None, len(positions)
    if not fits or not run_many_rows("heads", normed.rows, matrix, rows, scratch, operands):
        to = query, keys, values, scratch, head_eps, change
        triton_heads.project_heads(normed, matrix, positions, slot_mapping, rotation, norms, *to)
