"""Where each format keeps a matrix's codes, zero points and scales. `out` and `in` are those of the matrix.

    FP8              weight            e4m3  [out, in]
                     weight_scale[_inv]      [], [1], [out], [out, 1], or one per block [out / 128, in / 128]
    FP4              weight[_packed]   e2m1  [out, in / 2]     two in a byte, the first in its low bits
                     weight_scale      e4m3  [out, in / 16]    NVFP4: times weight_scale_2, or divided by
                                                               weight_global_scale, one number each
                                       uint8 [out, in / 32]    MXFP4: exponents of two, less 127
    int8             weight            int8  [out, in]
                     weight_scale            [], [1], [out], [out, groups];  weight_zero_point likewise
    pack-quantized   weight_packed     int32 [out, in / 8]     value i of a word in its bits 4 i
                     weight_scale            [out, groups]
                     weight_zero_point int32 [out / 8, groups] packed down the rows
    AWQ              qweight           int32 [in, out / 8]     columns 0 2 4 6 1 3 5 7 of a word
                     qzeros            int32 [groups, out / 8] in the same order
                     scales                  [groups, out]
    GPTQ             qweight           int32 [in / 8, out]     value i of a word in its bits 4 i
                     qzeros            int32 [groups, out / 8] less one in version 1
                     scales                  [groups, out];  g_idx int32 [in] the group of each input

With b bits instead of 4 a word has 32 / b values. Signed codes are stored plus half their range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError
from paceline.models.checkpoint import Stored, Tensor
from paceline.models.files.stacked_experts import MXFP4_BIAS, MXFP4_VALUES
from paceline.models.quantized.method import GPTQ_BITS, Quantization
from paceline.models.quantized.weights import GroupedWeight, Rows

AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.intp)  # of a column among the 4 bits of its word
INDICES = {"I32": "<i4", "I64": "<i8"}
MAX_SIDE = 1 << 24  # of a matrix; a forged shape must not become an array

Parts = Mapping[str, Tensor]  # the tensors of one matrix, by the last part of their names


def _e4m3_values() -> npt.NDArray[np.float32]:
    """The value of every byte: a sign, 4 bits of exponent less 7, 3 of mantissa; no infinity, one NaN."""
    byte = np.arange(128)
    exponent, mantissa = byte >> 3, (byte & 7) / 8
    values = np.where(exponent == 0, np.ldexp(mantissa, -6), np.ldexp(1 + mantissa, exponent - 7))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


E4M3 = _e4m3_values()
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - MXFP4_BIAS), np.float32(np.nan))
FP4_SCALES = {"F8_E4M3": (16, E4M3), "U8": (32, E8M0)}  # inputs that share a scale, the values of its bytes


def fp8(name: str, parts: Parts, quantization: Quantization) -> GroupedWeight:
    """A matrix in e4m3, whose scales are one, one by row, or one by block."""
    weight, scale = parts["weight"], _required(name, parts, "weight_scale_inv", "weight_scale")
    out, inputs = _matrix_shape(name, weight)
    scales, groups = _scales_by_row(name, scale, out, inputs, quantization.block)
    borders = np.flatnonzero(np.diff(groups)) + 1  # where another scale begins
    kind = "FP8" if not len(borders) else "FP8 in blocks" if not (borders % 128).any() else "FP8 in groups"
    stored = Stored(kind, _bytes(parts))
    return GroupedWeight(
        (out, inputs), stored, 0, lambda rows: E4M3[_lines(weight, rows)], scales, None, groups
    )


def fp4(name: str, parts: Parts, quantization: Quantization) -> GroupedWeight:
    """A matrix in e2m1, with scales in groups (NVFP4, MXFP4) and, of NVFP4, one of the whole matrix."""
    stored, scale = (
        parts["weight_packed" if "weight_packed" in parts else "weight"],
        _required(name, parts, "weight_scale"),
    )
    out, inputs = stored.shape[0], 2 * _matrix_shape(name, stored)[1]
    if stored.kind != "U8" or scale.kind not in FP4_SCALES:
        raise _wrong(name, f"its codes are {stored.kind} and its scales {scale.kind}, not FP4")
    size, values = FP4_SCALES[scale.kind]
    _expect(name, "weight_scale", scale.shape, (out, -(-inputs // size)))
    factor = np.float32(1)
    if "weight_scale_2" in parts:
        factor = parts["weight_scale_2"].float32().ravel()[0]
    elif "weight_global_scale" in parts:
        factor /= parts["weight_global_scale"].float32().ravel()[0]

    def codes(rows: slice) -> npt.NDArray[np.float32]:
        octets = _lines(stored, rows)
        pairs = np.stack((octets & np.uint8(15), octets >> np.uint8(4)), axis=-1)
        return MXFP4_VALUES[pairs.reshape(len(octets), -1)]

    def scales(rows: slice) -> npt.NDArray[np.float32]:
        return values[_lines(scale, rows)] * factor

    groups = _groups_of(inputs, size)
    return GroupedWeight((out, inputs), Stored("FP4", _bytes(parts)), 0, codes, scales, None, groups)


def int8(name: str, parts: Parts, quantization: Quantization) -> GroupedWeight:
    """A matrix of int8, whose scales are one, or one by row or group."""
    weight, scale = parts["weight"], _required(name, parts, "weight_scale")
    out, inputs = _matrix_shape(name, weight)
    scales, groups = _scales_by_row(name, scale, out, inputs, quantization.block)
    zero = parts.get("weight_zero_point")
    if zero is not None:
        _expect(name, "weight_zero_point", zero.shape, scale.shape)
        if zero.kind != "I8":
            raise _wrong(name, f"weight_zero_point is {zero.kind}, not I8")

    def codes(rows: slice) -> npt.NDArray[np.int8]:
        return _lines(weight, rows).view(np.int8)

    def zero_points(rows: slice) -> npt.NDArray[np.int8]:
        assert zero is not None
        values = zero.blocks().view(np.int8).reshape(-1, int(groups[-1]) + 1)
        return values[rows] if len(values) == out else values

    zeros = None if zero is None else zero_points
    made = GroupedWeight((out, inputs), Stored("INT8", _bytes(parts)), 8, codes, scales, zeros, groups)
    return made.in_blocks()


def packed(name: str, parts: Parts, quantization: Quantization) -> GroupedWeight:
    """A matrix of compressed-tensors' pack-quantized: words along the inputs."""
    words, scale = parts["weight_packed"], _required(name, parts, "weight_scale")
    shape = _indices(name, parts, "weight_shape")
    if shape is None or shape.shape != (2,) or not (shape > 0).all() or (shape > MAX_SIDE).any():
        raise _wrong(name, "weight_shape is not two sizes")
    out, inputs = (int(size) for size in shape)
    bits = next((b for b in (4, 8) if words.shape == (out, -(-inputs * b // 32))), 0)
    if not bits or words.kind != "I32":
        raise _wrong(name, f"weight_packed {list(words.shape)} does not hold {out}×{inputs} of 4 or 8 bits")
    scales, groups = _scales_by_row(name, scale, out, inputs, (1, inputs))
    if (order := _indices(name, parts, "weight_g_idx")) is not None:
        groups = _checked_groups(name, order, inputs, int(groups[-1]) + 1)
    zero, per_word = parts.get("weight_zero_point"), 32 // bits
    if zero is not None:
        _expect(name, "weight_zero_point", zero.shape, (-(-out // per_word), int(scale.shape[-1])))
    # codes of 8 bits as signed numbers, which blocks of GGUF hold too
    middle, shift = (8, 0) if bits == 4 else (0, 128)

    def codes(rows: slice) -> npt.NDArray[Any]:
        unsigned = _along(_all_words(words)[rows], bits)[:, :inputs]
        return (unsigned ^ np.uint8(128)).view(np.int8) if shift else unsigned

    def zeros(rows: slice) -> npt.NDArray[Any]:
        return np.full((1, 1), middle) if zero is None else _down(zero, rows, bits).astype(np.int16) - shift

    stored = Stored(f"INT{bits}", _bytes(parts))
    made = GroupedWeight((out, inputs), stored, bits, codes, scales, zeros, groups)
    return made.in_blocks()


def awq(name: str, parts: Parts, quantization: Quantization) -> GroupedWeight:
    """A matrix of AWQ: words along the outputs, in an order of their own."""
    words, zeros, scale = (_required(name, parts, part) for part in ("qweight", "qzeros", "scales"))
    inputs, out = words.shape[0], words.shape[-1] * 8
    groups = _groups_of(inputs, quantization.group_size)
    _check_packed(
        name, parts, {"qweight": (inputs, out // 8), "qzeros": (groups[-1] + 1, out // 8)}, out, groups
    )
    stored = Stored("AWQ 4-bit", _bytes(parts))

    def codes(rows: slice) -> npt.NDArray[Any]:
        return _columns(words, rows, 4, AWQ_PLACES)

    def zero_points(rows: slice) -> npt.NDArray[Any]:
        return _columns(zeros, rows, 4, AWQ_PLACES)

    made = GroupedWeight((out, inputs), stored, 4, codes, _scales_by_column(scale), zero_points, groups)
    return made.in_blocks()


def gptq(name: str, parts: Parts, quantization: Quantization) -> GroupedWeight:
    """A matrix of GPTQ: words along the inputs, outputs as columns, groups in any order of inputs."""
    words, zeros, scale = (_required(name, parts, part) for part in ("qweight", "qzeros", "scales"))
    bits = _bits_of(words, scale, quantization)
    per_word = 32 // bits
    inputs, out = words.shape[0] * per_word, words.shape[-1]
    groups = _groups_of(inputs, quantization.group_size)
    if (order := _indices(name, parts, "g_idx")) is not None:
        groups = _checked_groups(name, order, inputs, scale.shape[0])
    shapes = {"qweight": (inputs // per_word, out), "qzeros": (scale.shape[0], -(-out // per_word))}
    _check_packed(name, parts, shapes, out, groups)
    mask = (1 << bits) - 1

    def codes(rows: slice) -> npt.NDArray[Any]:
        return _along(np.ascontiguousarray(_all_words(words)[:, rows].T), bits)

    def zero_points(rows: slice) -> npt.NDArray[Any]:
        return _columns(zeros, rows, bits).astype(np.int16) + quantization.zero_offset & mask

    made = GroupedWeight(
        (out, inputs),
        Stored(f"GPTQ {bits}-bit", _bytes(parts)),
        bits,
        codes,
        _scales_by_column(scale),
        zero_points,
        groups,
    )
    return made.in_blocks() if bits == 4 else made


def _bits_of(words: Tensor, scale: Tensor, quantization: Quantization) -> int:
    """The bits of one GPTQ matrix, which may differ from the configuration's."""
    inputs = scale.shape[0] * quantization.group_size
    found = words.shape[0] * 32 / inputs if inputs else 0
    return int(found) if found in GPTQ_BITS else quantization.bits


def _lines(tensor: Tensor, rows: slice) -> npt.NDArray[np.uint8]:
    """The bytes of some rows."""
    return np.ascontiguousarray(tensor.blocks()[rows])


def _all_words(tensor: Tensor) -> npt.NDArray[np.uint32]:
    return tensor.blocks().view("<u4")


def _along(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint8]:
    """The codes in words [rows, words], lowest bits first: [rows, words * 32 / bits]."""
    octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (octets[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(words), -1)


def _columns(
    tensor: Tensor, rows: slice, bits: int, places: npt.NDArray[np.intp] | None = None
) -> npt.NDArray[np.uint8]:
    """The codes of these outputs, packed along the outputs in words [lines, words]: [rows, lines].

    `places`: where in a word each of its columns is, if not in order.
    """
    per_word = 32 // bits
    begin, end = rows.start // per_word, -(-rows.stop // per_word)
    codes = _along(_all_words(tensor)[:, begin:end], bits)
    if places is not None:
        codes = codes.reshape(len(codes), -1, per_word)[:, :, places].reshape(codes.shape)
    return np.ascontiguousarray(codes[:, rows.start - begin * per_word : rows.stop - begin * per_word].T)


def _down(tensor: Tensor, rows: slice, bits: int) -> npt.NDArray[np.uint8]:
    """The codes of these rows, packed down the rows in words: [rows, columns]."""
    per_word = 32 // bits
    begin, end = rows.start // per_word, -(-rows.stop // per_word)
    codes = _along(np.ascontiguousarray(_all_words(tensor)[begin:end].T), bits).T
    return codes[rows.start - begin * per_word : rows.stop - begin * per_word]


def _scales_by_column(scale: Tensor) -> Rows:
    """Scales that are stored [groups, out], by row: [rows, groups]."""
    return lambda rows: np.ascontiguousarray(scale.float32()[:, rows].T)


def _scales_by_row(
    name: str, scale: Tensor, out: int, inputs: int, block: tuple[int, int]
) -> tuple[Rows, npt.NDArray[np.intp]]:
    """Scales by row [rows, groups], and the group of each column."""
    lines, columns = (*scale.shape, 1, 1)[:2] if scale.shape else (1, 1)
    if len(scale.shape) > 2 or (lines, columns) not in _scale_shapes(out, inputs, columns, block):
        raise _wrong(name, f"scales {list(scale.shape)} do not fit a matrix {out}×{inputs} in blocks {block}")
    size = -(-inputs // columns) if lines == out else block[1]
    groups = np.arange(inputs, dtype=np.intp) // (inputs if columns == 1 else size)
    rows_per_line = 1 if lines == out else out if lines == 1 else block[0]

    def scales(rows: slice) -> npt.NDArray[Any]:
        begin, end = rows.start // rows_per_line, (rows.stop - 1) // rows_per_line + 1
        part = scale.take_rows(slice(begin, end)) if scale.shape else scale
        lines_of_rows = np.arange(rows.start, rows.stop) // rows_per_line - begin
        spread: npt.NDArray[np.float32] = part.float32().reshape(-1, columns)[lines_of_rows]
        return spread

    return scales, groups


def _scale_shapes(out: int, inputs: int, columns: int, block: tuple[int, int]) -> list[tuple[int, int]]:
    """The shapes that scales may have: one, one by row, by row and group, by block."""
    by_block = -(-out // block[0]), -(-inputs // block[1])
    by_group = [(out, columns)] if columns <= inputs and inputs % columns == 0 else []
    return [(1, 1), (out, 1), by_block, *by_group]


def _groups_of(inputs: int, size: int) -> npt.NDArray[np.intp]:
    """The group of each input, of groups of `size`; 0: one group."""
    return np.arange(inputs, dtype=np.intp) // (size or inputs)


def _indices(name: str, parts: Parts, part: str) -> npt.NDArray[np.int64] | None:
    """The integers of a small tensor, if there is one."""
    if (tensor := parts.get(part)) is None:
        return None
    if tensor.kind not in INDICES:
        raise _wrong(name, f"{part} is {tensor.kind}, not an integer")
    return (
        np.ascontiguousarray(tensor.blocks())
        .view(INDICES[tensor.kind])
        .astype(np.int64)
        .reshape(tensor.shape)
    )


def _checked_groups(name: str, order: npt.NDArray[np.int64], inputs: int, count: int) -> npt.NDArray[np.intp]:
    if order.shape != (inputs,) or not ((order >= 0) & (order < count)).all():
        raise _wrong(name, f"its group index does not give each of {inputs} inputs one of {count} groups")
    return order.astype(np.intp)


def _check_packed(
    name: str, parts: Parts, shapes: Mapping[str, tuple[int, ...]], out: int, groups: npt.NDArray[np.intp]
) -> None:
    for part, shape in shapes.items():
        _expect(name, part, parts[part].shape, shape)
        if parts[part].kind != "I32":
            raise _wrong(name, f"{part} is {parts[part].kind}, not I32")
    if (
        len(parts["scales"].shape) != 2
        or parts["scales"].shape[1] != out
        or groups.max() >= parts["scales"].shape[0]
    ):
        raise _wrong(name, f"scales {list(parts['scales'].shape)} do not fit {out} outputs and its groups")


def _matrix_shape(name: str, tensor: Tensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise _wrong(name, f"a quantized tensor has shape {list(tensor.shape)}, not two sizes")
    return tensor.shape[0], tensor.shape[1]


def _required(name: str, parts: Parts, *names: str) -> Tensor:
    """The first of these that there is."""
    found = next((parts[part] for part in names if part in parts), None)
    if found is None:
        raise _wrong(name, f"it has no {' or '.join(names)}")
    return found


def _expect(name: str, part: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise _wrong(name, f"{part} has shape {list(found)}, where {list(wanted)} is expected")


def _bytes(parts: Parts) -> int:
    return sum(tensor.stored.nbytes for tensor in parts.values())


def _wrong(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: {what}. The file does not hold what its quantization_config says: fetch the model again."
    )
