"""The compiled matrix kernels compared with numpy on random data, for `paceline check`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import write_records
from paceline.backends.cpu.tiles.matmul import multiply_rows, run_tile
from paceline.backends.cpu.tiles.weight_tile import COLUMNS, FLOAT32, GROUP, RECORD
from paceline.backends.cpu.weights.packing import choose_format, pack
from paceline.errors import BackendError
from paceline.models.checkpoint import Tensor
from paceline.models.gguf.blocks import FORMATS
from paceline.models.gguf.reader import GgufTensor

Floats = npt.NDArray[np.float32]

OUTPUTS, DEPTH = 48, 512  # three tiles of outputs; two of the largest blocks
ROWS = 13  # one full tile of rows, and smaller ones
TOLERANCE = 1e-5  # relative to the largest output: float32 sums of 512 products in another order


@dataclass(frozen=True)
class Case:
    """A tensor format, and the quantization option that selects its kernel."""

    kind: str
    quantization: str


CASES = {
    "int8": Case("Q8_0", "native"),
    "int4 (Q4_0)": Case("Q4_0", "native"),
    "int4 (Q4_1)": Case("Q4_1", "native"),
    "int4k (Q4_K)": Case("Q4_K", "native"),
    "int6k (Q6_K)": Case("Q6_K", "native"),
    "float32": Case("F32", "none"),
}


def compare(case: Case) -> str:
    """A summary if all outputs agree; BackendError that names the difference otherwise."""
    random = np.random.default_rng(1)
    tensor = random_tensor(case.kind, random)
    activations = random.standard_normal((ROWS, DEPTH), dtype=np.float32)
    computed = multiply(tensor, case.quantization, activations)
    quantized = choose_format(case.kind, case.quantization) != FLOAT32
    expected = reference(tensor, activations, quantized)
    error = float(np.abs(computed - expected).max() / np.abs(expected).max())
    if not error <= TOLERANCE:  # written so that NaN fails too
        raise BackendError(f"differs from numpy by {error:.1e} of the largest output")
    for row in range(ROWS):
        alone = multiply(tensor, case.quantization, activations[row : row + 1])
        if not np.array_equal(alone[0], computed[row]):
            raise BackendError(f"row {row} alone has other bits than among {ROWS}")
    return f"within {error:.0e} of numpy; the same bits for a row alone and among others"


def random_tensor(kind: str, random: np.random.Generator) -> GgufTensor:
    """A matrix [OUTPUTS, DEPTH] of random blocks in this file format."""
    form = FORMATS[kind]
    if kind == "F32":
        values = random.standard_normal((OUTPUTS, DEPTH), dtype=np.float32)
        return GgufTensor(values.shape, kind, values.view(np.uint8))
    blocks = random.integers(
        0, 256, (OUTPUTS, DEPTH // form.block_size, form.block_bytes), dtype=np.uint8, endpoint=False
    )
    # these formats start, Q6_K ends, with one or two half floats; random bytes there could be NaN
    halves = 2 if kind in ("Q4_1", "Q4_K") else 1
    start = form.block_bytes - 2 if kind == "Q6_K" else 0
    scales = random.uniform(0.5, 1.5, (*blocks.shape[:2], halves)).astype(np.float16)
    blocks[:, :, start : start + 2 * halves] = scales.view(np.uint8)
    return GgufTensor((OUTPUTS, DEPTH), kind, blocks.reshape(OUTPUTS, -1))


def reference(tensor: GgufTensor, activations: Floats, quantized: bool) -> npt.NDArray[np.float64]:
    """The product in float64; with `quantized`, of activations rounded to int8 in groups."""
    values = activations.astype(np.float64)
    if quantized:
        groups = values.reshape(len(values), -1, GROUP)
        scale = np.abs(groups).max(axis=2, keepdims=True) / 127
        values = (np.rint(groups / scale) * scale).reshape(values.shape)
    return values @ tensor.float32().astype(np.float64).T


def multiply(tensor: Tensor, quantization: str, activations: Floats) -> Floats:
    """The product by the compiled kernels, [rows, outputs]."""
    matrix = pack(tensor, quantization)
    rows, depth = activations.shape
    quantized = matrix.weight_format != FLOAT32
    records = np.zeros((depth // GROUP, rows, RECORD if quantized else 4 * GROUP), dtype=np.uint8)
    out = np.empty((rows, matrix.data.shape[0] * COLUMNS), dtype=np.float32)
    descriptor = np.array(matrix.descriptor(), dtype=np.int64)
    inputs = np.ascontiguousarray(activations)
    addresses = [array.ctypes.data for array in (descriptor, inputs, records, out)]
    _multiply(run_tile.address, *addresses, rows, matrix.groups, matrix.data.shape[0], int(quantized))
    return out[:, : matrix.rows]


@compiled(cached=True)
def _multiply(run, matrix, inputs, records, out, rows, groups, tiles, quantized):  # type: ignore[no-untyped-def]
    for row in range(rows):
        write_records(inputs + row * groups * 4 * GROUP, groups, records, rows, row, quantized)
    multiply_rows(run, matrix, 0, tiles, records, rows, rows, out, tiles * 4 * COLUMNS, 0, 0)
