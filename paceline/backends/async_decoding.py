"""Asynchronous decoding: the protocol of a backend's decoder. See engine/executors/device_executor.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.backends.heads import HeadStorage
from paceline.core.arrays import BoolArray, Float32Array, Float64Array, Int32Array, UInt64Array
from paceline.core.forward import KVPool
from paceline.core.logit_edits import LogitEdits
from paceline.core.request import Request, SamplingNeeds
from paceline.kv.cache import PoolOwner


@dataclass(frozen=True)
class SlotInits:
    """The initial state of decoder slots: requests that join the decode passes."""

    slots: Int32Array  # [requests] rows of the page table
    tokens: Int32Array  # [requests, 2] the last two tokens; the last one has no keys and values yet
    lengths: Int32Array  # [requests] tokens with keys and values
    limits: Int32Array  # [requests] no token is computed at this KV index or beyond
    seeds: UInt64Array  # [requests]
    temperatures: Float64Array  # [requests]
    most_drafted: (
        Int32Array  # [requests] drafted tokens that a pass accepts, at most; 0: it samples one token
    )
    truncation: Float64Array  # [requests, fields of core/truncation.py]
    logprobs: BoolArray  # [requests] whether log-probabilities are wanted
    masked: BoolArray  # [requests] whether the host sends a token mask for every token
    edits: Sequence[LogitEdits | None]  # [requests] None: logits are not edited
    adapters: Sequence[str]  # [requests] as in ForwardBatch

    @classmethod
    def of(cls, requests: Sequence[Request]) -> SlotInits:
        """The current state of these requests."""
        params = [request.params for request in requests]
        return cls(
            slots=np.array([request.slot for request in requests], dtype=np.int32),
            tokens=np.array([[0, *request.token_ids[-2:]][-2:] for request in requests], dtype=np.int32),
            lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
            limits=np.array([request.most_tokens - 1 for request in requests], dtype=np.int32),
            seeds=np.array([request.seed for request in requests], dtype=np.uint64),
            temperatures=np.array([options.temperature for options in params], dtype=np.float64),
            most_drafted=np.array([request.most_drafted for request in requests], dtype=np.int32),
            truncation=np.array([options.truncation for options in params], dtype=np.float64),
            logprobs=np.array([options.logprobs is not None for options in params]),
            masked=np.array([request.sampling.is_masked for request in requests]),
            edits=[
                request.sampling.logit_edits() if request.sampling_needs & SamplingNeeds.LOGIT_EDITS else None
                for request in requests
            ],
            adapters=[request.adapter for request in requests],
        )


@dataclass(frozen=True)
class NgramLookup:
    """Prompt lookup in the request's own text: the n-gram sizes of draft/lookup/ngram.py."""

    shortest: int  # smallest n
    longest: int  # largest n


@dataclass(frozen=True, eq=False)
class DeviceDraft:
    """How a pass drafts on the device: by a head, a draft model, or from text (lookup, host drafts).

    Cascade: with a head or model and `look_up`, a request's chain comes from prompt lookup; where the lookup
    finds nothing, the head or model drafts it.

    An optimistic host draft starts at a position of the text and extends beyond the passes in flight. If the
    tokens sampled meanwhile match its start, the rest is the chain. If they do not, or the draft is used up,
    the chain comes from `look_up`; if that finds nothing, there is no draft.
    """

    length: int  # tokens of a chain, or levels of a tree; at least 1
    runner: HeadStorage | None = None  # the head's runner; None: no head drafts
    pool: KVPool | None = None  # of the head, with the target's features, or of the draft model
    feature_layers: tuple[int, ...] = ()  # the target's layers that the head reads
    max_requests: int | None = None  # per pass; None: one for each slot
    look_up: NgramLookup | None = None  # None: no prompt lookup
    host_tokens: int = 0  # tokens of the longest optimistic host draft; 0: the host does not draft
    model: PoolOwner | None = None  # a draft model with the target's vocabulary; None: no model drafts
    network_length: int | None = None  # tokens that a head or a model drafts; None: `length`
    branching: int = 1  # most children of a node; above 1 the head drafts static trees
    nodes: int = 0  # drafted nodes of a tree

    @property
    def from_texts(self) -> bool:
        """Whether neither a head nor a model drafts."""
        return self.runner is None and self.model is None

    @property
    def reads_texts(self) -> bool:
        """Whether chains can come from text, alone or in a cascade with a head or model."""
        return self.from_texts or self.look_up is not None


