"""CudaHeadRunner: learned draft heads in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from paceline.backends.cuda.backend import PAGE_SIZE, CudaBackend
from paceline.backends.cuda.decode.draft_networks import HeadNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape
from paceline.backends.cuda.heads.head import (
    HeadPool,
    feed_back,
    fuse,
    make_head_workspace,
    run_draft_lm_head,
    run_head_rows,
)
from paceline.backends.cuda.heads.head_pools import HeadPools
from paceline.backends.cuda.heads.head_weights import HeadWeights, load_head_weights
from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.drafting.draft_inputs import pick_rows
from paceline.backends.cuda.kernels.drafting.draft_sampling import (
    draft_candidates_for,
    score_draft_tokens,
    write_draft_tokens,
)
from paceline.backends.cuda.passes.graphs import Graphs, bucket, buckets, device_seconds
from paceline.backends.cuda.passes.host_passes import FIRST_LONGEST, MAX_PAGES
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.tables import DeviceTables, rows_of
from paceline.backends.head_chains import EXTEND_FACTOR, RIVALS
from paceline.backends.heads import ChainNoise, HeadBatch, HeadChains, HeadOutput, HeadRunner, first_slots
from paceline.backends.torch.parallel.calls import on_all_ranks
from paceline.backends.torch.parallel.ranks import Ranks
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch, KVPool
from paceline.errors import BackendError
from paceline.models.heads.checkpoint import HeadCheckpoint

MAX_OUTPUT_ROWS = 128  # of a pass with outputs, whose graphs are captured at start: see HeadPasses.max_before
CHAIN_LINES = 5  # positions, slot_mapping, contiguous_until, counts and pages of rows


class CudaHeadRunner(HeadPools, HeadRunner):
    """A HeadRunner of Triton kernels that shares weights with its target."""

    def __init__(self, weights: HeadWeights, max_rows: int, ranks: Ranks | None = None) -> None:
        """`ranks`: the other ranks of the target; the head is replicated on each."""
        device = weights.norm.device
        super().__init__(weights, device, weights.norm.dtype, ranks, weights.config.num_layers)
        self.weights: HeadWeights = weights
        self.max_rows = max_rows
        most = self._most = bucket(max_rows)
        self._longest = min(FIRST_LONGEST, self.config.max_position)
        self._workspace = make_head_workspace(weights, most, self._longest)
        self._tables = DeviceTables(most, MAX_PAGES, device)
        self._features = torch.zeros((most, self.config.feature_width), device=device)
        self._graphs = Graphs(device)
        self._temperatures = torch.zeros(most, dtype=torch.float64, device=device)

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._rope_positions = integers(most)
        self._seeds = torch.zeros(most, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(most, dtype=torch.int32, device=device)
        self._chains = _Chains(1, most, weights)

    @classmethod
    def load(cls, checkpoint: HeadCheckpoint, beside: CudaBackend, max_rows: int) -> CudaHeadRunner:
        """A runner with the checkpoint's weights, in the dtype and on the device of the target."""
        if checkpoint.config.head_dim % 2:
            raise BackendError(
                f"The cuda backend needs an even head size, not {checkpoint.config.head_dim}; "
                "use backend='torch'."
            )

        def load() -> CudaHeadRunner:
            return cls(load_head_weights(checkpoint, beside.weights), max_rows, beside.ranks)

        if beside.ranks is None:
            return load()
        return beside.ranks.call(cls.load, (checkpoint, beside, max_rows), load, makes=True)

    def network(
        self,
        pool: Pool,
        feature_layers: tuple[int, ...],
        shape: DraftShape,
        max_requests: int,
        longest: int,
        page_size: int,
    ) -> HeadNetwork:
        """The head inside the steps of a decode loop."""
        return HeadNetwork(self.weights, pool, feature_layers, shape, max_requests, longest, page_size)

    @on_all_ranks
    def prepare(self, pool: KVPool) -> None:
        """Compile kernels and capture a graph for every bucket of catch-up passes; time the largest."""
        for rows in buckets(min(self.max_rows, pool.num_pages * PAGE_SIZE - 1, self.config.max_position - 2)):
            batch = first_slots(pool, PAGE_SIZE, rows)
            self.run(batch)
            if rows <= MAX_OUTPUT_ROWS:
                self.run(replace(batch, rows=replace(batch.rows, logit_rows=np.zeros(1, np.int32))))
        if (seconds := device_seconds(self.device, lambda: self.run(batch))) is not None:
            self.catch_up_seconds = seconds / rows

    @on_all_ranks
    @torch.inference_mode()
    def run(self, batch: HeadBatch) -> HeadOutput:
        """Logits of the wanted rows, and the states that their children read."""
        outputs = len(batch.rows.logit_rows)
        self._run_rows(batch, only_keys=not outputs)
        if not outputs:  # nothing to wait for
            nothing = np.empty((0, self.config.hidden_size), dtype=np.float32)
            return HeadOutput(nothing[:, : self.config.draft_vocab_size], nothing)
        wanted = bucket(outputs)
        self._graphs.run(("vocabulary", wanted), lambda: self._pick(wanted))
        chosen = torch.from_numpy(batch.rows.logit_rows.astype(np.int64)).to(self.device)
        logits = self._workspace.logits[:outputs]
        return HeadOutput(
            logits.cpu().numpy(), self._last_states[chosen, : self.config.hidden_size].cpu().numpy()
        )

    @on_all_ranks
    @torch.inference_mode()
    def run_chains(
        self, batch: HeadBatch, most: Sequence[int], least_chance: float, noise: ChainNoise | None = None
    ) -> HeadChains:
        """The best chain for each request; all passes after the first are one graph.

        All chains are computed to the longest length: that is cheaper than deciding between passes.
        """
        rows, longest = batch.rows, max(most)
        count = rows.num_requests
        requests = bucket(count)
        if longest > self._chains.longest:
            self._chains = _Chains(longest, self._most, self.weights)
            self._graphs = Graphs(self.device)  # captured graphs hold addresses
        self._run_rows(batch, only_keys=False)
        self._chains.send(rows, requests)
        rivals = self._set_noise(noise, count)
        pool = cast(Pool, rows.pool)
        name = ("chains", requests, longest, rivals, batch.from_target, pool.addresses)
        self._graphs.run(name, lambda: self._draft_chains(requests, longest, rivals, pool))
        tokens = self._chains.tokens[: longest * requests].view(longest, requests)[:, :count].cpu().numpy()
        chances = self._chains.chances[:longest, :count].cpu().numpy().cumprod(axis=0).T
        return up_to_least(np.ascontiguousarray(tokens.T), chances, most, least_chance)

    @property
    def _last_states(self) -> torch.Tensor:
        """The output states of the last pass, input of child rows: float32 [rows, padded hidden]."""
        return self._workspace.fed_back if self.config.norm_output else self._workspace.hidden[0]

    def _run_rows(self, batch: HeadBatch, only_keys: bool) -> None:
        """Compute all rows of a pass; `only_keys`: only their keys and values."""
        rows = batch.rows
        assert rows.num_rows <= self.max_rows, f"{rows.num_rows} rows, but max_rows is {self.max_rows}"
        self._make_room(int(rows.positions.max()) + 2 + self._chains.longest)
        height = tile_height(*self.weights.head_groups)
        by_index = replace(rows, positions=rows.positions + 1)  # visibility is by KV index
        padded, pool = bucket(rows.num_rows), cast(HeadPool, rows.pool)
        slot_mapping, keeps = batch.slot_mapping, batch.slot_mapping is not None
        if slot_mapping is not None and len(batch.states):  # of masks
            pool.features[-1] = torch.from_numpy(batch.states[0]).to(self.device)
            slot_mapping = np.where(slot_mapping < 0, len(pool.features) - 1, slot_mapping)
        self._tables.send(by_index, rows_of(by_index, PAGE_SIZE, height), slot_mapping)
        if not keeps:
            states = torch.from_numpy(batch.states).to(self.device)
            to = self._features if batch.from_target else self._workspace.states
            to[: len(states), : states.shape[1]] = states
        self._graphs.run(
            ("rows", padded, batch.from_target, keeps, pool.addresses, only_keys),
            lambda: self._slots(padded, batch.from_target, keeps, pool, only_keys),
        )

    def _slots(self, rows: int, from_target: bool, keeps: bool, pool: HeadPool, only_keys: bool) -> None:
        weights, workspace, tables = self.weights, self._workspace, self._tables.tables(rows)
        rope_positions = self._rope_positions[:rows]
        torch.sub(tables.positions, 1, out=rope_positions)
        rope_positions.clamp_(min=0)
        states = workspace.states
        if keeps:
            states = fuse(weights, workspace, pool.features, self._tables.sources(rows), rows)
        elif from_target:
            states = fuse(weights, workspace, self._features, None, rows)
        tokens, hidden = self._tables.tokens(rows), workspace.hidden[0]
        args = (tokens, states, None, tables, rope_positions, pool, PAGE_SIZE, hidden)
        run_head_rows(weights, workspace, *args, only_keys=only_keys)
        if not only_keys:
            feed_back(weights, workspace, hidden, rows)

    def _pick(self, outputs: int) -> None:
        """Compute the logits of the wanted rows of the last pass."""
        pick_rows(self._workspace.output, self._tables.output_rows(outputs), self._workspace.picked)
        run_draft_lm_head(self.weights, self._workspace, self._workspace.picked, outputs)

    def _set_noise(self, noise: ChainNoise | None, count: int) -> int:
        """Send the requests' seeds and temperatures. Returns the candidates per token that a chance needs."""
        if noise is None or not noise.temperatures.any():
            self._temperatures.zero_()
            return 0
        self._temperatures[:count] = torch.from_numpy(noise.temperatures)
        self._seeds[:count] = torch.from_numpy(noise.seeds.view(np.int64))
        return RIVALS

    def _draft_chains(self, requests: int, longest: int, rivals: int, pool: Pool) -> None:
        weights, workspace, chains = self.weights, self._workspace, self._chains
        pages = self._tables.tables(1).pages
        self._pick(requests)
        sources: torch.Tensor | None = self._tables.output_rows(requests)
        states = self._last_states
        self._draft_next(requests, 0, rivals)
        for number in range(longest - 1):
            hidden = workspace.hidden[(number + 1) % 2]
            tokens = chains.tokens[number * requests : (number + 1) * requests]
            positions, slot_mapping, contiguous_until, counts, tile_pages = chains.lines[number, :, :requests]
            tables = RowTables(
                positions,
                slot_mapping,
                contiguous_until,
                None,
                self._row_numbers[:requests],
                counts,
                tile_pages,
                pages,
            )
            rope_positions = self._rope_positions[:requests]
            torch.sub(positions, 1, out=rope_positions)
            rope_positions.clamp_(min=0)
            run_head_rows(
                weights, workspace, tokens, states, sources, tables, rope_positions, pool, PAGE_SIZE, hidden
            )
            run_draft_lm_head(weights, workspace, workspace.output, requests)
            self._draft_next(requests, number + 1, rivals)
            states, sources = feed_back(weights, workspace, hidden, requests), None

    def _draft_next(self, requests: int, number: int, rivals: int) -> None:
        """Draft the token of this depth for each request."""
        weights, chains, vocab = self.weights, self._chains, self.config.draft_vocab_size
        logits, ids, heat = self._workspace.logits, weights.target_ids, self._temperatures
        found, children = chains.candidates[rivals], chains.children[rivals][number]
        first = chains.lines[0, 0, :requests]  # KV indices, and positions, of the first drafted tokens
        score_draft_tokens(logits, vocab, ids, heat, self._seeds, first, number, found, requests)
        write_draft_tokens(found, children, chains.tokens, chains.chances[number], heat, requests, requests)

    def _make_room(self, length: int) -> None:
        """Allocate buffers for contexts of this length."""
        if length > self._longest:
            self._longest = min(bucket(length) * 2, max(length, self.config.max_position))
            self._workspace = make_head_workspace(self.weights, self._most, self._longest)
            self._graphs = Graphs(self.device)  # captured graphs hold addresses


