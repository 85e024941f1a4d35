"""Causal attention within the documents of a packed row.

On a GPU one variable-length flash kernel takes the row as it is. Elsewhere, and for heads that this kernel
does not take, documents of about the same length are padded and attended together (see batches.Group).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.train.loop.batches import Batch

MAX_HEAD_DIM = 256  # of the flash kernel
# All but cuDNN, which prepares each new shape on the host for 2 ms: documents have new shapes in every batch.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def packed_attention(
    batch: Batch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The mixed values, shaped as the query [1, tokens, heads, head_dim]; keys and values have KV heads."""
    if query.is_cuda and query.dtype != torch.float32 and query.shape[-1] <= MAX_HEAD_DIM:
        bounds, longest, left = batch.bounds, batch.longest, None if window is None else window - 1
        found = torch.ops.aten._flash_attention_forward(
            *(query[0], key[0], value[0], bounds, bounds, longest, longest, 0.0, True, False),
            window_size_left=left,
            window_size_right=None if left is None else 0,
        )
        output: torch.Tensor = found[0]
        return output[None]
    parts = []
    for group in batch.groups:
        padded = [group.padded(each) for each in (query, key, value)]
        parts.append(group.packed(causal_attention(padded[0], padded[1], padded[2], window)))
    return torch.cat(parts, 1)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Causal attention, shaped as the query [batch, tokens, heads, head_dim].

    The queries are those of the last keys.
    """
    mask = None
    if window is not None or query.shape[1] < key.shape[1]:
        place = torch.arange(key.shape[1], device=key.device)
        distance = place[key.shape[1] - query.shape[1] :, None] - place
        mask = (distance >= 0) & (distance < (window or key.shape[1]))
    heads_first = [each.transpose(1, 2) for each in (query, key, value)]
    return masked_attention(heads_first[0], heads_first[1], heads_first[2], mask).transpose(1, 2)


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The mixed values, shaped as the query [batch, heads, tokens, head_dim].

    `mask`: which keys it sees; None: causal attention.
    """
    with sdpa_kernel(KERNELS):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
