"""The kernel for one new token per row equals plain attention.

Without a GPU triton can interpret it: TRITON_INTERPRET=1 pytest tests/train/test_decode_attention.py
"""

from __future__ import annotations

import os

import pytest
import torch

from paceline.train.sampler import attend_many

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device")


@pytest.mark.parametrize(("stop", "window"), [(75, None), (75, 20), (64, None), (1, None)])
def test_the_kernel_equals_plain_attention(stop: int, window: int | None) -> None:
    from paceline.train.decode_attention import attend_one

    device = "cpu" if INTERPRETED else "cuda"
    torch.manual_seed(0)
    query = torch.randn(4, 1, 6, 16, device=device)
    keys, values = (torch.randn(4, 2, 80, 16, device=device) for _ in range(2))
    keys[:, :, stop:] = values[:, :, stop:] = float("nan")  # what is not written yet is not read
    first = torch.tensor([0, 3, 63, 70], device=device).clamp(max=stop - 1)
    keys[2, :, : int(first[2])] = float("nan")  # padding neither
    one = attend_one(query, keys, values, first, stop, window)
    plain = attend_many(query, keys.nan_to_num(), values.nan_to_num(), first, stop, window)
    torch.testing.assert_close(one, plain, atol=1e-5 if INTERPRETED else 5e-3, rtol=0)  # a GPU rounds to tf32
