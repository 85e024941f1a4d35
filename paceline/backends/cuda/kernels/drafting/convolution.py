"""The two-tap convolutions of DFlash2, which mix each slot of a block with the slot before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl


@triton.jit
def _tap(kernels_at, corrections_at, number, part, inside, group, padded):  # type: ignore[no-untyped-def]
    """The weights of one tap: learned weights plus corrections that the channels of a group share."""
    learned = tl.load(kernels_at + number * padded + part, mask=inside, other=0.0)
    return learned + tl.load(corrections_at + part // group, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve_kernel(  # type: ignore[no-untyped-def]
    states_at,
    kernels_at,
    corrections_at,
    output_at,
    slots,
    size,
    group,
    padded,
    states_stride,
    corrections_stride,
    output_stride,
    first: tl.constexpr,
    adds: tl.constexpr,
    wide: tl.constexpr,  # size, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.arange(0, wide)
    inside = part < size
    pdl_sync(pdl)
    at = corrections_at + row * corrections_stride + first * (size // group)
    present = _tap(kernels_at, at, first, part, inside, group, padded)
    earlier = _tap(kernels_at, at + size // group, first + 1, part, inside, group, padded)
    states = states_at + row * states_stride + part
    has_before = inside & (tl.zeros_like(part) + row % slots > 0)  # not the first slot of a block
    own = tl.load(states, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(states - states_stride, mask=has_before, other=0.0).to(tl.float32)
    mixed, to = present * own + earlier * before, output_at + row * output_stride + part
    if adds:
        mixed += tl.load(to, mask=inside, other=0.0)
    tl.store(to, mixed.to(output_at.dtype.element_ty), mask=inside)


def convolve_slots(
    states: torch.Tensor,
    kernels: torch.Tensor,
    corrections: torch.Tensor,
    output: torch.Tensor,
    rows: int,
    slots: int,
    size: int,
    group: int,
    is_output: bool,
) -> None:
    """Convolve states [rows, at least size] over the slots of each block; write or add them to `output`.

    Blocks have `slots` rows. `kernels` float32 [2, 2, padded size]: a sublayer's input and output kernel,
    each with a tap for the slot and one for the slot before. `corrections` float32 [rows, at least 4 * size /
    group], each for `group` channels, have the same order. `is_output`: use the output kernel, and add.
    """
    pdl = supports_pdl(states.device)
    _convolve_kernel[(rows,)](
        states,
        kernels,
        corrections,
        output,
        slots,
        size,
        group,
        kernels.shape[2],
        states.stride(0),
        corrections.stride(0),
        output.stride(0),
        2 * is_output,
        is_output,
        triton.next_power_of_2(size),
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
