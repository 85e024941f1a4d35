"""DraftLoops: a decode loop for each DeviceDraft, made when first needed, with its result buffers.

All loops share the state of the requests, the target's pool, and the copy of the logits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import torch

from paceline.backends.async_decoding import DeviceDraft
from paceline.backends.cuda.decode.decode_loop import DecodeLoop, DeviceRequests
from paceline.backends.cuda.decode.draft_networks import DraftNetwork, ModelNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape, chain_shape, tree_shape
from paceline.backends.cuda.heads.head import HeadPool
from paceline.backends.cuda.kernels.recurrent.types import StateTensors
from paceline.backends.cuda.passes.buffers import Buffer, make_buffer
from paceline.backends.cuda.passes.graphs import bucket
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.core.forward import KeptFeatures

BUFFERS = 4  # result buffers per loop: more than passes in flight, so no result is overwritten unread


@dataclass(frozen=True)
class Loop:
    """The decode loop of one DeviceDraft, with its result buffers."""

    steps: DecodeLoop
    buffers: deque[Buffer]  # the next one first
    most: int  # most requests of a pass
    width: int  # most new tokens of a request in a pass


class DraftLoops:
    """The loops over the requests of `state`."""

    def __init__(
        self,
        weights: Weights,
        pool: Pool,
        state: DeviceRequests,
        page_size: int,
        feature_layers: tuple[int, ...] = (),
        kept: tuple[KeptFeatures, ...] = (),
        states: StateTensors | None = None,
    ) -> None:
        """Passes without a head give the features of these layers, or store those that a head's pool keeps.

        `states`: of recurrent layers.
        """
        self._weights, self._pool, self._state, self._page_size = weights, pool, state, page_size
        self._feature_layers, self._kept, self._states = feature_layers, kept, states
        self._loops: dict[DeviceDraft | None, Loop] = {}
        # see DecodeLoop
        self._raw_logits = torch.empty((0, weights.config.vocab_size), device=weights.device)

    def get(self, draft: DeviceDraft | None) -> Loop:
        """The loop of this draft; None: of plain decoding. OutOfMemoryError if there is no room for it."""
        if draft not in self._loops:
            self._loops[draft] = self._make(draft)
        return self._loops[draft]

    def _make(self, draft: DeviceDraft | None) -> Loop:
        slots, longest = self._state.tokens.shape
        network: DraftNetwork | None = None
        keeps, layers = None, self._feature_layers
        shape, most = _shape_of(draft), bucket(slots)
        if draft is not None and draft.max_requests is not None:
            most = min(most, bucket(draft.max_requests))
        limits = (shape, most, longest, self._page_size)
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
            self._state,
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
        return Loop(steps, buffers, most, steps.output.shape[1])


def _shape_of(draft: DeviceDraft | None) -> DraftShape:
    """The rows of a request in a pass with this draft."""
    if draft is None or draft.branching == 1:
        return chain_shape(0 if draft is None else draft.length)
    return tree_shape(1 + draft.nodes, draft.branching, draft.length)
