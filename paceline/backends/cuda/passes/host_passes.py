"""HostPasses: runs ForwardBatches (host passes) in CUDA graphs, with their buffers and copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from paceline.backends.cuda.heads.head import HeadPool
from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.attention.prefill_attention import prefill_height
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.shared_prefix import SharedPrefixRows
from paceline.backends.cuda.kernels.drafting.features import store_features
from paceline.backends.cuda.kernels.sampling.gumbel import take_best
from paceline.backends.cuda.layers.recurrent import Recurrences, RecurrentRows, plan_scans
from paceline.backends.cuda.model import can_finish_rows, finish_rows, run_layers
from paceline.backends.cuda.passes.graphs import Graphs, bucket
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.outputs import FeatureBuffer, copied_to_host
from paceline.backends.cuda.passes.shared_prefix import SharedPrefix, SharedPrefixTables
from paceline.backends.cuda.passes.tables import FEW_ROWS, DeviceTables, max_prefill_tiles, rows_of
from paceline.backends.cuda.passes.workspace import Room, make_workspace
from paceline.backends.cuda.weights.lm_head import run_lm_head, select
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.backends.cuda.weights.vocabulary import sample_local, shared_candidates_for
from paceline.core.arrays import BoolArray
from paceline.core.forward import ForwardBatch, ForwardOutput

MAX_PAGES = 1 << 17  # most pages of a pass, summed over requests
# initial sizes of the buffers, which grow when needed
FIRST_LONGEST = 4096  # tokens of context
FIRST_ROWS = FEW_ROWS  # rows with logits, or not in prefill tiles
LATE_ROWS = 256  # from this many rows on, the last layer is completed only for rows with logits


@dataclass(frozen=True)
class _Sent:
    """A pass whose inputs are on the device. Its fields are the key of the captured graph."""

    rows: int  # with padding
    wanted: int  # rows with logits
    outputs: int  # these, and the rows with sampled tokens
    layers: tuple[int, ...]  # whose features are wanted, by the host or by heads
    prefill_tiles: int
    others: bool  # some rows are not in prefill tiles
    has_adapters: bool
    is_late: bool  # the last layer is completed for the outputs only
    shared_prefix: SharedPrefixRows | None
    recurrent: RecurrentRows | None


class HostPasses:
    """Runs passes of at most `max_rows` rows of a model."""

    def __init__(self, weights: Weights, max_rows: int, page_size: int) -> None:
        self.weights, self.max_rows, self.device = weights, max_rows, weights.device
        rows, config = bucket(max_rows), weights.config
        some = min(rows, FIRST_ROWS)
        self.room = Room(rows, FIRST_LONGEST, attending=some, outputs=some)
        self.workspace = make_workspace(weights, self.room)
        self.graphs = Graphs(self.device)
        self.recurrences: Recurrences | None = None
        if weights.recurrent is not None:
            self.recurrences = Recurrences(config, weights.recurrent, rows, self.device)
        self._page_size = page_size
        sizes, has_latents = weights.head_groups, config.latent is not None
        self._tile_heights = tile_height(*sizes), prefill_height(*sizes, has_latents)
        self._tables = DeviceTables(rows, MAX_PAGES, self.device)
        self._shared_prefix = SharedPrefixTables(rows, self.device)
        self._features = FeatureBuffer(rows, config.hidden_size, self.device)
        self._candidates = shared_candidates_for(rows, weights.head, self.device)
        self._chosen = torch.zeros(rows, dtype=torch.int32, device=self.device)

    def set_room(self, room: Room) -> None:
        """Allocate buffers of this room."""
        self.room = room
        self.workspace = make_workspace(self.weights, room)
        self.graphs = Graphs(self.device)  # captured graphs hold addresses

    @torch.inference_mode()
    def begin(
        self, batch: ForwardBatch, large: BoolArray, found: SharedPrefix | None
    ) -> Callable[[], ForwardOutput]:
        """Launch a pass; the returned function waits for its output.

        `large` [requests]: requests whose attention the prefill kernel computes. `found`: shared prefixes.
        """
        assert batch.num_rows <= self.max_rows, f"{batch.num_rows} rows, but max_rows is {self.max_rows}"
        sent, pool = self._send(batch, large, found), cast(Pool, batch.pool)
        if sent.layers and self._features.hold(len(sent.layers)):
            self.graphs = Graphs(self.device)  # captured graphs hold addresses
        keeps = [
            (cast(HeadPool, kept.pool), self._features.parts(sent.layers, kept.layers))
            for kept in batch.kept_features
        ]
        of_states = () if sent.recurrent is None else sent.recurrent.states.addresses
        heads = tuple((kept.features.data_ptr(), len(kept.features)) for kept, _ in keeps)
        kinds = sent.prefill_tiles > 0, sent.others, sent.shared_prefix is not None, sent.has_adapters
        name = "body", sent.rows, sent.layers, (pool.addresses, of_states), heads, (*kinds, sent.is_late)
        self.graphs.run(name, lambda: self._run_layers(sent, pool, keeps))
        if sent.outputs:
            joins = sent.wanted > 0 and self.weights.shard.size > 1  # a single rank has all logits
            name_of_head = "head", bucket(sent.outputs), joins, sent.is_late
            self.graphs.run(name_of_head, lambda: self._run_head(sent, pool, joins))
        width = len(batch.feature_layers) * self.weights.config.hidden_size
        chosen = None if batch.choices is None else self._chosen[sent.wanted : sent.outputs]
        features = self._features.values[: batch.num_rows, :width] if width else None
        return copied_to_host(self.workspace.logits[: sent.wanted], features, chosen)

    def _send(self, batch: ForwardBatch, large: BoolArray, found: SharedPrefix | None) -> _Sent:
        """Grow the buffers for a pass if needed, and send its tables."""
        rows, wanted = bucket(batch.num_rows), len(batch.logit_rows)
        layers = batch.feature_layers + tuple(layer for kept in batch.kept_features for layer in kept.layers)
        outputs = wanted + (0 if batch.choices is None else len(batch.choices.rows))
        plan = None if self.recurrences is None else plan_scans(batch)
        self._make_room(batch, large, outputs, 1 if plan is None else plan.nodes)
        height, large_height = self._tile_heights
        prefill_tiles = max_prefill_tiles(rows, large_height) if large.any() else 0
        numbers = [self.weights.adapters[name] if name else -1 for name in batch.adapters]
        adapters = np.array(numbers, dtype=np.int32) if numbers else None
        tiles = height, large, large_height, prefill_tiles
        row_arrays = rows_of(batch, self._page_size, *tiles, cast(Pool, batch.pool).windows)
        self._tables.send(batch, row_arrays, adapters=adapters)
        recurrent = self.recurrences.rows(plan, batch, rows) if self.recurrences and plan else None
        if found is not None:
            self._shared_prefix.send(found, np.where(large, 0, -(-np.diff(batch.row_offsets) // height)))
        has_adapters = max(numbers, default=-1) >= 0
        is_late = LATE_ROWS <= rows >= bucket(max(outputs, 1)) and not has_adapters
        return _Sent(
            rows,
            wanted,
            outputs,
            tuple(dict.fromkeys(layers)),  # the returned ones first
            prefill_tiles,
            not large.all(),
            has_adapters,
            is_late and can_finish_rows(self.weights, self.workspace, layers),
            None if found is None else self._shared_prefix.rows(),
            recurrent,
        )

    def _make_room(self, batch: ForwardBatch, large: BoolArray, outputs: int, nodes: int) -> None:
        """Allocate larger buffers if the contexts or rows of a pass need them."""
        few, longest = np.flatnonzero(~large), int(batch.positions.max()) + 1
        attending = int(batch.row_offsets[few[-1] + 1]) if len(few) else 0
        if longest > self.room.longest:
            longest = min(bucket(longest) * 2, max(longest, self.weights.config.max_position))
        counts = (bucket(max(count, 1)) for count in (attending, outputs, nodes))
        room = self.room.holding(Room(self.room.rows, longest, *counts))
        if room != self.room:
            self.set_room(room)

    def _run_layers(self, sent: _Sent, pool: Pool, keeps: list[tuple[HeadPool, torch.Tensor]]) -> None:
        """Run all layers over the rows on the device, and store features in the pools of heads."""
        features = self._features.values if sent.layers else None
        tables: RowTables = replace(
            self._tables.tables(sent.rows, sent.prefill_tiles, sent.others),
            shared_prefix=sent.shared_prefix,
            adapters=self._tables.adapters(sent.rows) if sent.has_adapters else None,
        )
        known = self._tables.tokens(sent.rows), tables, pool, self._page_size
        rest = features, sent.layers, sent.recurrent, not sent.is_late
        run_layers(self.weights, self.workspace, *known, *rest)
        for kept, parts in keeps:
            assert features is not None
            store_features(features, tables.slot_mapping, parts, kept.features)

    def _run_head(self, sent: _Sent, pool: Pool, joins: bool) -> None:
        """Run the LM head, and sample."""
        count, workspace = bucket(sent.outputs), self.workspace
        chosen, read = self._tables.output_rows(count), workspace.selected
        if sent.is_late:
            finish_rows(self.weights, workspace, chosen, self._tables.tables(count), pool)
            read = workspace.attention_input
        else:
            select(workspace, chosen)
        run_lm_head(self.weights, workspace, read, count, joins)
        options = workspace.local.logits, self.weights.head, *self._tables.options(count)
        take_best(sample_local(*options, self._candidates, count), self._chosen[:count])
