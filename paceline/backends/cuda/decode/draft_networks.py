"""DraftNetwork: learned heads and draft models inside the steps of a decode loop.

They compute the rows given by the step's tables, with the target's page tables and their own KV pool, and
return the logits of rows whose children are drafted next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from paceline.backends.cuda.decode.draft_shape import DraftShape
from paceline.backends.cuda.heads.block import make_block_workspace, run_blocks, slot_logits, write_context
from paceline.backends.cuda.heads.block_weights import BlockWeights
from paceline.backends.cuda.heads.head import (
    feed_back,
    fuse,
    make_head_workspace,
    run_draft_lm_head,
    run_head_rows,
)
from paceline.backends.cuda.heads.head_weights import HeadWeights
from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.drafting.block_rows import Anchors
from paceline.backends.cuda.kernels.drafting.draft_inputs import pick_rows
from paceline.backends.cuda.model import run_layers
from paceline.backends.cuda.native.persistent import PersistentLayers
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.workspace import Room, make_workspace
from paceline.backends.cuda.weights.lm_head import run_lm_head
from paceline.backends.cuda.weights.model_weights import Weights


@dataclass(frozen=True)
class DraftRows:
    """The rows of one pass of the drafter."""

    tokens: torch.Tensor  # int32 [rows]
    tables: RowTables
    rope_positions: torch.Tensor  # int32 [rows] in a head: one less than the positions
    sources: torch.Tensor  # int32 [rows] the row whose feature or state each reads


class DraftNetwork(Protocol):
    """A drafter that runs inside a step."""

    shape: DraftShape
    pool: Pool
    catch_up_rows: int  # most tokens of a request that it catches up on in a step
    always: int  # fixed number of tokens that it catches up on; 0: the newly accepted ones
    reads_own_features: bool  # a row reads the feature of its own token; False: of the token before
    at_once: bool  # one pass drafts all levels after the first
    tile_height: int
    vocab_size: int
    target_ids: torch.Tensor | None  # int32 [vocab_size] the target's ids; None: the same vocabulary
    feature_layers: tuple[int, ...]  # of the target
    features: torch.Tensor | None  # float32 [target's rows, width] written by the target's pass

    def catch_up(self, rows: DraftRows, last: torch.Tensor, roots: Anchors) -> torch.Tensor:
        """Logits [requests, vocab] after the roots, after a pass over newly accepted tokens.

        `last` [requests]: the rows of the roots, or, with `reads_own_features`, of the tokens before them."""
        ...

    def extend(self, rows: DraftRows) -> torch.Tensor:
        """Logits [rows, vocab] after the tokens that the previous pass drafted; `at_once`: of all levels."""
        ...


def _most_rows(shape: DraftShape, catch_up_rows: int) -> int:
    """The most rows of a request in one pass of its drafter."""
    return max(catch_up_rows, *(len(shape.inner(depth)) for depth in range(shape.levels + 1)))


class HeadNetwork:
    """An eagle3, eagle or mtp head. Catching up computes accepted tokens again, with the target's features.

    Rows of a P-EAGLE head after the root read a mask instead of drafted tokens, so one pass computes them
    all.
    """

    always = 0
    reads_own_features = False

    def __init__(
        self,
        weights: HeadWeights,
        pool: Pool,
        feature_layers: tuple[int, ...],
        shape: DraftShape,
        max_requests: int,
        longest: int,
        page_size: int,
    ) -> None:
        """Buffers for steps of at most `max_requests` requests of at most `longest` tokens."""
        config = weights.config
        self.weights, self.pool, self.shape, self.page_size = weights, pool, shape, page_size
        self.feature_layers = feature_layers
        self.catch_up_rows = shape.levels + 1
        self.tile_height = tile_height(*weights.head_groups)
        self.vocab_size = config.draft_vocab_size
        self.target_ids: torch.Tensor | None = weights.target_ids
        rows = max_requests * _most_rows(shape, self.catch_up_rows)
        self._workspace = make_head_workspace(weights, rows, longest)
        width = config.feature_width
        self._kept = torch.zeros((max_requests * len(shape), width), device=weights.norm.device)
        self.features: torch.Tensor | None = self._kept
        self._passes = 0
        self._states = self._workspace.states
        self.at_once = weights.mask is not None
        self._first = torch.zeros(rows, dtype=torch.int32, device=weights.norm.device)
        self._mask_tokens = self._first + (config.mask_token_id or 0)

    def catch_up(self, rows: DraftRows, last: torch.Tensor, roots: Anchors) -> torch.Tensor:
        workspace = self._workspace
        states = fuse(self.weights, workspace, self._kept, rows.sources, len(rows.tokens))
        self._passes = 0
        self._run(rows, states, None)
        pick_rows(workspace.output, last, workspace.picked)
        run_draft_lm_head(self.weights, workspace, workspace.picked, len(last))
        return workspace.logits

    def extend(self, rows: DraftRows) -> torch.Tensor:
        weights, count = self.weights, len(rows.tokens)
        if weights.mask is None:
            self._run(rows, self._states, rows.sources)
        else:
            states = fuse(weights, self._workspace, weights.mask, None, 1)
            self._run(replace(rows, tokens=self._mask_tokens[:count]), states, self._first[:count])
        run_draft_lm_head(self.weights, self._workspace, self._workspace.output, count)
        return self._workspace.logits

    def _run(self, rows: DraftRows, states: torch.Tensor, sources: torch.Tensor | None) -> None:
        weights, workspace = self.weights, self._workspace
        hidden = workspace.hidden[self._passes % 2]  # double buffer: the other one has the last states
        tables, rope_positions, size = rows.tables, rows.rope_positions, self.page_size
        run_head_rows(
            weights, workspace, rows.tokens, states, sources, tables, rope_positions, self.pool, size, hidden
        )
        self._states = feed_back(weights, workspace, hidden, len(rows.tokens))
        self._passes += 1


class BlockNetwork:
    """A parallel head. It catches up by writing keys and values, and drafts all levels in one pass."""

    always = 0
    reads_own_features = True
    at_once = False  # the Markov head reads the token drafted before

    def __init__(
        self,
        weights: BlockWeights,
        pool: Pool,
        feature_layers: tuple[int, ...],
        shape: DraftShape,
        max_requests: int,
        longest: int,
        page_size: int,
    ) -> None:
        """Buffers for steps of at most `max_requests` requests of at most `longest` tokens."""
        config = weights.config
        self.weights, self.shape, self.feature_layers = weights, shape, feature_layers
        self.pool = pool
        self.catch_up_rows = shape.levels + 1
        self.tile_height = tile_height(config.num_heads, config.num_kv_heads)
        self.vocab_size = config.draft_vocab_size
        self.target_ids: torch.Tensor | None = weights.target_ids
        rows = max_requests * self.catch_up_rows
        drafting = max_requests * max(len(shape.inner(depth)) for depth in range(shape.levels))
        room = rows, max_requests, longest, page_size, drafting
        self._workspace = make_block_workspace(weights, pool, *room)
        self._pages = -(-longest // page_size)  # of a request's page table
        width = config.feature_width
        self._kept = torch.zeros((max_requests * len(shape), width), device=weights.model.device)
        self.features: torch.Tensor | None = self._kept
        self._slot = self._requests = 0

    def catch_up(self, rows: DraftRows, last: torch.Tensor, roots: Anchors) -> torch.Tensor:
        positions, slot_mapping = rows.tables.positions, rows.tables.slot_mapping
        where = rows.sources, positions, slot_mapping, self.pool
        write_context(self.weights, self._workspace, self._kept, *where)
        run_blocks(self.weights, self._workspace, roots, self._pages, self.pool)
        self._slot, self._requests = self.weights.block.first_guess, len(roots.tokens)
        return self._logits(roots.tokens)

    def extend(self, rows: DraftRows) -> torch.Tensor:
        self._slot += 1
        return self._logits(rows.tokens)

    def _logits(self, previous: torch.Tensor) -> torch.Tensor:
        return slot_logits(self.weights, self._workspace, self._slot, previous, self._requests)


class ModelNetwork:
    """A draft model with the target's vocabulary.

    Its keys and values of accepted tokens are valid, but the last token's may be missing, so it catches up on
    two tokens.
    """

    catch_up_rows = always = 2
    reads_own_features = at_once = False
    target_ids: torch.Tensor | None = None
    feature_layers: tuple[int, ...] = ()
    features: torch.Tensor | None = None

    def __init__(
        self,
        weights: Weights,
        pool: Pool,
        shape: DraftShape,
        max_requests: int,
        longest: int,
        page_size: int,
        vocab_size: int,
    ) -> None:
        """`vocab_size` is the target's: ids beyond it are padding."""
        config = weights.config
        self.weights, self.pool, self.shape, self.page_size = weights, pool, shape, page_size
        self.tile_height = tile_height(*weights.head_groups)
        self.vocab_size = min(vocab_size, config.vocab_size)
        rows = max_requests * _most_rows(shape, self.catch_up_rows)
        self._workspace = make_workspace(weights, Room.of(rows, longest))
        self._megakernel = PersistentLayers(weights, self._workspace, pool, page_size)

    def catch_up(self, rows: DraftRows, last: torch.Tensor, roots: Anchors) -> torch.Tensor:
        workspace = self._workspace
        self._run(rows)
        pick_rows(workspace.attention_input, last, workspace.selected)
        run_lm_head(self.weights, workspace, workspace.selected, len(last))
        return workspace.logits

    def extend(self, rows: DraftRows) -> torch.Tensor:
        workspace = self._workspace
        self._run(rows)
        run_lm_head(self.weights, workspace, workspace.attention_input, len(rows.tokens))
        return workspace.logits

    def _run(self, rows: DraftRows) -> None:
        known = rows.tokens, rows.tables
        if not self._megakernel.run(*known):
            run_layers(self.weights, self._workspace, *known, self.pool, self.page_size)
