"""SlotWriter: writes the state of requests that join to their slots on the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from paceline.backends.async_decoding import SlotInits
from paceline.backends.cuda.kernels.sampling.logit_edits import EditState, make_edit_state
from paceline.backends.cuda.kernels.step_rows import DeviceRequests
from paceline.backends.cuda.passes.graphs import Graphs, bucket, buckets
from paceline.backends.cuda.passes.tables import to_device
from paceline.core.arrays import Int32Array, Int64Array
from paceline.core.request import SamplingNeeds
from paceline.core.truncation import KEEPS_ALL, NUM_FIELDS

logger = logging.getLogger(__name__)

NUMBERS = 11  # values of a slot before its truncation options


class SlotWriter:
    """Writes requests to slots: one copy to the device, then one graph that scatters the values."""

    def __init__(self, state: DeviceRequests, vocab_size: int, adapters: Mapping[str, int]) -> None:
        """`adapters` are the numbers of adapters by name."""
        slots, self._device = len(state.lengths), state.lengths.device
        self._state, self._rows, self._adapters = state, bucket(slots), adapters
        # int64 [values of a slot, requests]
        self._staged = torch.zeros((NUMBERS + NUM_FIELDS, self._rows), dtype=torch.int64, device=self._device)
        self._graphs = Graphs(self._device)
        self.needs = np.zeros(slots, dtype=np.int64)  # [slots] SamplingNeeds
        self.has_adapter = np.zeros(slots, dtype=np.bool_)  # [slots]
        self.edits = _edit_state(slots, vocab_size, self._device)  # None: the host edits logits

    def write(self, requests: SlotInits) -> None:
        """Initialize slots, or overwrite the state of slots in use."""
        adapters = [self._adapters[name] if name else -1 for name in requests.adapters]
        staged = np.stack(
            (
                requests.slots.astype(np.int64),
                requests.lengths,
                requests.limits,
                requests.tokens[:, 0],
                requests.tokens[:, 1],
                requests.seeds.view(np.int64),
                requests.temperatures.view(np.int64),
                requests.most_drafted,
                requests.logprobs,
                [edits is not None for edits in requests.edits],
                adapters,
                *requests.truncation.T.copy().view(np.int64),
            )
        )
        count = bucket(len(requests.slots))
        staged = staged[:, np.arange(count) % len(requests.slots)]  # duplicates are harmless
        self._staged[:, :count].copy_(to_device(staged, self._device))
        self._graphs.run(count, lambda: self._init_slots(count))
        self._init_edits(requests)
        self.needs[requests.slots] = _sampling_needs(requests)
        self.has_adapter[requests.slots] = np.array(adapters) >= 0

    def write_texts(self, slots: Sequence[int], texts: Sequence[Int32Array]) -> None:
        """Write the first tokens of these slots: one copy for all. Tokens after them stay."""
        tokens = self._state.tokens
        places = [
            slot * tokens.shape[1] + np.arange(len(text)) for slot, text in zip(slots, texts, strict=True)
        ]
        values = to_device(np.concatenate((*places, *texts)), self._device)
        count = len(values) // 2
        tokens.view(-1)[values[:count]] = values[count:].int()

    def prepare(self) -> None:
        """Capture a graph for every bucket. No slot may be in use."""
        for count in buckets(self._rows):
            self._graphs.run(count, partial(self._init_slots, count))

    def _init_slots(self, count: int) -> None:
        """Write the staged values of `count` requests to the device state."""
        state = self._state
        numbers, options = self._staged[:NUMBERS, :count], self._staged[NUMBERS:, :count]
        slots, lengths, limits, before, last, seeds, temperatures, takes, asks, edited, adapters = numbers
        state.lengths[slots] = lengths.int()
        state.limits[slots] = limits.int()
        state.tokens[slots, (lengths - 1).clamp(min=0)] = before.int()
        state.tokens[slots, lengths] = last.int()
        state.seeds[slots] = seeds
        state.temperatures[slots] = temperatures.view(torch.float64)
        state.most_drafted[slots] = takes.int()
        state.asks_logprobs[slots] = asks.int()
        state.adapters[slots] = adapters.int()
        state.truncation[slots] = options.T.contiguous().view(torch.float64)
        if self.edits is not None:
            self.edits.is_active[slots] = edited.int()

    def _init_edits(self, requests: SlotInits) -> None:
        """Write the logit edits of the requests that have some to their slots."""
        for slot, edits in zip(requests.slots.tolist(), requests.edits, strict=True):
            if edits is not None:
                assert self.edits is not None, "not declared as supported"
                self.edits.init_slot(slot, edits)


def _edit_state(slots: int, vocab_size: int, device: torch.device) -> EditState | None:
    """State for logit edits, 8 bytes per slot and token id; None if out of memory: then the host edits."""
    try:
        return make_edit_state(slots, vocab_size, device)
    except torch.OutOfMemoryError as error:
        logger.warning("the host applies penalties and logit_bias, which makes them slower: %s", error)
        return None


def _sampling_needs(requests: SlotInits) -> Int64Array:
    """The SamplingNeeds of each request: int64 [requests]."""
    truncates = (requests.temperatures > 0) & (requests.truncation != KEEPS_ALL).any(1)
    edits = np.array([edits is not None for edits in requests.edits])
    needs: Int64Array = np.where(truncates, SamplingNeeds.TRUNCATION, 0)
    needs |= np.where(edits, SamplingNeeds.LOGIT_EDITS, 0)
    needs |= np.where(requests.masked, SamplingNeeds.TOKEN_MASK, 0)
    return needs | np.where(requests.logprobs, SamplingNeeds.LOGPROBS, 0)
