"""Writers of quantized safetensors from the formats' definitions, one value after the other.

Each takes a matrix [out, in] and gives its tensors, by the last part of their names, and the matrix that a
reader must get back.
"""

from __future__ import annotations

from typing import Any

import torch

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of a word in its bits 0-3, 4-7, ...


def grid(matrix: torch.Tensor, bits: int, symmetric: bool, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes [out, in] from 0, zero points [out, groups] and float16 scales [out, groups]."""
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.zeros(len(matrix), count), torch.zeros(len(matrix), count, dtype=torch.int64)
    for group in range(count):
        part = matrix[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = 2 * part.abs().amax(1) / top if symmetric else (high - low) / top
        scales[:, group] = scale.half().float()
        zeros[:, group] = (
            2 ** (bits - 1) if symmetric else (-low / scales[:, group]).round().clamp(1, top).long()
        )
    codes = (matrix / scales[:, groups]).round().long() + zeros[:, groups]
    return codes.clamp(0, top), zeros, scales


def restored(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    return (codes - zeros[:, groups]).float() * scales[:, groups]


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """The codes of each row [rows, n] in words int32 [rows, ceil(n bits / 32)]."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    packed = torch.zeros(len(codes), padded.shape[1] // per_word, dtype=torch.int64)
    for place, column in enumerate(order):
        packed |= padded[:, column::per_word] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def runs(inputs: int) -> torch.Tensor:
    return torch.arange(inputs) // GROUP


def shuffled(groups: torch.Tensor) -> torch.Tensor:
    return groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(5))]


def fp8(matrix: torch.Tensor, scaled_by: str) -> Packed:
    out, inputs = matrix.shape
    block = {"tensor": (out, inputs), "channel": (1, inputs), "block": (128, 128)}[scaled_by]
    scales = torch.zeros(-(-out // block[0]), -(-inputs // block[1]))
    weight, values = torch.zeros(out, inputs, dtype=torch.float8_e4m3fn), torch.zeros(out, inputs)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            cut = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = matrix[cut].abs().max() / 448
            weight[cut] = (matrix[cut] / scales[i, j]).to(torch.float8_e4m3fn)
            values[cut] = weight[cut].float() * scales[i, j]
    if scaled_by == "tensor":
        scales = scales.reshape(())
    return {"weight": weight, "weight_scale_inv" if scaled_by == "block" else "weight_scale": scales}, values


def fp4(matrix: torch.Tensor, kind: str) -> Packed:
    """NVFP4 as Model Optimizer or compressed-tensors write it, or MXFP4."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))
    groups = matrix.reshape(len(matrix), -1, 32 if kind == "mxfp4" else 16)
    largest = groups.abs().amax(2)
    if kind == "mxfp4":
        exponents = largest.log2().floor() - 2
        tensors, scales = {"weight_scale": (exponents + 127).to(torch.uint8)}, torch.exp2(exponents)
    else:
        whole = matrix.abs().max() / (6 * 448)
        eights = (largest / 6 / whole).to(torch.float8_e4m3fn)
        name, stored = ("weight_scale_2", whole) if kind == "modelopt" else ("weight_global_scale", 1 / whole)
        tensors = {"weight_scale": eights, name: stored if kind == "modelopt" else stored.reshape(1)}
        scales = eights.float() * (whole if kind == "modelopt" else 1 / stored)
    codes = ((groups / scales[:, :, None])[..., None] - table).abs().argmin(-1)
    values = (table[codes] * scales[:, :, None]).reshape(matrix.shape)
    codes = codes.reshape(len(matrix), -1, 2).to(torch.uint8)
    tensors["weight" if kind == "modelopt" else "weight_packed"] = codes[:, :, 0] | codes[:, :, 1] << 4
    return tensors, values


def int8(matrix: torch.Tensor) -> Packed:
    scales = (matrix.abs().amax(1, keepdim=True) / 127).bfloat16()
    weight = (matrix / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": weight, "weight_scale": scales}, weight.float() * scales.float()


def packed(matrix: torch.Tensor, bits: int, symmetric: bool, order: torch.Tensor | None = None) -> Packed:
    groups = runs(matrix.shape[1]) if order is None else order
    codes, zeros, scales = grid(matrix, bits, symmetric, groups)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales.half()}
    tensors["weight_shape"] = torch.tensor(matrix.shape)
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if order is not None:
        tensors["weight_g_idx"] = order.int()
    return tensors, restored(codes, zeros, scales, groups)


def awq(matrix: torch.Tensor) -> Packed:
    groups = runs(matrix.shape[1])
    codes, zeros, scales = grid(matrix, 4, False, groups)
    tensors = {
        "qweight": words(codes.T, 4, AWQ_COLUMNS),
        "qzeros": words(zeros.T, 4, AWQ_COLUMNS),
        "scales": scales.T.contiguous().half(),
    }
    return tensors, restored(codes, zeros, scales, groups)


def gptq(matrix: torch.Tensor, bits: int, symmetric: bool, by_activation: bool, zero_offset: int) -> Packed:
    groups = runs(matrix.shape[1])
    if by_activation:
        groups = shuffled(groups)
    codes, zeros, scales = grid(matrix, bits, symmetric, groups)
    tensors = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros - zero_offset).T, bits),
        "scales": scales.T.contiguous().half(),
        "g_idx": groups.int(),
    }
    return tensors, restored(codes, zeros, scales, groups)


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", **weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
