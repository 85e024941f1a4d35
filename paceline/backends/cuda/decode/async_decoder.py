"""CudaAsyncDecoder: initializes slots, launches decode passes, and reads their tokens later.

There is one decode loop for each DeviceDraft (drafter and length). All loops share the state of the requests.
A pass by another loop than the last one, or over other slots, first writes its rows again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, DraftedRows, SlotInits
from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
from paceline.backends.cuda.decode.draft_networks import DraftNetwork, ModelNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape, chain_shape, tree_shape
from paceline.backends.cuda.decode.slot_writer import SlotWriter
from paceline.backends.cuda.heads.head import HeadPool
from paceline.backends.cuda.kernels.recurrent.types import StateTensors
from paceline.backends.cuda.passes.buffers import Buffer, make_buffer
from paceline.backends.cuda.passes.graphs import bucket, buckets, device_seconds
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.shared_prefix import find_shared_prefixes, no_shared_prefix, uniform_rows
from paceline.backends.cuda.passes.tables import to_device
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.backends.torch.parallel.calls import made_on_all_ranks, on_all_ranks
from paceline.backends.torch.parallel.ranks import Ranks
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import KeptFeatures, WindowGroup
from paceline.core.request import SamplingNeeds

Int64Array = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

BUFFERS = 4  # result buffers per loop: more than passes in flight, so no result is overwritten unread
TIMED_CONTEXT = 256  # tokens of each request in timed passes: typical of a chat


@dataclass(frozen=True)
class Loop:
    """The decode loop of one DeviceDraft, with its result buffers."""

    steps: DecodeLoop
    buffers: deque[Buffer]  # the next one first
    most: int  # most requests of a pass
    width: int  # most new tokens of a request in a pass


@dataclass(frozen=True)
class WaitingPass:
    """The pass that waits for token masks."""

    loop: Loop
    buffer: Buffer
    slots: Int64Array
    rows: int  # with padding
    needs: int


class CudaAsyncDecoder:
    """Implements AsyncDecoder with one DecodeLoop per draft."""

    supports_lookup = True

    def __init__(
        self,
        weights: Weights,
        pool: Pool,
        slots: int,
        longest: int,
        page_size: int,
        feature_layers: tuple[int, ...] = (),
        kept: tuple[KeptFeatures, ...] = (),
        ranks: Ranks | None = None,
        states: StateTensors | None = None,
    ) -> None:
        """Passes without a draft return the features of these layers, or store them in a head's pool."""
        self.device, self.ranks = weights.device, ranks
        self._weights, self._pool, self._longest, self._page_size = weights, pool, longest, page_size
        self._feature_layers, self._kept, self._states = feature_layers, kept, states
        self._rows = bucket(slots)
        has_windows = pool.windows is not None
        self._requests = make_requests(slots, longest, page_size, self.device, has_windows)
        self._writer = SlotWriter(self._requests, weights.config.vocab_size, weights.adapters)
        # copies of the device's tables
        self._pages, self._window_pages = np.zeros((2, *self._requests.pages.shape), dtype=np.int32)
        # [slots] upper bound of the computed tokens, and their number at `join`
        self._lengths, self._joined = np.zeros((2, slots), dtype=np.int32)
        self.supported_sampling = SamplingNeeds.TRUNCATION | SamplingNeeds.LOGPROBS | SamplingNeeds.TOKEN_MASK
        if self._writer.edits is not None:
            self.supported_sampling |= SamplingNeeds.LOGIT_EDITS
        self._loops: dict[DeviceDraft | None, Loop] = {}
        self._raw_logits = torch.empty((0, weights.config.vocab_size), device=self.device)  # see DecodeLoop
        self._known: set[DeviceDraft] = set()  # by the other ranks
        self._last: Loop | None = (
            None  # of the last pass, if the next one over the same slots can reuse its rows
        )
        self._slots: list[int] = []  # of the last pass
        self._waiting: WaitingPass | None = None
        self._unread: deque[tuple[Buffer, Int64Array, int]] = deque()  # with slots and SamplingNeeds

    def has_room(self, draft: DeviceDraft) -> bool:
        """Whether the buffers of this draft's passes fit the memory. Makes them."""
        self._make_known(draft)
        return self._has_room(draft)

    @on_all_ranks
    @torch.inference_mode()
    def _has_room(self, draft: DeviceDraft) -> bool:
        try:
            self._loop(draft)
        except torch.OutOfMemoryError as error:
            logger.warning("passes do not draft %d tokens for each request: %s", draft.length, error)
            return False
        return True

    @on_all_ranks
    @torch.inference_mode()
    def join(self, requests: SlotInits) -> None:
        """Initialize slots, or overwrite the state of slots in use."""
        self._writer.write(requests)
        self._lengths[requests.slots] = self._joined[requests.slots] = requests.lengths
        if self._pool.windows is not None:  # an entry with an equal page may have had another window page
            self._pages[requests.slots] = -1
        self._last = None

    @on_all_ranks
    @torch.inference_mode()
    def write_texts(self, slots: Sequence[int], texts: Sequence[Int32Array]) -> None:
        """Write the known tokens of requests that have joined to their slots."""
        self._writer.write_texts(slots, texts)

    def launch(
        self,
        slots: Sequence[int],
        page_tables: Int32Array,
        draft: DeviceDraft | None,
        host_drafts: Int32Array | None = None,
    ) -> None:
        """Launch a pass over the requests in these slots."""
        self._make_known(draft)
        self._launch(slots, page_tables, draft, host_drafts)

    def _make_known(self, draft: DeviceDraft | None) -> None:
        """Send this draft to the other ranks once: they look up decode loops by the draft's identity."""
        if draft is not None and draft not in self._known:
            self._known.add(draft)
            self._same(draft)

    @made_on_all_ranks
    def _same(self, draft: DeviceDraft) -> DeviceDraft:
        return draft

    @on_all_ranks
    @torch.inference_mode()
    def _launch(
        self,
        slots: Sequence[int],
        page_tables: Int32Array,
        draft: DeviceDraft | None,
        host_drafts: Int32Array | None,
    ) -> None:
        assert self._waiting is None, "a pass waits for token masks"
        slot_list, rows, loop = list(slots), bucket(len(slots)), self._loop(draft)
        steps, buffer = loop.steps, loop.buffers[0]
        if buffer.done is not None:
            buffer.done.synchronize()  # the buffer's last pass may not have been read
        index = np.array(slot_list)
        self._send_pages(index, page_tables, buffer, steps.nodes)
        if slot_list != self._slots or loop is not self._last:
            steps.begin(slot_list, rows)
            self._use_shared_prefix(steps, index)
            self._slots, self._last = slot_list, loop
        if host_drafts is not None:
            assert buffer.host_drafts is not None
            assert steps.host_drafts is not None
            buffer.host_drafts.numpy()[: len(slot_list)] = host_drafts  # rows after them are padding
            steps.host_drafts[:rows].copy_(buffer.host_drafts[:rows], non_blocking=True)
        needs = int(np.bitwise_or.reduce(self._writer.needs[index]))
        has_adapters = bool(self._writer.has_adapter[index].any())
        if needs & SamplingNeeds.TOKEN_MASK:
            steps.start_draft(rows)
            if steps.nodes > 1:
                buffer.drafted[:rows].copy_(steps.drafted(rows), non_blocking=True)
                if buffer.has_drafted is not None:
                    buffer.has_drafted.record()
            steps.start_logits(rows, has_adapters)
            self._waiting = WaitingPass(loop, buffer, index, rows, needs)
        else:
            steps.step(rows, needs, self._writer.edits, has_adapters)
            self._copy_results(loop, buffer, rows, needs)
        self._lengths[index] += loop.width
        loop.buffers.rotate(-1)
        self._unread.append((buffer, index, needs))

    def drafted(self) -> DraftedRows:
        """The rows of the pass that waits for token masks."""
        assert self._waiting is not None, "no pass waits for token masks"
        buffer, parents = self._waiting.buffer, self._waiting.loop.steps.parents
        if buffer.has_drafted is not None:
            buffer.has_drafted.synchronize()
        return DraftedRows(cast(Int32Array, buffer.drafted[: len(self._waiting.slots)].numpy()), parents)

    @on_all_ranks
    @torch.inference_mode()
    def send_masks(self, rows: Int32Array, masks: Sequence[Int32Array]) -> None:
        """Let the waiting pass sample with these masks."""
        assert self._waiting is not None, "no pass waits for token masks"
        waiting, self._waiting = self._waiting, None
        steps = waiting.loop.steps
        steps.masks.send(waiting.rows * steps.nodes, rows, masks)
        steps.finish(waiting.rows, waiting.needs, self._writer.edits)
        self._copy_results(waiting.loop, waiting.buffer, waiting.rows, waiting.needs)

    def _copy_results(self, loop: Loop, buffer: Buffer, rows: int, needs: int) -> None:
        """Copy what a pass gives to the host, behind the pass."""
        steps = loop.steps
        used = len(steps.results) - (loop.most - rows) * loop.width
        buffer.results[:used].copy_(steps.results[:used], non_blocking=True)
        if buffer.features is not None:
            assert steps.features is not None
            buffer.features[:rows].copy_(steps.features[:rows], non_blocking=True)
        if needs & SamplingNeeds.LOGPROBS:
            buffer.logprobs[:rows].copy_(steps.path_logprobs(rows), non_blocking=True)
        if buffer.done is not None:
            buffer.done.record()

    def _use_shared_prefix(self, steps: DecodeLoop, slots: Int64Array) -> None:
        """Find shared prefixes of these slots, for shared-prefix attention; not with latents."""
        if self._weights.config.latent is not None:
            return
        begins = (slots * self._pages.shape[1]).astype(np.int32)
        pass_rows = uniform_rows(self._pages[slots], begins, self._joined[slots], steps.nodes)
        steps.use_shared_prefix(find_shared_prefixes(pass_rows, self._page_size, *self._weights.head_groups))

    @on_all_ranks
    def read(self) -> DecodeOutput:
        """The result of the oldest unread pass. Waits for it."""
        buffer, slots, needs = self._unread.popleft()
        if buffer.done is not None:
            buffer.done.synchronize()
        count = len(slots)
        counts = buffer.counts[:count]
        self._lengths[slots] -= buffer.tokens.shape[1] - counts
        features = None if buffer.features is None else cast(Float32Array, buffer.features[:count].numpy())
        found = None if buffer.found is None else buffer.found[:count]
        logprobs = buffer.logprobs[:count].numpy() if needs & SamplingNeeds.LOGPROBS else None
        nodes = None if buffer.nodes is None else buffer.nodes[:count]
        return DecodeOutput(buffer.tokens[:count], counts, features, found, logprobs, nodes)

    @on_all_ranks
    def skip(self) -> None:
        """Discard the oldest unread pass."""
        self._unread.popleft()

    @on_all_ranks
    def drop(self) -> None:
        """Discard all unread passes."""
        self._unread.clear()
        if self._waiting is not None:  # its rows are those of the next step still
            self._waiting = self._last = None

    def prepare(self, draft: DeviceDraft | None) -> dict[int, float]:
        """Capture a graph for every bucket, and time its passes on a GPU. No slot may be in use."""
        self._make_known(draft)
        return self._prepare(draft)

    @on_all_ranks
    @torch.inference_mode()
    def _prepare(self, draft: DeviceDraft | None) -> dict[int, float]:
        self._writer.prepare()
        loop, seconds = self._loop(draft), {}
        steps = loop.steps
        for rows in buckets(loop.most):
            steps.begin([], rows)
            steps.step(rows)
            if self._weights.adapters:
                steps.step(rows, has_adapters=True)
            steps.begin(self._fill_slots(rows), rows)
            if (measured := device_seconds(self.device, partial(steps.step, rows))) is not None:
                seconds[rows] = measured
        steps.begin([], rows)
        needs = int(self.supported_sampling)
        steps.start_draft(rows)
        steps.start_logits(rows)
        steps.finish(rows, needs, self._writer.edits)  # compiles kernels for all sizes
        steps.use_shared_prefix(no_shared_prefix(rows))
        steps.step(rows)  # compiles; other sizes are captured when first needed
        self._last = None
        return seconds

    def _fill_slots(self, count: int) -> list[int]:
        """Fill up to `count` slots with dummy requests of TIMED_CONTEXT tokens, to time passes; their slots.

        They have separate pages, if there are enough. They reject all drafts, so that all drafts are timed
        over the same context. Requests that join later overwrite them."""
        state, slots = self._requests, min(count, len(self._lengths))
        context = min(TIMED_CONTEXT, self._longest // 2)
        state.lengths.fill_(context)
        state.limits.fill_(self._longest)
        state.most_drafted.fill_(0)
        each = -(-2 * context // self._page_size)  # pages, with room for the tokens that passes add
        pages = np.arange(slots * each, dtype=np.int32).reshape(slots, each) % self._pool.num_pages
        self._pages[:slots, :each] = pages
        state.pages[:slots, :each] = torch.from_numpy(pages).to(self.device)
        if self._pool.windows is not None and state.window_pages is not None:
            own = torch.from_numpy(pages % self._pool.windows.num_pages).to(self.device)
            state.window_pages[:slots, :each] = own
        return list(range(slots))

    def _loop(self, draft: DeviceDraft | None) -> Loop:
        """The loop of this draft, created when first needed."""
        if draft in self._loops:
            return self._loops[draft]
        network: DraftNetwork | None = None
        keeps, layers = None, self._feature_layers
        shape, most = _shape_of(draft), self._rows
        if draft is not None and draft.max_requests is not None:
            most = min(most, bucket(draft.max_requests))
        limits = (shape, most, self._longest, self._page_size)
        if draft is not None and draft.model is not None:
            pool, size = cast(Pool, draft.pool), self._weights.config.vocab_size
            network = ModelNetwork(cast(Any, draft.model).weights, pool, *limits, size)
        if draft is not None and draft.runner is not None:
            keeps, layers = cast(HeadPool, draft.pool), draft.feature_layers
            network = cast(Any, draft.runner).network(keeps, layers, *limits)
        elif self._kept:
            keeps, layers = cast(HeadPool, self._kept[0].pool), self._kept[0].layers
        if len(self._raw_logits) < most * len(shape):
            self._raw_logits = self._raw_logits.new_empty((most * len(shape), self._raw_logits.shape[1]))
        steps = DecodeLoop(
            self._weights,
            self._pool,
            self._requests,
            most,
            self._page_size,
            network,
            given=shape,
            feature_layers=layers,
            kept=keeps,
            look_up=None if draft is None else draft.look_up,
            host_drafts=0 if draft is None else draft.host_tokens,
            draft_levels=None if draft is None else draft.network_length,
            states=self._states,
            raw_logits=self._raw_logits,
        )
        gives_found = draft is not None and draft.reads_texts
        buffers = deque(
            make_buffer(steps, gives_features=keeps is None, gives_found=gives_found) for _ in range(BUFFERS)
        )
        self._loops[draft] = Loop(steps, buffers, most, steps.output.shape[1])
        return self._loops[draft]

    def _send_pages(self, slots: Int64Array, page_tables: Int32Array, buffer: Buffer, nodes: int) -> None:
        """Send the page-table entries of these slots that have changed to the device.

        `nodes`: rows of each request in the pass.
        """
        reach = 2 * nodes  # KV indices that this pass and the next can write
        if self._pool.windows is not None:
            self._forget_given_again(slots, page_tables, reach, self._pool.windows)
        used = (int(self._lengths[slots].max()) + reach) // self._page_size + 1
        wanted = page_tables[slots, :used]
        lines, columns = np.nonzero(wanted != self._pages[slots, :used])
        if not len(lines):
            return
        values = wanted[lines, columns]
        slots_of = slots[lines]
        self._pages[slots_of, columns] = values
        indices = slots_of * self._pages.shape[1] + columns
        values = np.maximum(values, 0)  # -1 is never read
        parts, windows = [indices, values], self._pool.windows
        if windows is not None:
            parts.append(windows.table[values])
            self._window_pages[slots_of, columns] = parts[-1]
        changes = np.concatenate(parts)
        if len(changes) <= len(buffer.pages):
            buffer.pages[: len(changes)] = torch.from_numpy(changes)
            there = buffer.pages[: len(changes)].to(self.device, non_blocking=True)
        else:  # too many for the pinned buffer
            there = to_device(changes, self.device)
        where, *numbers = there.view(len(parts), -1)
        for tables, own in zip((self._requests.pages, self._requests.window_pages), numbers, strict=False):
            assert tables is not None
            tables.view(-1)[where] = own.int()

    def _forget_given_again(
        self, slots: Int64Array, page_tables: Int32Array, reach: int, windows: WindowGroup
    ) -> None:
        """Mark pages that were released and taken again as unsent: they may have other window pages now.

        A commit releases pages after the computed tokens only, those that a rejected draft had.
        """
        unread = sum(buffer.tokens.shape[1] for buffer, _, _ in self._unread)
        first = np.maximum(self._lengths[slots] - unread, 0) // self._page_size
        count = (unread + reach) // self._page_size + 2
        columns = np.minimum(first[:, None] + np.arange(count), self._pages.shape[1] - 1)
        own = windows.table[np.maximum(page_tables[slots[:, None], columns], 0)]
        lines, numbers = np.nonzero(own != self._window_pages[slots[:, None], columns])
        self._pages[slots[lines], columns[lines, numbers]] = -1


def _shape_of(draft: DeviceDraft | None) -> DraftShape:
    """The rows of a request in a pass with this draft."""
    if draft is None or draft.branching == 1:
        return chain_shape(0 if draft is None else draft.length)
    return tree_shape(1 + draft.nodes, draft.branching, draft.length)
