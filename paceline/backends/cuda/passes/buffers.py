"""Buffer: pinned host memory for the inputs and results of a decode pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from paceline.backends.cuda.decode.decode_loop import DecodeLoop
from paceline.core.arrays import Int32Array


@dataclass(frozen=True)
class Buffer:
    """Host memory for the inputs and results of one pass. On a GPU it is pinned."""

    results: torch.Tensor  # int32: see DecodeLoop
    counts: Int32Array  # [rows] the same memory
    found: Int32Array | None  # [rows] the same memory: tokens drafted from text; None: only a head drafts
    tokens: Int32Array  # [rows, 1 + length of drafts] the same memory: sampled tokens
    nodes: Int32Array | None  # [rows, 1 + length of drafts] the same memory: their nodes; None: no tree
    features: torch.Tensor | None  # float32 [rows, width]
    logprobs: torch.Tensor  # float64 [rows, 1 + length of drafts, fields of verify/logprobs.py]
    host_drafts: torch.Tensor | None  # int32 [rows, 1 + most] optimistic drafts of the host, if it drafts
    drafted: torch.Tensor  # int32 [rows, rows of a request in a pass] the tokens of the rows: see DraftedRows
    pages: torch.Tensor  # int64 [changes] indices into the page table, then page numbers
    done: torch.cuda.Event | None  # None without a GPU, where work is synchronous
    has_drafted: torch.cuda.Event | None


def make_buffer(steps: DecodeLoop, gives_features: bool, gives_found: bool) -> Buffer:
    """A buffer for passes of this loop."""
    most, pinned = len(steps.output), steps.results.device.type == "cuda"

    def like(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(values.shape, dtype=values.dtype, pin_memory=pinned)

    results = like(steps.results)
    numbers = cast(Int32Array, results.numpy())
    rest = numbers[2 * most :].reshape(-1, *steps.output.shape)  # the tokens, after the nodes of a tree
    return Buffer(
        results,
        numbers[:most],
        numbers[most : 2 * most] if gives_found else None,
        rest[-1],
        rest[0] if len(rest) > 1 else None,
        like(steps.features) if gives_features and steps.features is not None else None,
        like(steps.logprobs[:, : steps.output.shape[1]]),
        None if steps.host_drafts is None else like(steps.host_drafts),
        torch.zeros((most, steps.nodes), dtype=torch.int32, pin_memory=pinned),
        torch.zeros(8 * most * steps.output.shape[1], dtype=torch.int64, pin_memory=pinned),
        torch.cuda.Event() if pinned else None,  # type: ignore[no-untyped-call]
        torch.cuda.Event() if pinned else None,  # type: ignore[no-untyped-call]
    )
