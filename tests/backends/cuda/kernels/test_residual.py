"""Norms that are kernels of their own are those of transformer/blocks.py, added as a layer of torch adds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

SIZE, PADDED, EPS = 60, 64, 1e-5


@pytest.mark.parametrize("is_centered", [False, True], ids=["RMSNorm", "LayerNorm"])
def test_a_block_is_normed_scaled_and_added_and_the_next_norm_follows(
    is_centered: bool, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.kernels.residual import Residual, add_normed, plain

    torch.manual_seed(5)
    hidden, added = (F.pad(torch.randn(3, SIZE), (0, PADDED - SIZE)).to(device) for _ in range(2))
    after, before = (torch.randn(PADDED).to(device, dtype) for _ in range(2))
    written = plain(torch.zeros(3, PADDED, dtype=dtype, device=device), torch.ones(3, 1, device=device))
    residual = Residual(SIZE, EPS, is_centered, scale=0.3, embedding_scale=2.0, is_parallel=False)

    def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        own = values[:, :SIZE]
        normed = (F.layer_norm if is_centered else F.rms_norm)(own, (SIZE,), eps=EPS)
        return F.pad(normed * weight[:SIZE].float(), (0, PADDED - SIZE))

    embedded = 2 * hidden
    add_normed(residual, hidden, None, None, None, None, 3)
    torch.testing.assert_close(hidden, embedded)
    expected = embedded + 0.3 * norm(added, after)
    add_normed(residual, hidden, added, after, before, written, 3)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(written.rows.float(), norm(expected, before), rtol=1e-2, atol=1e-3)
    add_normed(residual, hidden, added, after, None, None, 3, layer_scale=0.7)
    torch.testing.assert_close(hidden, 0.7 * (expected + 0.3 * norm(added, after)))
