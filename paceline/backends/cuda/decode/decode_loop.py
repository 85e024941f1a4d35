"""DecodeLoop: decode steps that draft, verify and advance on the device, and prepare the next step's rows.

    device   rows of all passes ─> draft: catch up, draft, draft ... ─> target ─> tokens ─> accept ─┐
               ^──────────────────── next rows, written by the same graph ─────────────────────────┤
    host                                            one small copy per step, read one step later <─┘

The state of requests is on the device too (DeviceRequests): tokens, computed lengths, page tables, seeds and
temperatures. The host reserves pages ahead and reads the tokens of earlier steps; no step waits for it.
Without a draft, a step is plain decoding. Drafts do not change the tokens: a drafted token is accepted only
if the target samples it too, with the noise of the request.

A step is one launch. A step with token masks is three (`start_draft`, `start_logits`, `finish`), because the
host makes the masks from the drafts, while the device computes the logits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from paceline.backends.async_decoding import NgramLookup
from paceline.backends.cuda.decode.accepted_paths import AcceptedPaths
from paceline.backends.cuda.decode.draft_networks import DraftNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape, chain_shape
from paceline.backends.cuda.decode.loop_rows import LoopRows
from paceline.backends.cuda.decode.loop_states import LoopStates
from paceline.backends.cuda.decode.step_drafter import StepDrafter
from paceline.backends.cuda.decode.step_sampler import StepSampler
from paceline.backends.cuda.heads.head import HeadPool
from paceline.backends.cuda.kernels.accept import accept_drafts
from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.drafting.features import store_features
from paceline.backends.cuda.kernels.recurrent.types import StateTensors, recurrent_shape
from paceline.backends.cuda.kernels.sampling.logit_edits import EditState, count_tokens
from paceline.backends.cuda.kernels.step_rows import DeviceRequests, make_requests
from paceline.backends.cuda.model import run_layers
from paceline.backends.cuda.native.persistent import PersistentLayers
from paceline.backends.cuda.passes.graphs import Graphs
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.shared_prefix import SharedPrefix
from paceline.backends.cuda.passes.tables import to_device
from paceline.backends.cuda.passes.workspace import Room, make_workspace
from paceline.backends.cuda.weights.lm_head import run_lm_head
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.core.request import SamplingNeeds

__all__ = ["DecodeLoop", "DeviceRequests", "make_requests"]


class DecodeLoop:
    """Steps over requests whose state is on the device.

    results     int32, copied to the host after each step; views of it:
    counts      [max_rows] number of new tokens; 0 for padding and at a request's limit
    found       [max_rows] number of tokens drafted from text
    accepted    [max_rows, levels + 1] the nodes at which they were sampled; only of a tree
    output      [max_rows, levels + 1] the new tokens; -1: unusable logits
    logprobs    float64 [max_rows, nodes, fields of verify/logprobs.py], for requests that ask

    loop_rows   the rows of a step, `nodes` for each request; `parents` are their parents, -1 for the root
    masks       the token masks of these rows, which the host sends
    host_drafts int32 [max_rows, 1 + most] start and tokens of the host's optimistic drafts; or None
    """

    def __init__(
        self,
        weights: Weights,
        pool: Pool,
        requests: DeviceRequests,
        max_rows: int,
        page_size: int,
        draft: DraftNetwork | None = None,
        given: DraftShape | None = None,
        feature_layers: tuple[int, ...] = (),
        kept: HeadPool | None = None,
        look_up: NgramLookup | None = None,
        host_drafts: int = 0,
        draft_levels: int | None = None,
        states: StateTensors | None = None,
        raw_logits: torch.Tensor | None = None,
    ) -> None:
        """Steps of at most `max_rows` requests; plain decoding without a draft.

        draft             a head or draft model that drafts
        given             shape of drafts that come from the host (written to `drafted`) or from text
        look_up           n-gram sizes of prompt lookup, for a chain or a tree's first path
        host_drafts       most tokens of the optimistic host drafts that the decoder's `launch` takes
        draft_levels      levels that `draft` drafts where the lookup finds nothing; None: all
        feature_layers    without `draft`: layers whose hidden states go to `features` [rows of a pass, width]
        kept              a head's pool that stores these features too
        states            of recurrent layers
        raw_logits        float32 [at least all rows of a step, vocab] for a copy of the logits, which steps
                          with log-probabilities and masks or edits need; loops may share it. None: its own
        """
        device, config = weights.device, weights.config
        self.weights, self.pool, self.requests, self.page_size = weights, pool, requests, page_size
        self.draft, self._kept = draft, kept
        shape = draft.shape if draft is not None else given or chain_shape(0)
        self.feature_layers = feature_layers if draft is None else draft.feature_layers
        self.features = None if draft is None else draft.features
        if draft is None and feature_layers:
            width = len(feature_layers) * config.hidden_size
            self.features = torch.zeros((max_rows * len(shape), width), device=device)
        self.nodes, self.parents = len(shape), shape.parents
        own_height = tile_height(*weights.head_groups)
        self.loop_rows = LoopRows(shape, requests, max_rows, page_size, own_height, draft, draft_levels)
        # A head has no keys and values of accepted tokens that came from a lookup. In a first step it is not
        # known which tokens these are, so it catches up on the most tokens that a step can accept.
        self._recomputed = 1
        if draft is not None and not draft.always and look_up is not None and kept is not None:
            self._recomputed = draft.catch_up_rows

        def integers(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.int32, device=device)

        width = shape.levels + 1
        self.results = integers(max_rows * (2 + (1 if shape.is_chain else 2) * width))
        self.counts, self.found = self.results[: 2 * max_rows].view(2, -1)
        self.output = self.results[-max_rows * width :].view(max_rows, -1)
        self.accepted = integers(max_rows, width)
        if not shape.is_chain:
            self.accepted = self.results[2 * max_rows : -max_rows * width].view(max_rows, -1)
        self._slots = integers(max_rows)
        self._adapters = integers(max_rows, self.nodes)  # of the rows of a step
        self._drafter = StepDrafter(shape, self.loop_rows, self.found, draft, look_up, host_drafts)
        self.host_drafts = self._drafter.host_drafts
        self._sampler = StepSampler(max_rows, self.loop_rows.shape, weights, raw_logits)
        self.logprobs, self.masks = self._sampler.logprobs, self._sampler.masks
        room = Room.of(max_rows * self.nodes, requests.tokens.shape[1])
        self._states: LoopStates | None = None
        if weights.recurrent is not None and config.recurrent is not None:
            assert states is not None
            own = recurrent_shape(config.recurrent, config.hidden_size)
            self._states = LoopStates(own, weights.recurrent, states, shape, max_rows)
            room = replace(room, nodes=max(self._states.nodes, 1))
        self._workspace = make_workspace(weights, room)
        self._megakernel = PersistentLayers(weights, self._workspace, pool, page_size)
        self._accepted_paths = AcceptedPaths(shape, requests, pool, draft, kept, page_size)
        self._graphs = Graphs(device)

    @torch.inference_mode()
    def begin(self, slots: list[int], rows: int, features: torch.Tensor | None = None) -> None:
        """Decode the requests in these slots, padded to `rows` requests, in the next steps.

        The state of the slots must have been written: all tokens, at least one of them computed and the last
        not, and pages for the KV indices below the limit. A draft model must have computed all tokens but the
        last two, a head all but the last one. A head also reads the target's feature of each request's last
        computed token: `features` float32 [slots, width], or those in its pool.
        """
        chosen = self._slots[:rows]
        chosen.copy_(to_device(np.array(slots + [-1] * (rows - len(slots)), np.int32), chosen.device))
        self._graphs.run(("begin", rows), lambda: self._begin(rows))
        self.loop_rows.use_shared_prefix(None)
        if features is not None and self.draft is not None and self.draft.features is not None:
            self._first_features(self.draft.features)[: len(slots), 0] = features

    def use_shared_prefix(self, shared_prefix: SharedPrefix | None) -> None:
        """Use shared-prefix attention for the requests of `begin`; None: do not."""
        self.loop_rows.use_shared_prefix(shared_prefix)

    def _begin(self, rows: int) -> None:
        """Copy the sampling options of the slots, and write the rows of the first step."""
        state, chosen = self.requests, self._slots[:rows]
        valid_slots = chosen.clamp(min=0).long()
        self._sampler.begin(state, valid_slots)
        if self.weights.adapters:
            own = torch.where(chosen >= 0, state.adapters[valid_slots], -1)
            self._adapters[:rows] = own[:, None]
        if self._states is not None:
            self._states.begin(chosen)
        if self.draft is not None and self.draft.features is not None and self._kept is not None:
            count, lengths = self._recomputed, state.lengths[valid_slots, None].long()
            first = (lengths - count).clamp(min=0)
            index = torch.minimum(first + torch.arange(count, device=first.device), lengths - 1).clamp(min=0)
            pages = state.pages[valid_slots[:, None], index // self.page_size].long()
            slot_mapping = pages * self.page_size + index % self.page_size  # [rows, count]
            kept = self._kept.features[slot_mapping].float()
            self._first_features(self.draft.features)[:rows, :count] = kept
        self.loop_rows.begin(chosen, self._recomputed)

    def _first_features(self, features: torch.Tensor) -> torch.Tensor:
        """The features for a head's first catch-up: float32 [requests, nodes, width], oldest first."""
        return features.view(-1, self.nodes, features.shape[1])

    def drafted(self, rows: int) -> torch.Tensor:
        """The tokens of a step's nodes: int32 [rows, nodes]. The first is the root, the last known token."""
        return self.loop_rows.drafted(rows)

    @torch.inference_mode()
    def step(
        self, rows: int, needs: int = 0, edits: EditState | None = None, has_adapters: bool = False
    ) -> None:
        """Launch a step of all requests; `output` and `counts` hold its tokens when the device is done.

        `needs`: the union of the requests' SamplingNeeds; other sampling kernels are skipped. `edits` is
        needed with LOGIT_EDITS, and must be the same in every step. `has_adapters`: a request has an adapter.
        """
        name = rows, needs, self.loop_rows.uses_shared_prefix, has_adapters

        def work() -> None:
            self._draft(rows)
            self._compute(rows, needs != 0, has_adapters)
            self._sample(rows, needs, edits)

        self._graphs.run(name, work)

    @torch.inference_mode()
    def start_draft(self, rows: int) -> None:
        """Launch the first part of a step: `drafted` holds its rows when the device is done."""
        if self._drafter.drafts:
            self._graphs.run(("draft", rows), lambda: self._draft(rows))

    @torch.inference_mode()
    def start_logits(self, rows: int, has_adapters: bool = False) -> None:
        """Launch the second part: the logits of the rows."""
        name = "logits", rows, self.loop_rows.uses_shared_prefix, has_adapters
        self._graphs.run(name, lambda: self._compute(rows, True, has_adapters))

    @torch.inference_mode()
    def finish(self, rows: int, needs: int, edits: EditState | None = None) -> None:
        """Launch the last part: tokens, and the next step's rows. `masks` must have been sent."""
        self._graphs.run(("sample", rows, needs), lambda: self._sample(rows, needs, edits))

    def _draft(self, rows: int) -> None:
        """Write drafts to the rows of the step."""
        sampler = self._sampler
        self._drafter.draft(self._slots[:rows], self.requests, sampler.temperatures, sampler.seeds)

    def _sample(self, rows: int, needs: int, edits: EditState | None) -> None:
        """Sample the tokens of all rows, accept, and write the next step's rows."""
        inputs, state, slots = self.loop_rows.pass_rows(0, rows), self.requests, self._slots[:rows]
        tokens, positions = inputs.tokens, inputs.tables.positions
        candidates = self._sampler.sample(self._workspace, tokens, positions, slots, state, needs, edits)
        if self._kept is not None and self.features is not None:
            slot_mapping = inputs.tables.slot_mapping
            store_features(self.features, slot_mapping, self._kept.parts, self._kept.features)
        results = self.output, self.counts, self.accepted
        shape, step = self.loop_rows.shape, self.loop_rows.step
        accept_drafts(candidates, slots, state, shape, step, *results, self.page_size)
        if needs & SamplingNeeds.LOGIT_EDITS and edits is not None:
            count_tokens(slots, edits, self.output, self.counts)
        if self._states is not None and self._workspace.recurrent is not None:
            self._states.advance(self._workspace.recurrent, slots, self.counts, self.accepted)
        self._accepted_paths.move(slots, self.counts, self.accepted)

    def path_logprobs(self, rows: int) -> torch.Tensor:
        """The log-probabilities of the last step's tokens: float64 [rows, levels + 1, fields]."""
        fields = self.logprobs[:rows]
        if self.loop_rows.shape.is_chain:
            return fields
        path = self.accepted[:rows, :, None].long()
        return fields.gather(1, path.expand(-1, -1, fields.shape[2]))

    def _compute(self, rows: int, joins: bool, has_adapters: bool) -> None:
        """Run the target over all nodes. `joins`: see run_lm_head."""
        weights, workspace = self.weights, self._workspace
        inputs, count = self.loop_rows.pass_rows(0, rows), rows * self.nodes
        tables, features = inputs.tables, (self.features, self.feature_layers)
        if has_adapters:
            tables = replace(tables, adapters=self._adapters[:rows].view(-1))
        known = inputs.tokens, tables
        if not self._megakernel.run(*known, *features):
            recurrent = None if self._states is None else self._states.rows(rows, tables.slot_mapping)
            run_layers(weights, workspace, *known, self.pool, self.page_size, *features, recurrent)
        run_lm_head(weights, workspace, workspace.attention_input, count, joins)