class _Chains:
    """Drafted chains on the device, and the rows that compute them: one per request in every pass."""

    def __init__(self, longest: int, max_rows: int, weights: HeadWeights) -> None:
        device = weights.norm.device
        self.longest = longest
        self.lines = torch.zeros((longest, CHAIN_LINES, max_rows), dtype=torch.int32, device=device)
        self.tokens = torch.zeros(longest * max_rows, dtype=torch.int32, device=device)
        self.chances = torch.zeros((longest, max_rows), device=device)
        size = weights.config.draft_vocab_size
        self.candidates = {
            rivals: draft_candidates_for(max_rows, size, 1 + rivals, device) for rivals in (0, RIVALS)
        }
        nowhere = [0, 0, -1]
        lines = [[[[[number, 1, 0], nowhere]] + [[nowhere, nowhere]] * RIVALS] for number in range(longest)]
        children = torch.tensor(lines, dtype=torch.int32, device=device)  # see `write_draft_tokens`
        self.children = {rivals: children[:, :, : 1 + rivals].contiguous() for rivals in self.candidates}

    def send(self, rows: ForwardBatch, requests: int) -> None:
        """Send the positions and KV slots of each request's drafted tokens."""
        count, stride = rows.num_requests, rows.page_tables.shape[1]
        first = rows.context_lengths + np.diff(rows.row_offsets)
        index = first[None, :] + np.arange(self.longest, dtype=np.int32)[:, None]
        page = np.minimum(index // PAGE_SIZE, stride - 1)  # shorter chains have no pages there
        known = index // PAGE_SIZE < stride
        number = np.arange(count)
        slot_mapping = rows.page_tables[number, page] * PAGE_SIZE + index % PAGE_SIZE
        lines = np.zeros((self.longest, CHAIN_LINES, requests), dtype=np.int32)
        lines[:, 1] = -1
        lines[:, :, :count] = np.stack(
            (
                np.where(known, index, 0),
                np.where(known, slot_mapping, -1),
                index + 1,
                known,
                np.broadcast_to(number * stride, index.shape),
            ),
            axis=1,
        )
        self.lines[:, :, :requests] = torch.from_numpy(lines)


def up_to_least(
    tokens: Int32Array, chances: Float32Array, most: Sequence[int], least_chance: float
) -> HeadChains:
    """The chains, cut where head_chains.py ends them; `chances` [requests, longest] are by token."""
    kept = (chances >= least_chance) & (np.arange(chances.shape[1]) < np.array(most)[:, None])
    goes_on = chances >= EXTEND_FACTOR * least_chance
    kept[:, 1:] &= goes_on[:, :-1]
    return HeadChains(tokens, chances, np.logical_and.accumulate(kept, axis=1).sum(axis=1, dtype=np.int32))
