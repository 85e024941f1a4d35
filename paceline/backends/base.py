"""The protocols of backends and head runners: what the engine calls to run a forward pass.

Arguments and results are numpy arrays; the engine never sees a backend's own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from paceline.backends.async_decoding import AsyncDecoder
from paceline.core.arrays import Int32Array
from paceline.core.forward import (
    DeviceMemory,
    ForwardBatch,
    ForwardOutput,
    KeptFeatures,
    KVPool,
    StatePool,
    WindowGroup,
)

NO_STATES = "a backend that declares no bytes_per_state has no states"


class Backend(Protocol):
    """A loaded model that can run forward passes.

    A backend derives from this class. Methods that have a body here are optional.
    """

    name: str
    page_size: int  # tokens per KV page
    max_rows: int  # most rows of one ForwardBatch
    batch_invariant: bool  # a token's logits depend, bit for bit, on its own prefix alone
    supports_features: bool
    weight_format: str = "float32"  # of the linear layers, under the user's name: a quantization or a dtype
    chooses: bool = False  # samples tokens itself: it takes ForwardBatch.choices
    drafts_on_device: bool = False  # its AsyncDecoder takes drafts
    adapters: Collection[str] = ()  # names of the loaded LoRA adapters
    attention_window: int | None = None  # positions, the largest window of any layer; None: unlimited
    # positions, the largest window of the layers that it can keep in a KV cache group of their own, because
    # other layers have none; None: all layers have the same pages
    window_group: int | None = None
    bytes_per_state: int = 0  # recurrent state of one request, all layers; 0: no layer is recurrent
    spare_states: int = 0  # states that `make_states` adds to the requested number
    buffer_bytes: int = 0  # host memory of buffers that is only taken when a pass first writes to them

    def make_pool(self, num_pages: int) -> KVPool:
        """Storage for `num_pages` pages of keys and values of this model."""
        ...

    def make_grouped_pool(self, num_pages: int, windows: WindowGroup) -> KVPool:
        """A pool in which the layers of the window group have their keys and values in window pages."""
        raise AssertionError("a backend that declares no window_group has one group")

    def bytes_per_page(self) -> int: ...

    def bytes_per_window_page(self) -> int:
        """Of the bytes of a page, those of the layers in the window group."""
        return 0

    def forward(self, batch: ForwardBatch) -> ForwardOutput: ...

    def begin(self, batch: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Launch a pass. The returned function waits for its output.

        It is called before the next launch, unless the backend has an AsyncDecoder and no recurrent layers:
        then another pass may be launched first, so the output must be a copy.
        """
        output = self.forward(batch)
        return lambda: output

    def device_memory(self, rows: int, longest: int) -> DeviceMemory | None:
        """The device memory in which pools are allocated; None: host memory.

        It counts buffers for contexts of up to `longest` tokens, and for passes of the asynchronous decoder
        of up to `rows` rows.
        """
        return None

    def compile_ahead(self, warm_up: Callable[[], object]) -> None:
        """Compile in parallel the kernels that this warm-up launches, without running them."""
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
        """A decoder with `slots` slots for requests of at most `longest` tokens; None if not supported.

        Passes without a draft return the features of these layers, and write the `kept` features to heads'
        pools. Every pass advances the recurrent states along its accepted tokens.
        """
        return None

    def first_layers(self, count: int) -> Backend:
        """The model's first `count` layers, followed by its final norm and LM head (self-speculation).

        It shares this backend's weights and pools, of which it uses its layers only. Passes of the two must
        not overlap.
        """
        ...

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values between KV slots (slot = page * page_size + offset).

        Commits an accepted path whose slots are not contiguous. All sources are read before any destination
        is written.
        """
        ...

    def make_states(self, count: int) -> StatePool:
        """Storage for `count` states of this model's recurrent layers."""
        raise AssertionError(NO_STATES)

    def copy_state(self, states: StatePool, source: int, destination: int) -> None:
        """Copy the state of one slot to another."""
        raise AssertionError(NO_STATES)

    def advance_state(
        self, states: StatePool, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        """Advance a slot's state along the accepted rows of its request in the last pass.

        `rows`: the request's local row numbers, ascending, a path that starts after the committed tokens.
        `checkpoints` {number of rows: slot}: also store the state after that number of rows in the slot.
        """
        raise AssertionError(NO_STATES)
