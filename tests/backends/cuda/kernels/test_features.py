"""Features of a pass lie in a head's pool where their keys and values lie in the target's."""

from __future__ import annotations

import torch

from paceline.backends.cuda.kernels.drafting.features import store_features


def test_wanted_parts_of_rows_go_to_their_kv_slots_and_padding_nowhere(
    device: torch.device, dtype: torch.dtype
) -> None:
    rows, size = 5, 6
    features = torch.randn(8, 3 * size, device=device)
    features[0, 2 * size] = 1e30  # more than float16 has
    slot_mapping = torch.tensor([7, -1, 0, 3, -1], dtype=torch.int32, device=device)
    parts = torch.tensor([2, 0], dtype=torch.int32, device=device)
    kept = torch.full((9, 2 * size), -5.0, dtype=dtype, device=device)
    store_features(features, slot_mapping, parts, kept)
    expected = torch.full_like(kept, -5.0)
    for row in range(rows):
        if slot_mapping[row] >= 0:
            own = features[row].view(3, size)[[2, 0]].reshape(-1)
            expected[slot_mapping[row]] = own.clamp(*(sign * torch.finfo(dtype).max for sign in (-1, 1))).to(
                dtype
            )
    assert torch.equal(kept, expected)
