"""Negative controls: the toy model must notice each of these bugs, or the exactness tests prove nothing."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from paceline.engine.executors.batch import BatchBuilder
from paceline.kv.cache import KVCache
from paceline.kv.pages import PagePool
from tests.toy import VOCAB, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter


def params(number):
    return SamplingParams(temperature=1.0, seed=5, max_tokens=6 + 3 * number, logprobs=1, ignore_eos=True)


def prompts():
    rng = np.random.default_rng(0)
    endings = [rng.integers(2, VOCAB, 9).tolist() for _ in range(6)]
    # the same pages after different first ones; and the same beginning, for pages held by two at a time
    return [
        *endings,
        [2, 3, 4, 5, *endings[0]],
        [6, 7, 8, 9, *endings[0]],
        [*endings[0], 5],
        [*endings[0], 6],
    ]


def served(**options):
    engine = toy_engine(**options)
    requests = []
    for _ in range(2):  # the second time with prefix hits
        requests += [engine.add_request(ids, params(number))[0] for number, ids in enumerate(prompts())]
        drain(engine)
    return requests


def results(requests):
    return [(request.output_token_ids, request.logprobs, request.finish_reason) for request in requests]


@pytest.fixture(scope="module")
def truth():
    return results(served())


def drafted(truth):
    tokens = {tuple(ids): truth[number][0] for number, ids in enumerate(prompts())}
    return served(drafter=ScriptedDrafter(tokens, "tree"), budget=6)


def test_without_a_bug_all_agree(truth):
    assert results(drafted(truth)) == truth
    assert results(served(num_pages=30, max_model_len=64)) == truth


def test_a_commit_that_forgets_to_move_is_noticed(truth, plant):
    plant(KVCache, "_compact", lambda self, sequence, in_place, accepted_rows: None)
    requests = drafted(truth)
    plant.assert_noticed(requests, results(requests), truth)


def test_a_prefix_found_without_looking_at_its_parent_is_noticed(truth, plant):
    def careless(self, parent, tokens):
        return next((page for (_, known), page in self._index.items() if known == tokens), None)

    plant(PagePool, "find", careless)
    requests = served()
    plant.assert_noticed(requests, results(requests), truth)


def test_pages_freed_while_in_use_are_noticed(truth, plant):
    hold = PagePool.hold

    def forgetful(self, page):
        hold(self, page)
        self._holders[page] = 1

    plant(PagePool, "hold", forgetful)
    requests = served(num_pages=51, max_model_len=64)
    plant.assert_noticed(requests, results(requests), truth)
    with pytest.raises(AssertionError, match="a page of two sequences"):  # the pool sees it, if pages are few
        served(num_pages=30, max_model_len=64)


def test_a_node_that_sees_its_sibling_is_noticed(truth, plant):
    add_tree = BatchBuilder._add_tree

    def chained(self, tree, start, end):
        tokens, _ = tree
        return add_tree(self, (tokens, np.arange(-1, len(tokens) - 1, dtype=np.int32)), start, end)

    plant(BatchBuilder, "_add_tree", chained)
    requests = drafted(truth)
    plant.assert_noticed(requests, results(requests), truth)
