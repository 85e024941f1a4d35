"""medusa: several heads read the target's last hidden state; head i guesses the token i + 1 ahead.

All guesses come from one state, so the guesses of a level are the same below every node, and the full tree is
the product of the levels. Calibrated heads keep the paths that were right most often; others keep the paths
that the heads find likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.heads import MedusaRunner
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Target, UnboundDrafter
from paceline.draft.growing_tree import GrowingTree, Scoring
from paceline.draft.growth import make_tree, to_draft_trees
from paceline.draft.heads.head_options import HeadOptions, find_head
from paceline.draft.heads.last_state import LastStateDrafter
from paceline.draft.heads.ranked import Path, make_ranked_tree
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.vocabulary import Vocabulary, trimmed_vocabulary
from paceline.errors import HeadMismatchError
from paceline.models.heads.fingerprint import check_fingerprint
from paceline.models.heads.medusa import load_medusa
from paceline.verify.sampling import Sampler

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.kv.cache import KVCache


class MedusaDrafter(LastStateDrafter):
    """Drafts with Medusa heads."""

    name = "medusa"
    Options = HeadOptions

    def __init__(
        self,
        runner: MedusaRunner,
        num_heads: int,
        vocabulary: Vocabulary,
        target: Target,
        kv: KVCache,
        paths: Sequence[Path] = (),
        least_chance: float = 0.0,
    ) -> None:
        """`paths` are the calibrated shape of the tree, if there is one: see ranked.py.

        A chain ends where the heads give it a chance below `least_chance`.
        """
        super().__init__(target, kv)
        self.draft_ids = vocabulary.target_ids
        self._runner = runner
        self._num_heads = num_heads
        self._paths = paths
        self._scoring = Scoring(vocabulary, Sampler(vocabulary.target_size), least_chance)

    @classmethod
    def load(cls, options: HeadOptions, target: Target) -> UnboundDrafter:
        """The drafter with the heads that the options name, on the target's backend."""
        from paceline.backends.load import load_medusa_runner

        head = load_medusa(find_head(options, cls.name, target))
        config = head.config
        ids = head.draft_ids
        target_vocab = config.draft_vocab_size if ids is None else target.config.vocab_size
        if (config.hidden_size, target_vocab) != (target.config.hidden_size, target.config.vocab_size):
            raise HeadMismatchError(
                f"the heads {head.source} are for a target with {target_vocab} tokens and hidden size "
                f"{config.hidden_size}, but this one has {target.config.vocab_size} and "
                f"{target.config.hidden_size}. Use heads that were trained for it."
            )
        if ids is not None and (
            ids.min() < 0 or ids.max() >= target_vocab or len(set(ids.tolist())) != len(ids)
        ):
            raise HeadMismatchError(f"the heads {head.source} guess tokens that this target does not have.")
        check_fingerprint(config.target, target.fingerprint, str(head.source), options.any_target)
        runner = load_medusa_runner(head, target.backend, target.loaded)
        least_chance = runner.least_chance if options.min_prob is None else options.min_prob
        vocabulary = trimmed_vocabulary(ids, target_vocab)
        make = partial(cls, runner, config.num_heads, vocabulary, target)
        return UnboundDrafter(cls.name, partial(make, paths=head.paths, least_chance=least_chance))

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        pairs = zip(requests, plans, strict=True)
        trees = [self._tree(request, plan) if self._is_ready(request) else None for request, plan in pairs]
        growing = [tree for tree in trees if tree is not None]
        if growing:
            states = np.stack([self._states[tree.context.request][1] for tree in growing])
            guesses = self._runner.run(states)
            for number, tree in enumerate(growing):
                tree.grow_levels(guesses[:, number])
        return to_draft_trees(trees)

    def _tree(self, request: Request, plan: DraftPlan) -> GrowingTree:
        context = Context(request, request.token_ids, self._kv.page_tables[request.slot], plan.budget)
        plan = replace(plan, depth=min(plan.levels, self._num_heads))
        if plan.branching > 1 and self._paths:
            return make_ranked_tree(context, plan, self._scoring, self._sampling, self._paths)
        return make_tree(context, plan, self._scoring, self._sampling)
