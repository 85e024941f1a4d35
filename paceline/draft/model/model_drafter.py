"""The base of drafters that run a model (draft_model, layerskip): one pass per level of the trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.features import Features
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, DraftSampling
from paceline.draft.growing_tree import Scoring, frontier_rows
from paceline.draft.growth import make_trees, to_draft_trees
from paceline.draft.model.draft_cache import DraftCache
from paceline.draft.model.draft_pass import DraftRunner
from paceline.draft.model.vocabulary import Vocabulary
from paceline.verify.sampling import Sampler

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.core.request import Request
    from paceline.core.verdict import Verdict


class ModelDrafter(Drafter):
    """Drafts with a model. It catches up when it proposes, so requests without drafts cost nothing."""

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        cache: DraftCache,
        *,
        vocab_size: int,
        sampling: DraftSampling,
    ) -> None:
        """`cache` is the draft model's, `vocab_size` too."""
        self._backend = backend
        self.kv = self._cache = cache
        self._runner = DraftRunner(backend, cache, vocab_size)
        self._sampling = sampling
        self._scoring = Scoring(vocabulary, Sampler(vocabulary.target_size))

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        contexts = self._cache.open(requests, [plan.budget for plan in plans])
        trees = make_trees(contexts, plans, self._scoring, self._sampling)
        growing = [tree for tree in trees if tree is not None]
        if growing:
            logits = self._runner.catch_up([tree.context for tree in growing])
        while growing:
            for tree, rows in zip(growing, frontier_rows(growing), strict=True):
                tree.grow(logits[rows])
            growing = [tree for tree in growing if tree.frontier]
            if growing:
                logits = self._runner.run([tree.part() for tree in growing])
        for tree in filter(None, trees):
            self._cache.keep_drafted(tree.context, tree.chain_in_place())
        return to_draft_trees(trees)

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        for request, verdict in zip(requests, verdicts, strict=True):
            in_place = verdict.accepted == tuple(range(len(verdict.accepted)))
            self._cache.settle(request, in_place)

    def forget(self, request: Request) -> None:
        self._cache.forget(request)
