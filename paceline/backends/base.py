"""The contract between the engine and whatever runs a forward pass.

The engine speaks numpy and never sees a backend's own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from paceline.core.arrays import Float32Array, Float64Array, Int32Array, UInt64Array
from paceline.core.forward import DeviceMemory, ForwardBatch, ForwardOutput, KeptFeatures, KVPool, StatePool

if TYPE_CHECKING:
    from paceline.backends.async_decoding import AsyncDecoder


NO_STATES = "a backend that declares no bytes_per_state has no states"


class Backend(Protocol):
    """A loaded model that can run forward passes.

    A backend derives from this class. What has a body here need not be offered.
    """

    name: str
    page_size: int  # tokens per KV page
    max_rows: int  # most rows of one ForwardBatch
    batch_invariant: bool  # a token's logits depend, bit for bit, on its own prefix alone
    supports_features: bool
    weight_format: str = "float32"  # of the linear layers, as a user names it: a quantization, or a dtype
    chooses: bool = False  # it takes a batch's choices
    drafts_on_device: bool = False  # make_async_decoder takes drafts
    adapters: Collection[str] = ()  # names of loaded LoRA adapters, which a batch may ask for
    attention_window: int | None = None  # last positions that rows attend to in any layer; None: all
    bytes_per_state: int = 0  # of the recurrent layers' states of one request; 0: no layer is recurrent
    spare_states: int = 0  # that `make_states` makes beside those it is asked for
    buffer_bytes: int = 0  # of buffers in the host's memory that no pass has touched yet

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

        Buffers are counted for contexts of `longest` tokens and device passes of `rows` rows, at most.
        """
        return None

    def compile_ahead(self, warm_up: Callable[[], object]) -> None:
        """Compile what this warm-up would compile, on all cores, where that is quicker; nothing runs."""
        return  # not abstract

    def prepare(
        self,
        pool: KVPool,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
    ) -> None:
        """Warm up for passes over this pool with contexts up to `longest`: compile and allocate.

        Call it before any page is in use: it overwrites the pool.
        """
        return  # not abstract

    def make_async_decoder(
        self,
        pool: KVPool,
        slots: int,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
        states: StatePool | None = None,
    ) -> AsyncDecoder | None:
        """A decoder with `slots` slots for requests of at most `longest` tokens; None if there is none.

        Passes that do not draft give the features of these layers, and leave to heads' pools what they keep.
        Passes advance the states of recurrent layers themselves, along the accepted tokens.
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

    def make_states(self, count: int) -> StatePool:
        """Storage for `count` states of this model's recurrent layers."""
        raise AssertionError(NO_STATES)

    def copy_state(self, states: StatePool, source: int, destination: int) -> None:
        """Give a slot the state of another one."""
        raise AssertionError(NO_STATES)

    def advance_state(
        self, states: StatePool, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        """Replace the state of a slot by that after the accepted rows of its request in the last pass.

        `rows` are local and ascending, a path below the committed tokens. `checkpoints`: a number of rows
        after which the state is stored in a further slot too.
        """
        raise AssertionError(NO_STATES)


@dataclass(frozen=True)
class HeadBatch:
    """A pass of a learned draft head. What reads token j of a request lies at its KV index j.

    The slot at index j reads token j and the target's feature of token j - 1, and has position j - 1.
    So a page's content depends on the tokens up to its end and on nothing behind them. Index 0 has no
    slot: nothing is written there and no row sees it. `context_lengths` counts it, so they are at
    least 1, and `positions` are context length - 1 + depth.
    """

    rows: ForwardBatch
    # [rows, width] what the slots read beside their tokens; with `places` at most one row, which masks read
    states: Float32Array
    from_target: bool  # whether the states are the target's features side by side, or such as the head gave
    # [rows] where the pool keeps the target's features that the slots read, -1: nowhere, the slot is a mask
    places: Int32Array | None = None


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


@dataclass(frozen=True)
class BlockGuesses:
    """What slots of blocks guess. The arrays are valid until the next pass."""

    logits: Float32Array  # [slots, draft vocabulary]
    confidences: Float32Array | None  # [slots] chance that the guess is accepted; None: the head has none


class HeadStorage(Protocol):
    """The pools of a loaded draft head, beside those of its target."""

    page_size: int  # the target's
    max_rows: int
    least_chance: float  # default: the least chance of a chain of guesses that is worth its rows here
    keeps_features: bool = False  # its pools keep the target's features: see KeptFeatures
    catch_up_seconds: float | None = None  # of one committed token, on the device; None: not measured

    def make_pool(self, num_pages: int) -> KVPool:
        """Storage for `num_pages` pages of keys and values of the head."""
        ...

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy the features that a pool keeps from places to others, as the target's keys and values are.

        Guesses need not be: they are computed again when the target's features of them are known.
        """
        return  # not abstract

    def bytes_per_page(self) -> int: ...

    def replaced_by(self, other: Self) -> Self:
        """The runner to use from now on for the head of `other`, over the pools of this runner.

        By default that is `other`. Where captured graphs hold the addresses of this runner's weights, it is
        this runner with the weights of `other`. ConfigError, and nothing has changed, if they do not fit.
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
        """Chains of at most `most` guesses after each request, as head_chains.py defines them.

        The logits of each request's last row are wanted, and its pages have room for the guesses.
        """
        ...


class BlockRunner(HeadStorage, Protocol):
    """A loaded parallel head: one pass guesses a block of tokens. Runners derive from this class.

    KV index j has the keys and values of token j, from the target's feature of that token, in every layer of
    the head. Those of a block's slots are not stored.
    """

    def write_context(self, batch: HeadBatch) -> None:
        """Write the keys and values of committed tokens. Row j reads the feature of its own token."""
        ...

    def run_blocks(self, blocks: ForwardBatch) -> None:
        """Run the blocks of requests: a request's rows are its anchor, its last token, and MASK tokens.

        `context_lengths` counts the tokens before the anchor; all of them are written.
        """
        ...

    def guess(self, slots: Int32Array, previous: Int32Array) -> BlockGuesses:
        """The guesses of rows of the last `run_blocks`, given the target's ids of the tokens before them."""
        ...

    def run_chains(
        self, blocks: ForwardBatch, most: Sequence[int], least_chance: float, noise: ChainNoise
    ) -> HeadChains:
        """Run the blocks of requests, and draft a chain from each: see block_chains.py."""
        ...


class MedusaRunner(Protocol):
    """Loaded Medusa heads."""

    least_chance: float  # as of a HeadRunner

    def run(self, states: Float32Array) -> Float32Array:
        """The guesses of all heads [heads, rows, draft vocabulary] for normed last states [rows, hidden]."""
        ...


class AssistantRunner(Protocol):
    """A loaded assistant, which reads the pool of its target and writes nothing."""

    def run(self, batch: ForwardBatch, states: Float32Array) -> HeadOutput:
        """Logits and states of all rows, given the states that they read: [rows, the target's hidden size].

        A row sees the committed tokens of its request, and no other row.
        """
        ...


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
