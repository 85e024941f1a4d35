"""Asynchronous decoding: the protocol of a backend's decoder. See engine/executors/device_executor.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.backends.base import Backend, HeadStorage
from paceline.core.arrays import BoolArray, Float32Array, Float64Array, Int32Array, UInt64Array
from paceline.core.forward import KVPool
from paceline.core.logit_edits import LogitEdits
from paceline.core.request import Request, SamplingNeeds


@dataclass(frozen=True)
class SlotInits:
    """Requests whose next token is to be computed and which a decoder does not know yet."""

    slots: Int32Array  # [requests] their lines of the page table
    tokens: Int32Array  # [requests, 2] the last but one, if there is one, and the last, which is not computed
    lengths: Int32Array  # [requests] tokens whose keys and values are there
    limits: Int32Array  # [requests] KV indices from here on are not computed
    seeds: UInt64Array  # [requests]
    temperatures: Float64Array  # [requests]
    takes_drafts: BoolArray  # [requests] whether drafted tokens are theirs too, or only what follows the last
    truncation: Float64Array  # [requests, fields of core/truncation.py]
    logprobs: BoolArray  # [requests] whether log-probabilities are asked
    edits: Sequence[LogitEdits | None]  # [requests] None: logits stay as they are
    adapters: Sequence[str]  # [requests] as of a ForwardBatch

    @classmethod
    def of(cls, requests: Sequence[Request]) -> SlotInits:
        """The present state of these requests."""
        params = [request.params for request in requests]
        return cls(
            slots=np.array([request.slot for request in requests], dtype=np.int32),
            tokens=np.array([[0, *request.token_ids[-2:]][-2:] for request in requests], dtype=np.int32),
            lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
            limits=np.array([request.most_tokens - 1 for request in requests], dtype=np.int32),
            seeds=np.array([request.seed for request in requests], dtype=np.uint64),
            temperatures=np.array([options.temperature for options in params], dtype=np.float64),
            takes_drafts=np.array([not request.undrafted for request in requests]),
            truncation=np.array([options.truncation for options in params], dtype=np.float64),
            logprobs=np.array([options.logprobs is not None for options in params]),
            edits=[
                request.sampler.logit_edits() if request.sampling_needs & SamplingNeeds.LOGIT_EDITS else None
                for request in requests
            ],
            adapters=[request.adapter for request in requests],
        )


@dataclass(frozen=True)
class NgramLookup:
    """Chains found in requests' own texts, as draft/lookup/ngram.py finds them."""

    shortest: int  # tokens of an n-gram
    longest: int


@dataclass(frozen=True, eq=False)
class DeviceDraft:
    """What a pass drafts with: a head, a draft model, or the requests' texts and optimistic host drafts.

    A head or a model can have a `look_up` too. Then a request's chain is what is found in its text, and the
    head's or model's only where nothing is found.

    An optimistic draft is what the host expects of a request's text from some place on, further than the
    passes in flight reach. If these have chosen what it says, the chain is what it says next. Otherwise,
    or if it ends there, the chain is looked up, if `look_up` says how; if nothing is found, there is none.
    """

    length: int  # of the chains, or levels of the trees; at least 1
    runner: HeadStorage | None = None  # of a head; None: no head drafts
    pool: KVPool | None = None  # of the head, which keeps features, or of the draft model
    feature_layers: tuple[int, ...] = ()  # that the head reads
    max_requests: int | None = None  # of a pass; None: as many as there are slots
    look_up: NgramLookup | None = None  # None: nothing is looked up
    host_tokens: int = 0  # of the longest optimistic draft; 0: the host gives none
    model: Backend | None = None  # a draft model with the target's vocabulary; None: none drafts
    network_length: int | None = None  # tokens that a head or a model drafts; None: as many as `length`
    branching: int = 1  # children of a node at most; above 1 a head drafts trees of a fixed shape
    nodes: int = 0  # drafted nodes of such a tree

    @property
    def from_texts(self) -> bool:
        """Whether neither a head nor a model drafts."""
        return self.runner is None and self.model is None

    @property
    def reads_texts(self) -> bool:
        """Whether chains can come from texts, alone or beside a head or a model."""
        return self.from_texts or self.look_up is not None


@dataclass(frozen=True)
class DecodeOutput:
    """The result of a decode pass. Its arrays are valid until the next but one is read."""

    tokens: Int32Array  # [slots, 1 + length of drafts] of the accepted path; -1 where logits gave none
    counts: Int32Array  # [slots] how many of these are tokens
    features: Float32Array | None = None  # [slots, width] of the computed tokens, if asked
    found: Int32Array | None = (
        None  # [slots] how many tokens were drafted from texts, if the draft reads them
    )
    # [slots, 1 + length of drafts, fields of verify/logprobs.py], if a request of the pass asked for them
    logprobs: Float64Array | None = None


class AsyncDecoder(Protocol):
    """Decode passes, each of which reads the tokens where the one before it has chosen them.

    A pass that drafts gives a request up to as many tokens more as its drafts are long. Passes and all other
    work of the backend run in the order in which they were begun.
    """

    @property
    def supported_sampling(self) -> SamplingNeeds:
        """What passes can do when they sample; but edits and log-probabilities not for the same request."""
        ...

    @property
    def supports_lookup(self) -> bool:
        """Whether passes can draft from texts: look chains up, and follow optimistic drafts."""
        ...

    def join(self, requests: SlotInits) -> None:
        """Initialize the slots of requests, or overwrite the state of slots in use."""
        ...

    def write_texts(self, slots: Sequence[int], texts: Sequence[Int32Array]) -> None:
        """Write the tokens of requests that have joined, as far as the host knows them, to their slots.

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
        """Launch a pass over the known requests in these slots: it gives each of them its next token.

        `page_tables` [all slots, max pages] are those of this pass. They have room for what another pass of
        its kind computes too, below the limits, and what they say of it stays: the pass may tell the next.
        A head that drafts has computed all of the requests' tokens but the last, and those of passes that
        it has not drafted in, and features of all computed tokens are in its pool. A pass that drafts from
        texts has been told them. `host_drafts` [slots, 1 + draft.host_tokens], where the host gives some:
        the place in the text of the first token, -1 if there is no draft, and its tokens, -1 behind the last.
        They are for this pass alone.
        """
        ...

    def read(self) -> DecodeOutput:
        """The result of the oldest pass that was not read. Waits for it."""
        ...

    def skip(self) -> None:
        """Discard the oldest pass that was not read."""
        ...

    def drop(self) -> None:
        """Discard all passes that were not read."""
        ...

    def prepare(self, draft: DeviceDraft | None) -> Mapping[int, float]:
        """Warm up: capture and compile what the first passes would wait for.

        Returns the seconds of a pass by its number of requests, for some numbers; empty if none was timed.
        """
        ...
