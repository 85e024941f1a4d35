"""What all kernels share: how they follow each other on the device.

On Hopper and newer a kernel may start while the one before it still runs (programmatic dependent launch):
it is set up meanwhile, may read what was there before the pass, and waits before it touches what others have
written. Each kernel calls `follow` in every program, so whoever has waited for its predecessor has waited for
all before it too.

Kernels whose bits count are compiled with `enable_fp_fusion=False`: of `a * b + c * d` the compiler fuses one
product with the sum, and which one was seen to change with the number of rows. What is fused says `fma`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = 9


def overlaps(device: torch.device) -> bool:
    """Whether kernels of this device may start before their predecessors end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER


@triton.jit  # type: ignore[untyped-decorator]
def let_next_start(overlap: tl.constexpr) -> None:
    """Let the next kernel start."""
    if overlap:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait(overlap: tl.constexpr) -> None:
    """Wait for what the kernels before this one have written."""
    if overlap:
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def follow(overlap: tl.constexpr) -> None:
    """Let the next kernel start, and wait for what the kernels before this one have written."""
    let_next_start(overlap)
    wait(overlap)


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(address) -> None:  # type: ignore[no-untyped-def]
    """Fetch the cache lines of these addresses; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
