"""CudaAsyncDecoder: initializes slots, launches decode passes, and reads their tokens later.

There is one decode loop for each DeviceDraft (draft_loops.py). All loops share the state of the requests.
A pass by another loop than the last one, or over other slots, first writes its rows again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, DraftedRows, SlotInits
from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
from paceline.backends.cuda.decode.draft_loops import DraftLoops, Loop
from paceline.backends.cuda.decode.loop_timing import capture_and_time
from paceline.backends.cuda.decode.page_sender import PageSender
from paceline.backends.cuda.decode.slot_writer import SlotWriter
from paceline.backends.cuda.kernels.recurrent.types import StateTensors
from paceline.backends.cuda.passes.buffers import Buffer
from paceline.backends.cuda.passes.graphs import bucket
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.shared_prefix import find_shared_prefixes, uniform_rows
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.backends.torch.parallel.calls import made_on_all_ranks, on_all_ranks
from paceline.backends.torch.parallel.ranks import Ranks
from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.core.forward import KeptFeatures
from paceline.core.request import SamplingNeeds

logger = logging.getLogger(__name__)


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
        self._weights, self._page_size = weights, page_size
        has_windows = pool.windows is not None
        self._requests = make_requests(slots, longest, page_size, self.device, has_windows)
        self._writer = SlotWriter(self._requests, weights.config.vocab_size, weights.adapters)
        self._pages = PageSender(self._requests, pool, page_size)
        self._loops = DraftLoops(weights, pool, self._requests, page_size, feature_layers, kept, states)
        # [slots] upper bound of the computed tokens, and their number at `join`
        self._lengths, self._joined = np.zeros((2, slots), dtype=np.int32)
        self.supported_sampling = SamplingNeeds.TRUNCATION | SamplingNeeds.LOGPROBS | SamplingNeeds.TOKEN_MASK
        if self._writer.edits is not None:
            self.supported_sampling |= SamplingNeeds.LOGIT_EDITS
        self._known: set[DeviceDraft] = set()  # by the other ranks
        # of the last pass, if the next one over the same slots can reuse its rows
        self._last: Loop | None = None
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
            self._loops.get(draft)
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
        self._pages.forget(requests.slots)
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
        slot_list, rows, loop = list(slots), bucket(len(slots)), self._loops.get(draft)
        steps, buffer = loop.steps, loop.buffers[0]
        if buffer.done is not None:
            buffer.done.synchronize()  # the buffer's last pass may not have been read
        index = np.array(slot_list)
        unread = sum(own.tokens.shape[1] for own, _, _ in self._unread)
        self._pages.send(index, page_tables, self._lengths[index], unread, steps.nodes, buffer.pages)
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
        pages = self._pages.pages
        begins = (slots * pages.shape[1]).astype(np.int32)
        pass_rows = uniform_rows(pages[slots], begins, self._joined[slots], steps.nodes)
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
        loop, needs = self._loops.get(draft), int(self.supported_sampling)
        seconds = capture_and_time(loop, self._pages, self._page_size, needs, self._writer.edits)
        self._last = None
        return seconds
