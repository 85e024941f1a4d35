"""assistant: Gemma 4's own drafter, a few layers that read the target's keys and values.

A draft is a chain of steps, or a tree: each reads the state of the step before it and the token guessed
there. All have one position and see the committed tokens only, so a level of a tree is one pass over its
newest nodes, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.base import Backend
from paceline.backends.heads import AssistantRunner
from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardBatch
from paceline.core.tree_shapes import ROOT
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Target, UnboundDrafter
from paceline.draft.growing_tree import GrowingTree, Scoring
from paceline.draft.growth import make_tree, to_draft_trees
from paceline.draft.heads.eagle import GuessedTree, grow_level
from paceline.draft.heads.head_options import HeadOptions, check_features
from paceline.draft.heads.last_state import LastStateDrafter
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.errors import ConfigError
from paceline.kv.pages import pages_for
from paceline.verify.sampling import Sampler

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.kv.cache import KVCache


class AssistantDrafter(LastStateDrafter):
    """Drafts with an assistant over the target's pages."""

    name = "assistant"
    Options = HeadOptions

    def __init__(
        self, runner: AssistantRunner, target: Target, kv: KVCache, least_chance: float = 0.0
    ) -> None:
        """A chain ends where the assistant gives it a chance below `least_chance`."""
        super().__init__(target, kv)
        self._runner = runner
        self._target: Backend = target.loaded
        vocabulary = trimmed_vocabulary(None, target.config.vocab_size)
        self._scoring = Scoring(vocabulary, Sampler(vocabulary.target_size), least_chance)

    @classmethod
    def load(cls, options: HeadOptions, target: Target) -> UnboundDrafter:
        """The drafter with the assistant that the options name, on the target's backend."""
        from paceline.backends.load import load_assistant_runner
        from paceline.models.heads.assistant import load_assistant
        from paceline.models.heads.registry import resolve_head

        check_features(cls.name, target)
        if options.model is None:
            raise ConfigError(
                "the method assistant needs the folder or hub id of one: --draft assistant:PATH."
            )
        runner = load_assistant_runner(load_assistant(resolve_head(options.model, cls.name)), target.loaded)
        return UnboundDrafter(cls.name, partial(cls, runner, target, least_chance=options.min_prob or 0.0))

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        pairs = zip(requests, plans, strict=True)
        trees = [self._tree(request, plan) if self._is_ready(request) else None for request, plan in pairs]
        growing = [GuessedTree(tree) for tree in trees if tree is not None]
        while growing := [guessed for guessed in growing if guessed.tree.frontier]:
            states = np.stack([state for guessed in growing for state in self._states_of(guessed)])
            grow_level(growing, self._runner.run(self._batch([one.tree for one in growing]), states))
        return to_draft_trees(trees)

    def _tree(self, request: Request, plan: DraftPlan) -> GrowingTree:
        context = Context(request, request.token_ids, self._kv.page_tables[request.slot], plan.budget)
        return make_tree(context, plan, self._scoring, self._sampling)

    def _states_of(self, guessed: GuessedTree) -> list[Float32Array]:
        """The states that the newest nodes of a tree read: the target's at the root."""
        tree = guessed.tree
        if tree.frontier == [ROOT]:
            return [self._states[tree.context.request][1]]
        return guessed.states_of(tree.frontier)

    def _batch(self, trees: Sequence[GrowingTree]) -> ForwardBatch:
        """A pass over the newest nodes of the trees, all at the position of their request's last token."""
        sizes = [len(tree.frontier) for tree in trees]
        lasts = [len(tree.context.tokens) - 1 for tree in trees]
        tokens = [
            tree.context.tokens[-1] if node == ROOT else tree.tokens[node]
            for tree in trees
            for node in tree.frontier
        ]
        width = pages_for(max(lasts), self._target.page_size)
        return ForwardBatch(
            tokens=np.array(tokens, dtype=np.int32),
            positions=np.repeat(np.array(lasts, dtype=np.int32), sizes),
            parents=np.full(len(tokens), -1, dtype=np.int32),
            row_offsets=np.cumsum([0, *sizes], dtype=np.int32),
            context_lengths=np.array(lasts, dtype=np.int32),
            page_tables=np.stack([tree.context.pages[:width] for tree in trees]),
            logit_rows=np.arange(len(tokens), dtype=np.int32),
            pool=self._kv.pool_of(self._target),
        )
