"""Features of the rows of a pass, kept by the places of their keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import follow, overlaps


@triton.jit  # type: ignore[untyped-decorator]
def _keep_kernel(  # type: ignore[no-untyped-def]
    features_at,
    places_at,
    parts_at,
    kept_at,
    size,
    features_stride,
    kept_stride,
    largest,
    wide: tl.constexpr,  # size, rounded up to a power of two
    overlap: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, wide)
    inside = column < size
    follow(overlap)
    place = tl.load(places_at + row)
    source = tl.load(parts_at + part) * size
    read = features_at + row.to(tl.int64) * features_stride + source + column
    values = tl.load(read, mask=inside, other=0.0)
    values = tl.minimum(tl.maximum(values, -largest), largest)  # float16 has no larger ones
    if place >= 0:
        to = kept_at + place.to(tl.int64) * kept_stride + part * size + column
        tl.store(to, values.to(kept_at.dtype.element_ty), mask=inside)


def keep_features(
    features: torch.Tensor, places: torch.Tensor, parts: torch.Tensor, kept: torch.Tensor
) -> None:
    """Write parts of the rows of `features` float32 [at least rows, any] to `kept` [places, parts * size].

    `places` int32 [rows], -1 of padding; `parts` int32 [parts] say which parts of a row those are.
    """
    overlap = overlaps(kept.device)
    size = kept.shape[1] // len(parts)
    _keep_kernel[(len(places), len(parts))](
        features,
        places,
        parts,
        kept,
        size,
        features.stride(0),
        kept.stride(0),
        torch.finfo(kept.dtype).max,
        triton.next_power_of_2(size),
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
