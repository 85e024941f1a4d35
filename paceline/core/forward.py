"""One forward pass as data: its inputs and its outputs.

A ForwardBatch is a flat list of rows, one per token; each request has a contiguous range of them. The rows of
a request form a tree below its committed tokens: a decode is one row, a draft is a tree, and a chain or a
prefill chunk is a tree in which each row's parent is the row before it.

    request      |------- A --------|-- B --|
    row           0   1   2   3   4   5   6
    parents      -1   0   1   1   3  -1   0      local to the request; -1: the committed context
    positions     9  10  11  11  12   4   5      context length + depth
    KV index      9  10  11  12  13   4   5      context length + local row (before commit)

Row r of a request writes its key and value at KV index `context_length + local row`; the page table maps an
index to a KV slot. It attends to all committed indices, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from paceline.core.arrays import Float32Array, Float64Array, Int32Array, UInt64Array


class KVPool(Protocol):
    """A backend's key and value storage for `num_pages` pages. Opaque to the engine."""

    @property
    def num_pages(self) -> int: ...

    @property
    def bytes_per_page(self) -> int: ...


@dataclass(frozen=True)
class WindowGroup:
    """The KV cache group of layers with a sliding window, beside layers that read all positions.

    Their keys and values are in pages of their own: see kv/window_pages.py. `table` changes between passes.
    """

    num_pages: int  # window pages, the null page 0 included
    table: Int32Array  # [pages] the window page of each page; 0: none


class StatePool(Protocol):
    """A backend's storage for the states of recurrent layers, addressed by slot. Opaque to the engine."""

    @property
    def num_states(self) -> int: ...


@dataclass(frozen=True)
class RequestStates:
    """The states of recurrent layers after the committed tokens of each request, by slot.

    A pass only reads them: `Backend.advance_state` changes them once the accepted path is known.
    """

    pool: StatePool
    slots: Int32Array  # [requests] not read for requests without committed tokens


@dataclass(frozen=True)
class Choices:
    """Rows whose next token the backend samples itself, so that their logits stay on the device.

    The token is argmax(logits / temperature + gumbel), with the noise of the row's seed and of the position
    after the row's, or the largest logit at temperature 0: the token that verify/sampling.py gives.
    """

    rows: Int32Array  # [choices] ascending
    seeds: UInt64Array  # [choices]
    temperatures: Float64Array  # [choices]


@dataclass(frozen=True)
class KeptFeatures:
    """Features that a pass writes to a head's pool, at their rows' KV slots: they stay on the device."""

    pool: KVPool  # the head's
    layers: tuple[int, ...]  # the layers that it reads, in this order


@dataclass  # not frozen: there is one for every pass; no slots: some properties are cached
class ForwardBatch:
    """The inputs of one forward pass. Immutable by convention."""

    tokens: Int32Array  # [rows]
    positions: Int32Array  # [rows]
    parents: Int32Array  # [rows] local index of the parent row, -1 for the committed context
    row_offsets: Int32Array  # [requests + 1] rows of request i are row_offsets[i]:row_offsets[i + 1]
    context_lengths: Int32Array  # [requests] committed tokens before these rows
    page_tables: Int32Array  # [requests, max pages] page numbers; unused entries are -1
    logit_rows: Int32Array  # [outputs] ascending rows whose logits are wanted
    pool: KVPool
    # hidden_states indices to return: 0 is the embedding, i is after layer i - 1
    feature_layers: tuple[int, ...] = ()
    choices: Choices | None = None  # only for a backend that samples; none of its rows is among logit_rows
    kept_features: tuple[KeptFeatures, ...] = ()  # features to write to heads' pools
    # for a model with recurrent layers; None: all requests begin with their first token
    states: RequestStates | None = None
    adapters: tuple[str, ...] = ()  # [requests] names of backend.adapters, "" for none; (): none at all

    @property
    def num_requests(self) -> int:
        return len(self.context_lengths)

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @cached_property
    def row_requests(self) -> Int32Array:
        """The request of each row: [rows]."""
        return np.repeat(np.arange(self.num_requests, dtype=np.int32), np.diff(self.row_offsets))

    @cached_property
    def kv_indices(self) -> Int32Array:
        """The KV index of each row in its request, which is its position unless it is in a tree: [rows]."""
        before = self.context_lengths - self.row_offsets[:-1]  # of each request: what its rows are moved by
        return np.arange(self.num_rows, dtype=np.int32) + before[self.row_requests]


@dataclass(frozen=True)
class ForwardOutput:
    """The outputs of one forward pass. The arrays are valid until the backend's next pass."""

    logits: Float32Array  # [outputs, vocab]
    features: Float32Array | None = None  # [rows, len(feature_layers) * hidden], if asked
    chosen: Int32Array | None = None  # [choices] sampled tokens, if asked; -1: the logits are unusable


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes."""

    total: int
    free: int
    needed: int  # of the free bytes: for buffers that are not allocated yet


def window_slots(windows: WindowGroup, slots: Int32Array, page_size: int) -> Int32Array:
    """The KV slots in the window group of these KV slots."""
    moved: Int32Array = windows.table[slots // page_size] * page_size + slots % page_size
    return moved


def chain_parents(row_counts: Sequence[int]) -> Int32Array:
    """The parents of rows that are chains of the given lengths, one per request."""
    return np.concatenate([np.arange(-1, count - 1, dtype=np.int32) for count in row_counts])


def chain_batch(pool: KVPool, parts: Sequence[tuple[Int32Array, int, int]], pages: int) -> ForwardBatch:
    """A pass over chains, each given as its tokens, the number of tokens before them, and its request number.

    Request n has the `pages` pages from n * pages on. Every row has logits.
    """
    counts = [len(tokens) for tokens, _, _ in parts]
    return ForwardBatch(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int32),
        positions=np.concatenate([before + np.arange(len(t)) for t, before, _ in parts]).astype(np.int32),
        parents=chain_parents(counts),
        row_offsets=np.cumsum([0, *counts]).astype(np.int32),
        context_lengths=np.array([before for _, before, _ in parts], dtype=np.int32),
        page_tables=np.array([number * pages + np.arange(pages) for _, _, number in parts], dtype=np.int32),
        logit_rows=np.arange(sum(counts), dtype=np.int32),
        pool=pool,
    )
