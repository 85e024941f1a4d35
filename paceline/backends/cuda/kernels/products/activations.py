"""Activation functions of gated MLPs, and the kernel of sigmoid gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl

GATED_COLUMNS = 1024  # columns of a program


@triton.jit  # type: ignore[untyped-decorator]
def activated(gate, up, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    """activation(gate) * up, as ACTIVATIONS of transformer/blocks.py defines it by name."""
    if activation == "relu2":
        positive = tl.maximum(up, 0.0)
        return positive * positive
    if activation == "gelu_tanh":  # tanh(y) as sigmoid(2 y); 1.596 is 2 * sqrt(2 / pi)
        cubed = gate + 0.044715 * gate * gate * gate
        return gate / (1.0 + tl.exp(-1.5957691216057308 * cubed)) * up
    if activation == "clamped_silu":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit  # type: ignore[untyped-decorator]
def _gate_rows_kernel(  # type: ignore[no-untyped-def]
    values_at,
    gates_at,
    width,
    value_line,
    gate_line,
    is_one: tl.constexpr,  # a single gate for the whole row
    columns: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    gates = tl.load(gates_at + row * gate_line + (0 if is_one else 1) * column, mask=inside, other=0.0)
    at = values_at + row * value_line + column
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gates))
    tl.store(at, values.to(values_at.dtype.element_ty), mask=inside)


def gate_rows(values: torch.Tensor, gates: torch.Tensor) -> None:
    """Scale `values` [rows, width] by the sigmoid of `gates`, float32 [rows, width] or [rows, 1]."""
    rows, width = values.shape
    pdl = supports_pdl(values.device)
    _gate_rows_kernel[(rows, triton.cdiv(width, GATED_COLUMNS))](
        values,
        gates,
        width,
        values.stride(0),
        gates.stride(0),
        gates.shape[1] == 1,
        GATED_COLUMNS,
        pdl,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
