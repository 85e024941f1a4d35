"""A draft model over the toy, and engines that let it draft by plans of many kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from paceline.control.controller import Controller, Load, StepPlan
from paceline.core.arrays import Float32Array
from paceline.core.request import Request
from paceline.core.tree_shapes import ROOT
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling, UnboundDrafter
from paceline.draft.growing_tree import GrowingTree
from paceline.draft.growth import make_tree, to_draft_trees
from paceline.draft.model.draft_cache import Context, DraftCache, SharedPages
from paceline.draft.model.draft_model import DraftModelDrafter
from paceline.draft.model.model_drafter import ModelDrafter
from paceline.draft.model.vocabulary import Vocabulary
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.kv.cache import KVCache
from tests.engines import Later, new_engine
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, scribble_free_pages

LONGEST = 256
CacheOf = Callable[[KVCache, Any], DraftCache]


class HazyToy(ToyBackend):
    """The toy, wrong after every third path."""

    def logits_of(self, tokens, positions):
        logits = super().logits_of(tokens, positions)
        wrong = int((tokens * (positions + 3)).sum()) % 3 == 0
        return np.roll(logits, 1) if wrong else logits


def same_ids(size: int = VOCAB, target_size: int = VOCAB) -> Vocabulary:
    ids = np.arange(min(size, target_size), dtype=np.int32)
    return Vocabulary(ids, ids, target_size)


def toy_drafter(
    backend: ToyBackend | None = None,
    sampling: DraftSampling = DraftSampling.COUPLED,
    longest: int = LONGEST,
    kind: type[DraftModelDrafter] = DraftModelDrafter,
) -> Later:
    backend = backend or ToyBackend()
    vocabulary = same_ids(backend.vocab, backend.vocab)
    return model_drafter(backend, vocabulary, partial(SharedPages, longest=longest), sampling, kind)


def model_drafter(
    backend: Any,
    vocabulary: Vocabulary,
    cache_of: CacheOf,
    sampling: DraftSampling = DraftSampling.COUPLED,
    kind: type[ModelDrafter] = DraftModelDrafter,
    vocab_size: int | None = None,
) -> Later:
    """A drafter with this model, whose keys and values are where `cache_of` puts them."""
    size = backend.vocab if vocab_size is None else vocab_size

    def bind(kv: KVCache) -> ModelDrafter:
        return kind(backend, vocabulary, cache_of(kv, backend), vocab_size=size, sampling=sampling)

    return Later(UnboundDrafter(kind.name, bind, backend.bytes_per_page()))


class Checked(DraftModelDrafter):
    """Compares every proposal with what `_expected` gives for the same request and plan."""

    compared = 0

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            expected = self._expected(request, plan)
            assert proposed.tree_lists(number) == expected.tree_lists(0)
            ours, theirs = proposed.draws_of(number), expected.draws_of(0)
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert (ours.draft_probs[ours.rows] == theirs.draft_probs[theirs.rows]).all()
            self.compared += len(proposed.tree_lists(number)[0]) > 0
        return proposed

    def _expected(self, request: Request, plan: DraftPlan) -> DraftTrees:
        raise NotImplementedError


class AgainstReference(Checked):
    """The readable reference: every node's logits straight from the toy, without pages, rows or a past."""

    def _expected(self, request: Request, plan: DraftPlan) -> DraftTrees:
        room = min(plan.budget, self._cache._longest - len(request.token_ids))
        if room < 1:
            return DraftTrees.chains([[]])
        pages = np.zeros(0, dtype=np.int32)
        context = Context(request, request.token_ids, pages, room)
        tree = make_tree(context, plan.shrunk(room), self._scoring, self._sampling)
        while tree.frontier:
            tree.grow(np.stack([self._logits(request, path_of(tree, node)) for node in tree.frontier]))
        return to_draft_trees([tree])

    def _logits(self, request: Request, path: tuple[int, ...]) -> Float32Array:
        tokens = np.array([*request.token_ids, *path])
        return self._backend.logits_of(tokens, np.arange(len(tokens)))


class AgainstFresh(Checked):
    """A drafter that has never seen the request before."""

    def _expected(self, request: Request, plan: DraftPlan) -> DraftTrees:
        page_size = self._backend.page_size
        kv = KVCache(100, page_size, max_sequences=1, max_length=99 * page_size)
        opened = kv.open(request.token_ids)
        assert opened is not None
        kv.reserve(opened[0], len(request.token_ids) + plan.budget)
        vocabulary, cache = self._scoring.vocabulary, SharedPages(kv, self._backend, self._cache._longest)
        size = vocabulary.target_size
        fresh = DraftModelDrafter(self._backend, vocabulary, cache, vocab_size=size, sampling=self._sampling)
        twin = copy.copy(request)
        twin.slot = opened[0]
        return fresh.propose([twin], [plan])


def path_of(tree: GrowingTree, node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    return () if node == ROOT else (*path_of(tree, tree.parents[node]), tree.tokens[node])


class Plans(Controller):
    """A controller: every request and step gets the next of these plans, in an order of its own."""

    def __init__(self, *plans: DraftPlan) -> None:
        self.plans = plans
        self._random = np.random.default_rng(0)

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        return StepPlan([self.plans[self._random.integers(len(self.plans))] for _ in running])

    def observe(self, step: StepPlan, stats: object) -> None:
        pass


def chain(budget: int) -> DraftPlan:
    return DraftPlan("draft_model", budget)


def tree(budget: int, branching: int, depth: int | None = None) -> DraftPlan:
    return DraftPlan("draft_model", budget, branching, depth)


MIXED = (PLAIN, chain(1), chain(4), chain(7), tree(6, 2), tree(9, 3), tree(5, 4, depth=2))


def drafting_engine(
    drafter: Later,
    *plans: DraftPlan,
    backend: ToyBackend | None = None,
    num_pages: int = 400,
    max_model_len: int = 256,
    max_num_seqs: int = 16,
    rows: int = 128,
    enable_prefix_caching: bool = True,
) -> Engine:
    """An engine over the toy in which the drafter drafts by these plans."""
    backend = backend or ToyBackend(max_rows=rows)
    return new_engine(
        backend,
        ToyTokenizer(),
        Limits(backend.vocab, max_model_len, max_num_seqs, rows),
        num_pages=num_pages,
        enable_prefix_caching=enable_prefix_caching,
        controller=Plans(*plans),
        drafters={drafter.name: drafter},
    )


def drain(engine: Engine, drafter: Later) -> None:
    """Step until all is done. Between steps, free pages of both pools are filled with rubbish."""
    while engine.has_unfinished:
        engine.step()
        scribble_free_pages(engine)
        pool = drafter._cache.pool
        for page in engine.kv.pages.free_pages():
            places = slice(page * engine.kv.page_size, (page + 1) * engine.kv.page_size)
            pool.tokens[places] = -999
            pool.positions[places] = -999


def counts(added: Sequence[Request]) -> tuple[int, int]:
    """The drafted tokens of these requests, and the accepted ones."""
    drafted = sum(request.speculative.num_draft_tokens for request in added)
    return drafted, sum(request.speculative.num_accepted_draft_tokens for request in added)
