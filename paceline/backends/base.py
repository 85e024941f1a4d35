"""The contract between the engine and whatever runs a forward pass.

The engine speaks numpy and never sees a backend's own arrays. One ForwardBatch is a flat list of
rows; each request owns a contiguous range of them. The rows of a request form a tree whose root
is its last committed token's successor: a decode is one row, a draft is a tree, and a chain or a
prefill chunk is the degenerate tree in which each row's parent is the row before it.

    request      |------- A --------|-- B --|
    row           0   1   2   3   4   5   6
    parents      -1   0   1   1   3  -1   0      local to the request; -1: the committed context
    positions     9  10  11  11  12   4   5      context length + depth
    KV index      9  10  11  12  13   4   5      context length + local row (before commit)

Row r of a request writes its key and value at KV index `context_length + local row`; the page
table turns an index into a place. It attends to all committed indices and to its own ancestors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paceline.backends.ahead import AheadDecoder

Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


class KVPool(Protocol):
    """A backend's key and value storage for `num_pages` pages. Opaque to the engine."""

    @property
    def num_pages(self) -> int: ...

    @property
    def bytes_per_page(self) -> int: ...


@dataclass(frozen=True)
class Choices:
    """Rows whose logits stay where they are, because the backend chooses their tokens itself.

    The token behind a row is argmax(logits / temperature + gumbel) with the noise of its seed and of the
    position behind the row's, or the largest logit at temperature 0: the one that verify/sampling.py gives.
    """

    rows: Int32Array  # [choices] ascending
    seeds: UInt64Array  # [choices]
    temperatures: Float64Array  # [choices]


@dataclass(frozen=True)
class KeptFeatures:
    """Features that a head's pool keeps, at the places of their rows: they stay where the passes run."""

    pool: KVPool  # of the head
    layers: tuple[int, ...]  # that it reads, in this order


@dataclass(frozen=True)
class ForwardBatch:
    """Everything one forward pass needs."""

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
    choices: Choices | None = None  # only for a backend that chooses; none of its rows is among logit_rows
    kept: tuple[KeptFeatures, ...] = ()  # what heads' pools keep of the pass

    @property
    def num_requests(self) -> int:
        return len(self.context_lengths)

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ForwardOutput:
    """What one forward pass gives back. The arrays are valid until the backend's next pass."""

    logits: Float32Array  # [outputs, vocab]
    features: Float32Array | None = None  # [rows, len(feature_layers) * hidden], if asked
    chosen: Int32Array | None = None  # [choices] tokens, if asked; -1 where the logits give none


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes."""

    total: int
    free: int
    needed: int  # of the free, for buffers that are still to be made


class Backend(Protocol):
    """A loaded model that can run forward passes.

    A backend derives from this class. What has a body here need not be offered.
    """

    name: str
    page_size: int  # tokens per KV page
    max_rows: int  # most rows of one ForwardBatch
    batch_invariant: bool  # a token's logits depend, bit for bit, on its own prefix alone
    supports_features: bool
    chooses: bool = False  # it takes a batch's choices
    drafts_ahead: bool = False  # decode_ahead takes drafts
    keeps_ahead: bool = False  # decode_ahead takes top_k, top_p and min_p

    def make_pool(self, num_pages: int) -> KVPool:
        """Storage for `num_pages` pages of keys and values of this model."""
        ...

    def bytes_per_page(self) -> int: ...

    def forward(self, batch: ForwardBatch) -> ForwardOutput: ...

    def begin(self, batch: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Begin a pass; what is returned waits for it and gives its output, before the next one begins."""
        output = self.forward(batch)
        return lambda: output

    def device_memory(self, rows: int, longest: int) -> DeviceMemory | None:
        """The memory that pools are made in, if not the host's.

        Buffers are thought of for contexts of at most `longest` tokens, and passes ahead of so many rows.
        """
        return None

    def prepare(
        self,
        pool: KVPool,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
    ) -> None:
        """Have ready what the first passes over this pool, with contexts up to `longest`, would wait for.

        Nobody holds a page of the pool yet: what it holds afterwards is meaningless.
        """
        return  # not abstract

    def decode_ahead(
        self,
        pool: KVPool,
        slots: int,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
    ) -> AheadDecoder | None:
        """A decoder of requests of at most `longest` tokens in so many slots; None if there is no such.

        Passes that do not draft give the features of these layers, and leave to heads' pools what they keep.
        """
        return None

    def first_layers(self, count: int) -> Backend:
        """The same model without its later layers: the final norm and the head follow layer count - 1.

        It shares weights with this one, takes turns with it, and runs over this one's pools, of which
        it reads and writes its own layers only.
        """
        ...

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values from KV places to others (place = page * page_size + offset).

        A commit of an accepted path that is not already in place uses this. Sources are read
        before any destination is written.
        """
        ...


@dataclass(frozen=True)
class HeadBatch:
    """A pass of a learned draft head. What reads token j of a request lies at its KV index j.

    The slot at index j reads token j and the target's feature of token j - 1, and has position j - 1.
    So a page's content depends on the tokens up to its end and on nothing behind them. Index 0 has no
    slot: nothing is written there and no row sees it. `context_lengths` counts it, so they are at
    least 1, and `positions` are context length - 1 + depth.
    """

    rows: ForwardBatch
    states: Float32Array  # [rows, width] what the slots read beside their tokens; empty if `places` says it
    from_target: bool  # whether the states are the target's features side by side, or such as the head gave
    places: Int32Array | None = None  # [rows] where the pool keeps the target's features that the slots read


@dataclass(frozen=True)
class HeadOutput:
    """What a pass of a head gives back. The arrays are valid until its next pass."""

    logits: Float32Array  # [outputs, draft vocabulary]
    states: Float32Array  # [outputs, hidden] of the same rows: what their children read


@dataclass(frozen=True)
class ChainNoise:
    """The noise of the target's own choices, which guesses follow that are to meet them."""

    seeds: UInt64Array  # [requests]
    temperatures: Float64Array  # [requests] 0: the likeliest is guessed


