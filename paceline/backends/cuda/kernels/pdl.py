"""Programmatic dependent launch (PDL): the next kernel starts before the previous one has ended.

On Hopper and newer, a kernel can start while its predecessor still runs. It may read data written before the
pass, such as weights and tables, and must wait before it touches the results of other kernels. Every program
of every kernel calls `pdl_sync` (or launch and wait), so waiting for the predecessor waits for all kernels
before it.

Kernels whose bits matter are compiled with `enable_fp_fusion=False`: in `a * b + c * d` the compiler fuses
one of the products, and which one was seen to change with the number of rows. Where fused multiply-adds are
wanted, they are written as `fma`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = 9


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on this device may start before their predecessors end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER


@triton.jit  # type: ignore[untyped-decorator]
def pdl_launch(pdl: tl.constexpr) -> None:
    """Let the next kernel start."""
    if pdl:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def pdl_wait(pdl: tl.constexpr) -> None:
    """Wait for the results of the kernels before this one."""
    if pdl:
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def pdl_sync(pdl: tl.constexpr) -> None:
    """Let the next kernel start, and wait for the results of the kernels before this one."""
    pdl_launch(pdl)
    pdl_wait(pdl)


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(address) -> None:  # type: ignore[no-untyped-def]
    """Prefetch the cache lines of these addresses into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
