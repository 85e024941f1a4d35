"""The contract between drafters and whatever runs a draft head beside its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from paceline.core.arrays import Float32Array, Float64Array, Int32Array, UInt64Array
from paceline.core.forward import ForwardBatch, KVPool


@dataclass(frozen=True)
class HeadBatch:
    """A pass of a learned draft head. The row that reads token j of a request has KV index j.

    It also reads the target's feature of token j - 1, and has position j - 1. So the content of a page
    depends only on tokens up to its end. KV index 0 has no row: nothing is written there and no row attends
    to it. `context_lengths` counts it, so they are at least 1; `positions` are context length - 1 + depth.
    """

    rows: ForwardBatch
    # [rows, width] what rows read besides tokens; with `slot_mapping` one row or none: the input of masks
    states: Float32Array
    from_target: bool  # True: states are the target's concatenated features; False: the head's own outputs
    # [rows] KV slot in the pool of the target's feature that a row reads; -1: the row is a mask
    slot_mapping: Int32Array | None = None


@dataclass(frozen=True)
class HeadOutput:
    """The output of a pass of a head. The arrays are valid until its next pass."""

    logits: Float32Array  # [outputs, draft vocabulary]
    states: Float32Array  # [outputs, hidden] of the same rows: the input of their children


@dataclass(frozen=True)
class ChainNoise:
    """The seeds and temperatures with which the target will sample, for coupled drafting."""

    seeds: UInt64Array  # [requests]
    temperatures: Float64Array  # [requests] 0: greedy


@dataclass(frozen=True)
class HeadChains:
    """A drafted chain for each request. The arrays are valid until the next pass of the head."""

    tokens: Int32Array  # [requests, most] the target's ids; undefined beyond `lengths`
    chances: Float32Array  # [requests, most] estimated chance that the chain up to here is accepted
    lengths: Int32Array  # [requests]


@dataclass(frozen=True)
class BlockGuesses:
    """The logits of block slots, and their confidences. The arrays are valid until the next pass."""

    logits: Float32Array  # [slots, draft vocabulary]
    confidences: Float32Array | None  # [slots] chance of acceptance; None: the head has no confidence head


class HeadStorage(Protocol):
    """The KV pools of a loaded draft head: what all kinds of head runners have in common."""

    page_size: int  # the target's
    max_rows: int  # of a pass
    least_chance: float  # default `min_prob`: chains less likely than this are not worth their rows here
    keeps_features: bool = False  # its pools store the target's features: see KeptFeatures
    catch_up_seconds: float | None = None  # per committed token, on the device; None: not measured

    def make_pool(self, num_pages: int) -> KVPool:
        """Storage for `num_pages` pages of keys and values of the head."""
        ...

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy the stored features between KV slots, as Backend.move copies the target's keys and values.

        The head's own keys and values of drafted tokens are not copied: they are computed again, from the
        target's features.
        """
        return  # not abstract

    def bytes_per_page(self) -> int: ...

    def replaced_by(self, other: Self) -> Self:
        """The runner that takes over, with the head of `other` and the pools of this runner.

        By default `other`. Where captured graphs hold the addresses of this runner's weights, this runner,
        with the weights of `other` copied in. ConfigError, before any change, if the heads do not fit.
        """
        return other

    def prepare(self, pool: KVPool) -> None:
        """Warm up for passes over this pool: compile and allocate. Call it before any page is in use."""
        return  # not abstract


class HeadRunner(HeadStorage, Protocol):
    """A loaded draft head that can run passes beside its target. Runners derive from this class."""

    def run(self, batch: HeadBatch) -> HeadOutput: ...

    def run_chains(
        self, batch: HeadBatch, most: Sequence[int], least_chance: float, noise: ChainNoise | None = None
    ) -> HeadChains:
        """A chain of at most `most` drafted tokens for each request, as head_chains.py defines it.

        The batch wants the logits of each request's last row, and its pages have room for the chain.
        """
        ...


class BlockRunner(HeadStorage, Protocol):
    """A loaded parallel head: one pass drafts a block of tokens. Runners derive from this class.

    KV index j has, in every layer of the head, keys and values computed from the target's feature of token j.
    The keys and values of a block's own slots are not kept after the pass.
    """

    def write_context(self, batch: HeadBatch) -> None:
        """Write the keys and values of committed tokens. Row j reads the feature of its own token."""
        ...

    def run_blocks(self, blocks: ForwardBatch) -> None:
        """Run one block per request: the anchor (its last token), then MASK tokens.

        `context_lengths` counts the tokens before the anchor; `write_context` has written all of them.
        """
        ...

    def guess(self, slots: Int32Array, previous: Int32Array) -> BlockGuesses:
        """The logits of rows of the last `run_blocks`, given the token before each (target ids)."""
        ...

    def run_chains(
        self, blocks: ForwardBatch, most: Sequence[int], least_chance: float, noise: ChainNoise
    ) -> HeadChains:
        """Run one block per request, and draft a chain from each: see block_chains.py."""
        ...


class MedusaRunner(Protocol):
    """Loaded Medusa heads."""

    least_chance: float  # as in HeadStorage

    def run(self, states: Float32Array) -> Float32Array:
        """Logits [heads, rows, draft vocabulary] for normed last hidden states [rows, hidden]."""
        ...


class AssistantRunner(Protocol):
    """A loaded assistant, which attends to the KV pool of its target and writes no keys or values."""

    def run(self, batch: ForwardBatch, states: Float32Array) -> HeadOutput:
        """Logits and states of all rows, given their input states: [rows, the target's hidden size].

        A row attends to the committed tokens of its request, not to other rows.
        """
        ...


def first_slots(pool: KVPool, page_size: int, rows: int) -> HeadBatch:
    """A warm-up pass of a head over a request's first `rows` KV indices, with features from its pool."""
    count = np.arange(rows, dtype=np.int32)
    known = ForwardBatch(
        tokens=np.zeros(rows, dtype=np.int32),
        positions=count,
        parents=count - 1,
        row_offsets=np.array([0, rows], dtype=np.int32),
        context_lengths=np.ones(1, dtype=np.int32),
        page_tables=np.arange(-(-(rows + 1) // page_size), dtype=np.int32)[None],
        logit_rows=count[:0],
        pool=pool,
    )
    return HeadBatch(known, np.empty((0, 0), dtype=np.float32), True, slot_mapping=count)
