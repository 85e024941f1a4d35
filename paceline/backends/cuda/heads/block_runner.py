"""CudaBlockRunner: parallel draft heads in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from paceline.backends.block_chains import chains_by_guesses
from paceline.backends.cuda.backend import PAGE_SIZE, CudaBackend
from paceline.backends.cuda.decode.draft_networks import BlockNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape
from paceline.backends.cuda.heads.block import BlockWorkspace, make_block_workspace, run_blocks, write_context
from paceline.backends.cuda.heads.block_weights import BlockWeights, load_block_weights
from paceline.backends.cuda.heads.head import HeadPool
from paceline.backends.cuda.heads.head_pools import HeadPools
from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.drafting.block_rows import Anchors, spare_pages
from paceline.backends.cuda.passes.graphs import Graphs, bucket, buckets, device_seconds
from paceline.backends.cuda.passes.host_passes import FIRST_LONGEST, MAX_PAGES
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.tables import DeviceTables, rows_of
from paceline.backends.heads import BlockGuesses, BlockRunner, ChainNoise, HeadBatch, HeadChains, first_slots
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch, KVPool
from paceline.models.heads.checkpoint import HeadCheckpoint

MAX_BLOCKS = 128  # most blocks of a pass: each needs spare pages in every pool


class CudaBlockRunner(HeadPools, BlockRunner):
    """A BlockRunner of Triton kernels that shares weights with its target."""

    def __init__(self, weights: BlockWeights, max_rows: int) -> None:
        block, model = weights.block, weights.model
        super().__init__(weights, model.device, model.dtype, None, len(block.layers))
        self.weights: BlockWeights = weights
        self.max_rows = min(max_rows, MAX_BLOCKS * block.size)
        self._most = bucket(self.max_rows)
        self._blocks = bucket(max(1, self.max_rows // block.size))
        self._spare_pages = self._blocks * spare_pages(block.size, PAGE_SIZE)
        self._longest = min(FIRST_LONGEST, self.config.max_position)
        self._tables = DeviceTables(self._most, MAX_PAGES, self.device)
        self._features = torch.zeros((self._most, self.config.feature_width), device=self.device)
        self._ids = None if weights.target_ids is None else weights.target_ids.cpu().numpy()
        self._place: tuple[int, ...] = ()
        self._anchors = torch.zeros((4, self._blocks), dtype=torch.int32, device=self.device)
        self._pages = self._page_tables(self._longest)
        self._graphs = Graphs(self.device)
        self._workspace: BlockWorkspace | None = None  # of the last pool

    @classmethod
    def load(cls, checkpoint: HeadCheckpoint, beside: CudaBackend, max_rows: int) -> CudaBlockRunner:
        """A runner with the checkpoint's weights, in the dtype and on the device of the target."""
        return cls(load_block_weights(checkpoint, beside.weights), max_rows)

    def network(
        self,
        pool: Pool,
        feature_layers: tuple[int, ...],
        shape: DraftShape,
        max_requests: int,
        longest: int,
        page_size: int,
    ) -> BlockNetwork:
        """The head inside the steps of a decode loop."""
        return BlockNetwork(self.weights, pool, feature_layers, shape, max_requests, longest, page_size)

    def prepare(self, pool: KVPool) -> None:
        """Compile kernels and capture a graph for every bucket of rows; time the largest."""
        for rows in buckets(min(self.max_rows, pool.num_pages * PAGE_SIZE - 1, self.config.max_position - 2)):
            given = first_slots(pool, PAGE_SIZE, rows)
            batch = replace(given, rows=replace(given.rows, context_lengths=np.zeros(1, np.int32)))
            self.write_context(batch)
        if (seconds := device_seconds(self.device, lambda: self.write_context(batch))) is not None:
            self.catch_up_seconds = seconds / rows

    @torch.inference_mode()
    def write_context(self, batch: HeadBatch) -> None:
        """Write the keys and values of committed tokens in all layers."""
        rows, pool = batch.rows, cast(HeadPool, batch.rows.pool)
        assert rows.num_rows <= self.max_rows, f"{rows.num_rows} rows, but max_rows is {self.max_rows}"
        workspace = self._workspace_for(pool, int(rows.positions.max()) + 1)
        height = tile_height(self.config.num_heads, self.config.num_kv_heads)
        self._tables.send(rows, rows_of(rows, PAGE_SIZE, height), batch.slot_mapping)
        keeps = batch.slot_mapping is not None
        if not keeps:
            self._features[: rows.num_rows] = torch.from_numpy(batch.states).to(self.device)
        features, padded = pool.features if keeps else self._features, bucket(rows.num_rows)

        def write() -> None:
            tables = self._tables.tables(padded)
            sources = self._tables.sources(padded) if keeps else None
            where = tables.positions, tables.slot_mapping
            write_context(self.weights, workspace, features, sources, *where, pool)

        self._graphs.run(("context", padded, keeps), write)

    @torch.inference_mode()
    def run_blocks(self, blocks: ForwardBatch) -> None:
        """Run one block per request; slots beyond the request's pages use spare pages."""
        pool, count = cast(HeadPool, blocks.pool), blocks.num_requests
        workspace = self._workspace_for(pool, int(blocks.positions.max()) + 1)
        lines = np.zeros((4, bucket(count)), np.int32)
        lines[2] = -1
        starts = blocks.row_offsets[:-1]
        begins = np.arange(count, dtype=np.int32) * self._pages.shape[1]
        lines[:, :count] = np.stack((blocks.tokens[starts], blocks.context_lengths, 0 * begins, begins))
        self._anchors[:, : lines.shape[1]] = torch.from_numpy(lines)
        pages = torch.from_numpy(np.maximum(blocks.page_tables, 0))
        self._pages[:count, : pages.shape[1]] = pages[:, : self._pages.shape[1]]
        tokens, positions, valid, pages_begin = self._anchors[:, : lines.shape[1]]
        anchors = Anchors(tokens, positions, valid, pages_begin, self._pages.view(-1))

        def run() -> None:
            run_blocks(self.weights, workspace, anchors, self._pages.shape[1], pool)

        self._graphs.run(("blocks", lines.shape[1]), run)

    @torch.inference_mode()
    def guess(self, slots: Int32Array, previous: Int32Array) -> BlockGuesses:
        """Logits of rows of the last blocks, and their confidences."""
        assert self._workspace is not None, "run_blocks comes first"
        layers, weights = self._workspace.layers, self.weights
        rows, before = (torch.from_numpy(ids).to(self.device).long() for ids in (slots, previous))
        logits = layers.logits[rows]
        extra = None if weights.markov is None else weights.markov.before[before]
        if extra is not None and weights.markov is not None:
            logits = logits + F.linear(extra, weights.markov.after).float()
        if weights.selector is not None:
            pair, scales = weights.selector.pair, self._workspace.selecting[rows]
            scored = F.linear((pair.before[before] * scales).to(pair.after.dtype), pair.after).float()
            logits = torch.where(logits >= self._workspace.least[rows, None], logits + scored, -torch.inf)
        if weights.confidence is None:
            return BlockGuesses(logits.cpu().numpy(), None)
        read, head = layers.attention_input, weights.confidence
        factor = torch.rsqrt(read.squares[rows].sum(-1, keepdim=True) / read.size + read.eps)
        outputs = (read.rows[rows].float() * factor)[:, : self.config.hidden_size]
        if extra is not None and weights.block.confidence_with_markov:
            outputs = torch.cat((outputs, extra[:, : weights.block.markov_rank].float()), dim=-1)
        chances = torch.sigmoid(outputs @ head.weight + head.bias)
        return BlockGuesses(logits.cpu().numpy(), chances.cpu().numpy())

    def run_chains(
        self, blocks: ForwardBatch, most: Sequence[int], least_chance: float, noise: ChainNoise
    ) -> HeadChains:
        """The best chain from each block."""
        self.run_blocks(blocks)
        return chains_by_guesses(self.guess, blocks, self.weights.block, self._ids, most, least_chance, noise)

    def _workspace_for(self, pool: HeadPool, length: int) -> BlockWorkspace:
        """The buffers for passes over this pool and contexts of this length, made anew if they do not fit."""
        if length > self._longest:
            self._longest = min(bucket(length) * 2, max(length, self.config.max_position))
            self._pages = self._page_tables(self._longest)
            self._workspace = None
        if self._workspace is None or self._place != pool.addresses:
            self._place, self._graphs = pool.addresses, Graphs(self.device)
            self._workspace = make_block_workspace(
                self.weights, pool, self._most, self._blocks, self._longest, PAGE_SIZE
            )
        return self._workspace

    def _page_tables(self, longest: int) -> torch.Tensor:
        """A buffer for the page tables of all blocks, for contexts of this length."""
        pages = -(-longest // PAGE_SIZE)
        return torch.zeros((self._blocks, pages), dtype=torch.int32, device=self.device)
