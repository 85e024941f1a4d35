"""Stores the target's features of a pass in a head's pool, at the KV slots of their rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl


@triton.jit  # type: ignore[untyped-decorator]
def _keep_kernel(  # type: ignore[no-untyped-def]
    features_at,
    slot_mapping_at,
    parts_at,
    kept_at,
    size,
    features_stride,
    kept_stride,
    largest,
    wide: tl.constexpr,  # size, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, wide)
    inside = column < size
    pdl_sync(pdl)
    kv_slot = tl.load(slot_mapping_at + row)
    source = tl.load(parts_at + part) * size
    read = features_at + row.to(tl.int64) * features_stride + source + column
    values = tl.load(read, mask=inside, other=0.0)
    values = tl.minimum(tl.maximum(values, -largest), largest)  # clamp to what float16 can hold
    if kv_slot >= 0:
        to = kept_at + kv_slot.to(tl.int64) * kept_stride + part * size + column
        tl.store(to, values.to(kept_at.dtype.element_ty), mask=inside)


def store_features(
    features: torch.Tensor, slot_mapping: torch.Tensor, parts: torch.Tensor, kept: torch.Tensor
) -> None:
    """Write parts of the rows of `features` float32 [at least rows, any] to `kept` [slots, parts * size].

    `slot_mapping` int32 [rows], -1: padding; `parts` int32 [parts] are the indices of a row's parts.
    """
    pdl = supports_pdl(kept.device)
    size = kept.shape[1] // len(parts)
    _keep_kernel[(len(slot_mapping), len(parts))](
        features,
        slot_mapping,
        parts,
        kept,
        size,
        features.stride(0),
        kept.stride(0),
        torch.finfo(kept.dtype).max,
        triton.next_power_of_2(size),
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
