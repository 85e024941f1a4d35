"""eagle3 and eagle: a one-layer head reads the target's hidden states (features) and drafts.

    tokens      x0   x1   x2   x3        x3 is the last token; the target has computed x0 to x2
    features    h0   h1   h2
    slots          (h0,x1) (h1,x2) (h2,x3) -> logits of the root's children, and the state they read

The head catches up when it proposes: one pass over the slots of new tokens, for all requests. Until then only
their features are stored. Then one pass per level of the trees; its slots read the head's own states, and are
computed again with the target's features after verification. Where all trees are greedy or coupled chains,
the host has nothing to decide between these passes, and the runner does all of them in one call.

The slots of a P-EAGLE head after the last token read a mask instead of guesses, so the pass that catches up
has the logits of all levels:

    slots          (h0,x1) (h1,x2) (h2,x3) (mask) (mask)      guess x4, x5 and x6
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.heads import HeadBatch, HeadChains, HeadOutput, HeadRunner
from paceline.backends.options import BackendOptions
from paceline.core.arrays import Float32Array
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Target
from paceline.draft.growing_tree import GrowingTree, frontier_rows
from paceline.draft.growth import make_trees, to_draft_trees
from paceline.draft.heads.head_drafter import Mask, PagedHeadDrafter, noise_of
from paceline.draft.heads.head_pages import HeadPages
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.draft_pass import Part, Passes
from paceline.models.heads.checkpoint import HeadCheckpoint

if TYPE_CHECKING:
    from paceline.core.request import Request


class HeadPasses(Passes[HeadOutput]):
    """Passes of a head."""

    first_position = -1  # a slot has the position of the token whose feature it reads
    # rows before the last ones: a head has one layer, so they need keys and values only, which is cheaper in
    # passes without outputs
    max_before = 24

    def __init__(self, runner: HeadRunner, pages: HeadPages) -> None:
        super().__init__(pages, runner.page_size, runner.max_rows)
        self._runner = runner
        self._pages = pages

    def run(self, parts: Sequence[Part]) -> HeadOutput:
        """The outputs of a pass over committed tokens, which reads the target's features."""
        return self._runner.run(self._committed_batch(parts))

    def chains(self, contexts: Sequence[Context], lengths: Sequence[int], least_chance: float) -> HeadChains:
        """A chain of the best guesses after each context, of at most its length; catches up first."""
        parts = self._last_parts(contexts)
        chains = self._runner.run_chains(
            self._committed_batch(parts, max(lengths)), lengths, least_chance, noise_of(contexts)
        )
        self._keep(parts)
        return chains

    def _committed_batch(self, parts: Sequence[Part], room: int = 0) -> HeadBatch:
        """A pass over committed tokens, with page tables that reach `room` guesses further."""
        # the slot of token j reads the feature of token j - 1
        spans = [(part.context, part.start - 1, part.start - 1 + len(part.tokens)) for part in parts]
        rows = self.batch(parts, room)
        if self._runner.keeps_features:
            return HeadBatch(rows, np.empty((0, 0), np.float32), True, self._pages.kv_slots(spans))
        return HeadBatch(rows, self._pages.features(spans), from_target=True)

    def groups(self, levels: Sequence[int]) -> list[slice]:
        """Which of the contexts with these levels `run_masked` can take at once."""
        most = max(1, (self._runner.max_rows - self.max_before) // max(levels, default=1))
        return [slice(start, start + most) for start in range(0, len(levels), most)]

    def run_masked(self, contexts: Sequence[Context], mask: Mask, levels: Sequence[int]) -> Float32Array:
        """The logits of each context's last slot and of the masks behind it, as many as its levels in all:
        [sum of the levels, draft vocabulary]. Catches up first."""
        parts = self._last_parts(contexts)
        masked = []
        for part, count in zip(parts, levels, strict=True):
            length = len(part.tokens)
            tokens = [*part.tokens, *[mask.token] * (count - 1)]
            outputs = range(length - 1, length + count - 1)
            masked.append(Part(part.context, part.start, tokens, range(-1, len(tokens) - 1), outputs))
        output = self._runner.run(self._masked_batch(parts, masked, mask))
        self._keep(parts)
        return output.logits

    def _masked_batch(self, parts: Sequence[Part], masked: Sequence[Part], mask: Mask) -> HeadBatch:
        """A pass over committed tokens with masks after each part."""
        rows = self.batch(masked)
        spans = [(part.context, part.start - 1, part.start - 1 + len(part.tokens)) for part in parts]
        masks = [len(longer.tokens) - len(part.tokens) for part, longer in zip(parts, masked, strict=True)]
        ends = np.repeat(np.cumsum([len(part.tokens) for part in parts]), masks)  # where each mask belongs
        if self._runner.keeps_features:
            slot_mapping = np.insert(self._pages.kv_slots(spans), ends, -1)
            return HeadBatch(rows, mask.feature[None], True, slot_mapping)
        states = np.insert(self._pages.features(spans), ends, mask.feature, axis=0)
        return HeadBatch(rows, states, from_target=True)

    def run_guesses(self, parts: Sequence[Part], states: Float32Array) -> HeadOutput:
        """The outputs of a pass over tree nodes, which reads the head's own states: [rows, hidden]."""
        return self._runner.run(HeadBatch(self.batch(parts), states, from_target=False))


class GuessedTree:
    """A growing tree, and the states that the slots of its nodes read."""

    def __init__(self, tree: GrowingTree) -> None:
        self.tree = tree
        self._states: dict[int, Float32Array] = {}  # of nodes that have children, each [hidden]

    def grow(self, logits: Float32Array, states: Float32Array) -> None:
        """Add the children of the frontier, given its logits and states: [frontier, ...]."""
        self._states.update(zip(self.tree.frontier, states.copy(), strict=True))
        self.tree.grow(logits)

    def states_of(self, nodes: Sequence[int]) -> list[Float32Array]:
        """The states that these nodes read: those of their parents."""
        return [self._states[self.tree.parents[node]] for node in nodes]


class HeadDrafter(PagedHeadDrafter[HeadRunner]):
    """Drafts with a head that a HeadRunner runs beside the target."""

    _passes: HeadPasses

    @classmethod
    def load_runner(cls, head: HeadCheckpoint, options: BackendOptions, target: Target) -> HeadRunner:
        from paceline.backends.load import load_head_runner

        return load_head_runner(head, options, target.max_rows, target.loaded)

    def _make_passes(self) -> HeadPasses:
        return HeadPasses(self._runner, self._pages)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        contexts = self._pages.open(requests, [plan.budget for plan in plans])
        if self._shape.mask is not None:
            return self._propose_masked(contexts, plans, self._shape.mask)
        if all(map(self._is_one_call, requests, plans)):
            return self._propose_chains(contexts, plans, self._passes.chains)
        return self._grown(make_trees(contexts, plans, self._scoring, self._sampling))

    def _grown(self, trees: Sequence[GrowingTree | None]) -> DraftTrees:
        """These trees, grown by one pass per level."""
        growing = [GuessedTree(tree) for tree in trees if tree is not None]
        if growing:
            grow_level(growing, self._passes.catch_up([guessed.tree.context for guessed in growing]))
        while growing := [guessed for guessed in growing if guessed.tree.frontier]:
            parts = [guessed.tree.part() for guessed in growing]
            pairs = zip(growing, parts, strict=True)
            states = np.stack([state for guessed, part in pairs for state in guessed.states_of(part.nodes)])
            grow_level(growing, self._passes.run_guesses(parts, states))
        return to_draft_trees(trees)

    def _propose_masked(
        self, contexts: Sequence[Context | None], plans: Sequence[DraftPlan], mask: Mask
    ) -> DraftTrees:
        """The drafts of `propose` by a P-EAGLE head: trees through the slots' guesses, the best first."""
        trees = make_trees(contexts, plans, self._scoring, self._sampling, best_first=True)
        levels = {
            tree: plan.shrunk(tree.context.room).levels
            for tree, plan in zip(trees, plans, strict=True)
            if tree is not None
        }
        growing = list(levels)
        for group in self._passes.groups([levels[tree] for tree in growing]):
            chosen = growing[group]
            counts = [levels[tree] for tree in chosen]
            logits = self._passes.run_masked([tree.context for tree in chosen], mask, counts)
            for tree, rows in zip(chosen, np.split(logits, np.cumsum(counts)[:-1]), strict=True):
                tree.grow_levels(rows)
        return to_draft_trees(trees)


class EagleDrafter(HeadDrafter):
    """EAGLE-1 and 2: a head that reads the target's last hidden state."""

    name = "eagle"


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3: a head that reads hidden states of several layers."""

    name = "eagle3"


def grow_level(growing: Sequence[GuessedTree], output: HeadOutput) -> None:
    """Add a level to each tree, given the outputs for their frontiers."""
    for guessed, rows in zip(growing, frontier_rows([guessed.tree for guessed in growing]), strict=True):
        guessed.grow(output.logits[rows], output.states[rows])
