"""dflash and dspark: parallel heads, which draft a whole block in one pass.

    tokens      x0   x1   x2   x3            x3 is the last token, the anchor
    features    h0   h1   h2                 the head's keys and values, written once per committed token
    block                      x3 M  M  M    DFlash: the MASK slots guess x4, x5, x6; DSpark: all four slots

A level of a tree is a slot of the block, so a tree costs no pass beside that of the block. The logits of a
slot depend on the drafted token before it where the head has a Markov head. The best `budget` nodes of the
product of all slots are proposed (JetSpec).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.async_decoding import DeviceDraft
from paceline.backends.heads import BlockRunner, HeadBatch, HeadChains
from paceline.backends.options import BackendOptions
from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardBatch
from paceline.core.tree_shapes import ROOT
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Target
from paceline.draft.growing_tree import GrowingTree, frontier_rows
from paceline.draft.growth import make_tree, to_draft_trees
from paceline.draft.heads.head_drafter import PagedHeadDrafter, noise_of
from paceline.draft.heads.head_pages import HeadPages
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.draft_pass import Part, Passes
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import BlockConfig

if TYPE_CHECKING:
    from paceline.core.request import Request


class BlockPasses(Passes[None]):
    """Passes of a parallel head: those over committed tokens only write keys and values."""

    def __init__(self, runner: BlockRunner, pages: HeadPages, block: BlockConfig) -> None:
        super().__init__(pages, runner.page_size, runner.max_rows)
        self._runner, self._pages, self._block = runner, pages, block

    def run(self, parts: Sequence[Part]) -> None:
        spans = [(part.context, part.start, part.start + len(part.tokens)) for part in parts]
        rows = self.batch(parts)
        if self._runner.keeps_features:
            nothing: Float32Array = np.empty((0, 0), np.float32)
            self._runner.write_context(HeadBatch(rows, nothing, True, self._pages.kv_slots(spans)))
        else:
            self._runner.write_context(HeadBatch(rows, self._pages.features(spans), from_target=True))

    def run_blocks(self, contexts: Sequence[Context]) -> None:
        """Run the block behind each context, whose tokens before the last are computed."""
        self._runner.run_blocks(self._blocks(contexts))

    def chains(self, contexts: Sequence[Context], lengths: Sequence[int], least_chance: float) -> HeadChains:
        """A chain of the best guesses after each context, of at most its length; catches up first."""
        self.compute(contexts)
        most = [min(length, self._block.num_drafts) for length in lengths]
        return self._runner.run_chains(self._blocks(contexts), most, least_chance, noise_of(contexts))

    def _blocks(self, contexts: Sequence[Context]) -> ForwardBatch:
        masks = [self._block.mask_token_id] * (self._block.size - 1)
        chain = range(-1, self._block.size - 1)
        parts = [
            Part(context, len(context.tokens) - 1, [context.tokens[-1], *masks], chain)
            for context in contexts
        ]
        # the slots of a block have no pages: the tables reach to the anchor
        return self.batch(parts, room=1 - self._block.size)


class BlockDrafter(PagedHeadDrafter[BlockRunner]):
    """Drafts with a parallel head."""

    first_index = 0
    _passes: BlockPasses

    @property
    def _block(self) -> BlockConfig:
        assert self._shape.block is not None, "the head is a parallel one"
        return self._shape.block

    @classmethod
    def load_runner(cls, head: HeadCheckpoint, options: BackendOptions, target: Target) -> BlockRunner:
        from paceline.backends.load import load_block_runner

        return load_block_runner(head, options, target.max_rows, target.loaded)

    def _make_passes(self) -> BlockPasses:
        return BlockPasses(self._runner, self._pages, self._block)

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        draft = super().device_draft(replace(plan, depth=min(plan.levels, self._block.num_drafts)))
        at_once = max(1, self._runner.max_rows // self._block.size)
        return None if draft is None else replace(draft, max_requests=at_once)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        contexts = self._pages.open(requests, [plan.budget for plan in plans])
        at_once = max(1, self._runner.max_rows // self._block.size)
        if len(requests) <= at_once and all(map(self._is_one_call, requests, plans)):
            return self._propose_chains(contexts, plans, self._passes.chains)
        trees = [
            None if context is None else self._tree(context, plan.shrunk(context.room))
            for context, plan in zip(contexts, plans, strict=True)
        ]
        growing = [tree for tree in trees if tree is not None]
        self._passes.compute([tree.context for tree in growing])
        for start in range(0, len(growing), at_once):
            self._grow(growing[start : start + at_once])
        return to_draft_trees(trees)

    def _tree(self, context: Context, plan: DraftPlan) -> GrowingTree:
        plan = replace(plan, depth=min(plan.levels, self._block.num_drafts))
        return make_tree(context, plan, self._scoring, self._sampling, best_first=True)

    def _grow(self, trees: Sequence[GrowingTree]) -> None:
        """Run the blocks of these trees, and grow each of them to its end."""
        self._passes.run_blocks([tree.context for tree in trees])
        for level in range(self._block.num_drafts):
            slots: list[int] = []
            previous: list[int] = []
            for number, tree in enumerate(trees):
                slots += [number * self._block.size + self._block.first_guess + level] * len(tree.frontier)
                previous += [
                    tree.context.tokens[-1] if node == ROOT else tree.tokens[node] for node in tree.frontier
                ]
            if not slots:
                return
            guesses = self._runner.guess(np.array(slots, np.int32), np.array(previous, np.int32))
            for tree, rows in zip(trees, frontier_rows(trees), strict=True):
                if tree.frontier:
                    confidences = None if guesses.confidences is None else guesses.confidences[rows]
                    tree.grow(guesses.logits[rows], confidences)


class DFlashDrafter(BlockDrafter):
    """DFlash and JetSpec heads."""

    name = "dflash"


class DSparkDrafter(BlockDrafter):
    """DSpark heads: DFlash with a Markov head and a confidence head."""

    name = "dspark"
