"""Logit bias, min_tokens and penalties on the device, with the bits of verify/sampling.py.

Each slot counts how often its request has generated each id. A drafted row also counts the drafted tokens on
its path. Accepted tokens are counted at the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.passes.tables import to_device
from paceline.core.logit_edits import LogitEdits, Penalties

BLOCK = 2048  # ids of a program
SEEN = tl.constexpr(1 << 30)  # flag of `history`: the id is in the prompt (for the repetition penalty)
ENDING = tl.constexpr(1 << 29)  # flag of `history`: min_tokens suppresses the id
NUM_PENALTIES = tl.constexpr(len(Penalties._fields))


@dataclass(frozen=True)
class EditState:
    """The logit edits of the requests in the device's slots."""

    is_active: torch.Tensor  # int32 [slots] 0: the logits of the slot are not edited
    penalties: torch.Tensor  # float32 [slots, NUM_PENALTIES]
    min_lengths: torch.Tensor  # int32 [slots] length of the text up to which endings are suppressed
    history: torch.Tensor  # int32 [slots, vocab] occurrences of the id in the output, and the flags above
    bias: torch.Tensor  # float32 [slots, vocab]

    def init_slot(self, slot: int, edits: LogitEdits) -> None:
        """Write the edits of a request to its slot."""

        def sent(values: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(values, self.history.device)

        history, bias = self.history[slot], self.bias[slot]
        history.zero_()
        history[sent(edits.output_ids)] = sent(edits.output_counts).int()
        history[sent(edits.seen_ids)] += SEEN.value
        history[sent(edits.ending_ids)] += ENDING.value
        bias.zero_()
        bias[sent(edits.bias_ids)] = sent(edits.bias)
        self.penalties[slot] = sent(np.array(edits.penalties, dtype=np.float32))
        self.min_lengths[slot] = edits.min_length


def make_edit_state(slots: int, vocab_size: int, device: torch.device) -> EditState:
    """Slots without edits."""

    def zeros(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    return EditState(
        zeros(slots),
        zeros(slots, NUM_PENALTIES.value, kind=torch.float32),
        zeros(slots),
        zeros(slots, vocab_size),
        zeros(slots, vocab_size, kind=torch.float32),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _drafted_history(history, token, request, node, tokens_at, parents_at, nodes, levels: tl.constexpr):  # type: ignore[no-untyped-def]
    """The history of ids, with the drafted tokens from the root to a node."""
    for _ in tl.static_range(levels):
        drafted = tl.load(tokens_at + request * nodes + node)
        history += ((token == drafted) & (node > 0)).to(tl.int32)
        node = tl.maximum(tl.load(parents_at + node), 0)
    return history


@triton.jit  # type: ignore[untyped-decorator]
def _edit_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    slots_at,
    tokens_at,
    positions_at,
    parents_at,
    is_active_at,
    penalties_at,
    min_lengths_at,
    history_at,
    bias_at,
    vocab_size,
    logits_stride,
    nodes,
    levels: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    request = row // nodes
    slot = tl.load(slots_at + request)
    valid_slot = tl.maximum(slot, 0).to(tl.int64)
    pdl_sync(pdl)
    if (slot >= 0) & (tl.load(is_active_at + valid_slot) > 0):
        token = number * block + tl.arange(0, block)
        inside = token < vocab_size
        at = logits_at + row.to(tl.int64) * logits_stride + token
        line = valid_slot * vocab_size + token
        logits = tl.load(at, mask=inside, other=0.0)
        history = tl.load(history_at + line, mask=inside, other=0)
        logits += tl.load(bias_at + line, mask=inside, other=0.0)
        history = _drafted_history(history, token, request, row % nodes, tokens_at, parents_at, nodes, levels)
        length = tl.load(positions_at + row) + 1  # of the text before the token that is sampled here
        is_early = length < tl.load(min_lengths_at + valid_slot)
        logits = tl.where(((history & ENDING) != 0) & is_early, float("-inf"), logits)
        own = penalties_at + valid_slot * NUM_PENALTIES
        repetition, frequency, presence = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        count = history & (ENDING - 1)
        is_seen = ((history & SEEN) != 0) | (count > 0)
        penalized = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where(is_seen, penalized, logits)
        penalized = logits - frequency * count.to(tl.float32) - presence
        tl.store(at, tl.where(count > 0, penalized, logits), mask=inside)


def edit_logits(
    logits: torch.Tensor,
    vocab_size: int,
    slots: torch.Tensor,
    state: EditState,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    parents: torch.Tensor,
    levels: int,
) -> None:
    """Edit the logits [rows, at least vocab_size] of requests, in place.

    A request has as many rows as `parents` int32 [nodes] has nodes, the root first. `slots` int32 [requests];
    `tokens` and `positions` int32 [rows].
    """
    pdl, nodes = supports_pdl(logits.device), len(parents)
    _edit_kernel[(len(slots) * nodes, triton.cdiv(vocab_size, BLOCK))](
        logits,
        slots,
        tokens,
        positions,
        parents,
        state.is_active,
        state.penalties,
        state.min_lengths,
        state.history,
        state.bias,
        vocab_size,
        logits.stride(0),
        nodes,
        levels,
        BLOCK,
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    slots_at, is_active_at, history_at, output_at, counts_at, vocab_size, width, pdl: tl.constexpr
) -> None:
    request = tl.program_id(0)
    slot = tl.load(slots_at + request)
    valid_slot = tl.maximum(slot, 0).to(tl.int64)
    pdl_sync(pdl)
    if (slot >= 0) & (tl.load(is_active_at + valid_slot) > 0):
        for step in range(tl.load(counts_at + request)):
            token = tl.maximum(tl.load(output_at + request * width + step), 0)
            tl.atomic_add(history_at + valid_slot * vocab_size + token, 1)


def count_tokens(slots: torch.Tensor, state: EditState, output: torch.Tensor, counts: torch.Tensor) -> None:
    """Count a step's tokens, `output` int32 [requests, width] with `counts` [requests] valid ones."""
    pdl = supports_pdl(slots.device)
    _count_kernel[(len(slots),)](
        slots,
        state.is_active,
        state.history,
        output,
        counts,
        state.history.shape[1],
        output.shape[1],
        pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
