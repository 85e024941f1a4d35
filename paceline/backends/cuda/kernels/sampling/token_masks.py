"""Token masks on the device: logits of tokens that may not come next become -inf, in place.

The host sends the masks of some rows, in the layout of core/token_masks.py, and for each row which of them
is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.passes.tables import to_device
from paceline.core.arrays import Int32Array
from paceline.core.token_masks import num_words

BLOCK = 2048  # ids of a program


@dataclass(frozen=True)
class RowMasks:
    """The token masks of a pass."""

    lines: torch.Tensor  # int32 [rows] the row's line in `masks`; -1: it has no mask
    masks: torch.Tensor  # int32 [rows, words]

    def send(self, num_rows: int, rows: Int32Array, masks: Sequence[Int32Array]) -> None:
        """Give these of the first `num_rows` rows these masks, and the others none."""
        lines = np.full(num_rows, -1, dtype=np.int32)
        lines[rows] = np.arange(len(masks))
        sent = to_device(np.concatenate((lines, *masks)), self.lines.device)
        self.lines[:num_rows] = sent[:num_rows]
        self.masks.view(-1)[: len(sent) - num_rows] = sent[num_rows:]


def row_masks(rows: int, vocab_size: int, device: torch.device) -> RowMasks:
    """No masks, for `rows` rows."""
    return RowMasks(
        torch.full((rows,), -1, dtype=torch.int32, device=device),
        torch.zeros((rows, num_words(vocab_size)), dtype=torch.int32, device=device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    lines_at,
    masks_at,
    vocab_size,
    logits_stride,
    words,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    pdl_sync(pdl)
    line = tl.load(lines_at + row)
    if line >= 0:
        token = number * block + tl.arange(0, block)
        inside = token < vocab_size
        word = tl.load(masks_at + line.to(tl.int64) * words + (token >> 5), mask=inside, other=-1)
        is_forbidden = ((word >> (token & 31)) & 1) == 0
        at = logits_at + row.to(tl.int64) * logits_stride + token
        tl.store(at, tl.full([block], float("-inf"), tl.float32), mask=inside & is_forbidden)


def mask_logits(logits: torch.Tensor, vocab_size: int, masks: RowMasks, rows: int) -> None:
    """Apply the masks to the first rows of `logits` [rows, at least vocab_size]."""
    pdl = supports_pdl(logits.device)
    _mask_kernel[(rows, triton.cdiv(vocab_size, BLOCK))](
        logits,
        masks.lines,
        masks.masks,
        vocab_size,
        logits.stride(0),
        masks.masks.shape[1],
        BLOCK,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