@dataclass(frozen=True)
class DecodeOutput:
    """The result of a decode pass. Its arrays are valid until the second `read` after it."""

    tokens: Int32Array  # [slots, 1 + length of drafts] accepted tokens and the bonus; -1: unusable logits
    counts: Int32Array  # [slots] number of valid entries in `tokens`
    features: Float32Array | None = None  # [slots, width] of the computed tokens, if wanted
    found: Int32Array | None = None  # [slots] tokens drafted from text; None: the draft does not read text
    # [slots, 1 + length of drafts, fields of verify/logprobs.py], if a request of the pass wants them
    logprobs: Float64Array | None = None
    # [slots, 1 + levels] the nodes of a tree at which `tokens` were sampled, first the root, which is 0, then
    # 1 + the node's number in core/tree_shapes.py; None: the draft is no tree
    nodes: Int32Array | None = None


@dataclass(frozen=True)
class DraftedRows:
    """The rows of a pass that waits for token masks. Valid until the masks are sent."""

    tokens: Int32Array  # [slots, nodes] the root, which is the last known token, and what was drafted
    parents: Sequence[int]  # [nodes] -1 for the root; parents before children


class AsyncDecoder(Protocol):
    """Launches decode passes that read the previous pass's tokens on the device, and returns results later.

    A pass gives each request one token and the accepted part of its draft. Passes, and all other work of the
    backend, run in launch order.
    """

    @property
    def supported_sampling(self) -> SamplingNeeds:
        """What passes can do when they sample, also for one request. Log-probabilities are those of the raw
        logits, before masks and edits."""
        ...

    @property
    def supports_lookup(self) -> bool:
        """Whether passes can draft from text: prompt lookup and optimistic host drafts."""
        ...

    def has_room(self, draft: DeviceDraft) -> bool:
        """Whether there is memory for passes with this draft. Makes their buffers."""
        ...

    def join(self, requests: SlotInits) -> None:
        """Initialize the slots of requests, or overwrite the state of slots in use."""
        ...

    def write_texts(self, slots: Sequence[int], texts: Sequence[Int32Array]) -> None:
        """Write the tokens that the host knows to the slots of requests that have joined.

        Passes in flight may have sampled more. Only passes that draft from texts need all tokens.
        """
        ...

    def launch(
        self,
        slots: Sequence[int],
        page_tables: Int32Array,
        draft: DeviceDraft | None,
        host_drafts: Int32Array | None = None,
    ) -> None:
        """Launch a pass over the requests in these slots; it samples the next token of each.

        `page_tables` [all slots, max pages]: besides the rows of this pass they have pages for one more such
        pass, below the limits, and those entries must not change before it.
        `host_drafts` [slots, 1 + draft.host_tokens]: the position of the first drafted token (-1: no draft),
        then the tokens, padded with -1. They are used by this pass only.

        If a request is masked, the pass stops before it samples, and continues with `send_masks`. Nothing
        else may be launched before.

        Before a pass with a head: the head has computed all tokens but the last, except tokens of passes it
        did not draft in, and its pool has the features of all computed tokens.
        Before a pass that drafts from text: `write_texts` was called.
        """
        ...

    def drafted(self) -> DraftedRows:
        """The rows of the pass that waits for token masks. Waits for its drafts."""
        ...

    def send_masks(self, rows: Int32Array, masks: Sequence[Int32Array]) -> None:
        """Let the waiting pass sample, by these masks of core/token_masks.py for these of its rows.

        `rows` [masks]: the numbers of rows of [slots, nodes]. Other rows are not masked.
        """
        ...

    def read(self) -> DecodeOutput:
        """The result of the oldest unread pass. Waits for it."""
        ...

    def skip(self) -> None:
        """Discard the oldest unread pass."""
        ...

    def drop(self) -> None:
        """Discard all unread passes."""
        ...

    def prepare(self, draft: DeviceDraft | None) -> Mapping[int, float]:
        """Warm up: compile kernels and capture graphs before the first pass.

        Returns seconds of a pass by number of requests; empty if none was timed.
        """
        ...