@dataclass(frozen=True)
class HeadChains:
    """What a head guesses behind each request. The arrays are valid until its next pass."""

    tokens: Int32Array  # [requests, most] ids of the target; those behind a request's last are meaningless
    chances: Float32Array  # [requests, most] that the chain up to each is right, as the head sees it
    lengths: Int32Array  # [requests]


class HeadRunner(Protocol):
    """A loaded draft head that can run passes beside its target. Runners derive from this class."""

    page_size: int  # the target's
    max_rows: int
    least_chance: float  # of a chain of guesses that is worth its rows here, if nobody says another
    keeps_features: bool = False  # its pools keep the target's features: see KeptFeatures

    def make_pool(self, num_pages: int) -> KVPool:
        """Storage for `num_pages` pages of keys and values of the head."""
        ...

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy the features that a pool keeps from places to others, as the target's keys and values are.

        Guesses need not be: they are computed again when the target's features of them are known.
        """
        return  # not abstract

    def bytes_per_page(self) -> int: ...

    def prepare(self, pool: KVPool) -> None:
        """Have ready what the first passes over this pool would wait for. Nobody holds a page of it yet."""
        return  # not abstract

    def run(self, batch: HeadBatch) -> HeadOutput: ...

    def run_chains(
        self, batch: HeadBatch, most: Sequence[int], least_chance: float, noise: ChainNoise | None = None
    ) -> HeadChains:
        """Chains of at most so many guesses behind each request, as head_chains.py defines them.

        The logits of each request's last row are wanted, and its pages have room for the guesses.
        """
        ...


class MedusaRunner(Protocol):
    """Loaded Medusa heads."""

    least_chance: float  # as of a HeadRunner

    def run(self, states: Float32Array) -> Float32Array:
        """The guesses of all heads [heads, rows, draft vocabulary] for normed last states [rows, hidden]."""
        ...


def chain_parents(row_counts: Sequence[int]) -> Int32Array:
    """Parents of requests whose rows are chains of the given lengths."""
    return np.concatenate([np.arange(-1, count - 1, dtype=np.int32) for count in row_counts])


def first_slots(pool: KVPool, page_size: int, rows: int) -> HeadBatch:
    """A pass of a head over the first slots of a request, which read features that its pool keeps."""
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
    return HeadBatch(known, np.empty((0, 0), dtype=np.float32), True, places=count)
