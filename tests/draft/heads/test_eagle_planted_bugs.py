"""The tests of the head's bookkeeping can fail: each planted bug is noticed, and by the toy head."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

from paceline.core.request import Request
from paceline.core.trees import PLAIN
from paceline.draft.heads.eagle import GuessedTree, HeadPasses
from paceline.draft.heads.head_pages import HeadPages
from tests import toy
from tests.draft.draft_models import drafting_engine
from tests.engine.test_exactness import requests
from tests.models.heads import toy_head
from tests.models.heads.toy_head import chain, drain, toy_eagle, tree


def shifted_features(plant):
    """A slot reads the feature of its own token."""
    features = HeadPages.features

    def one_later(self, spans):
        return features(self, [(context, start + 1, end + 1) for context, start, end in spans])

    plant(HeadPages, "features", one_later)


def forgotten_last_features(plant):
    """The slot behind a page finds no feature."""
    put = HeadPages.put

    def without_last(self, spans, values, parts):
        put(self, spans, values, parts)
        self._written_in[self._kv.page_size - 1 :: self._kv.page_size] = -1

    plant(HeadPages, "put", without_last)


def trusted_stale_pages(plant):
    """Slots of a page's former life count as computed."""

    def without_generations(self, contexts):
        self._generations[:] = self._kv.pages.generations
        return [max(known, 1) for known in super(HeadPages, self).computed(contexts)]

    plant(HeadPages, "computed", without_generations)


def states_of_oneself(plant):
    """A node reads the state of another node than its parent."""
    states_of = GuessedTree.states_of
    plant(GuessedTree, "states_of", lambda self, nodes: states_of(self, nodes)[::-1])


def positions_of_the_target(plant):
    plant.value(HeadPasses, "first_position", 0)


def unseen_passes(plant):
    """What is accepted from drafts is not observed."""
    put = HeadPages.put

    def only_first(self, spans, values, parts):
        put(self, np.minimum(spans, [99, 999, 999, 1]), values, parts)

    plant(HeadPages, "put", only_first)


BUGS = [
    shifted_features,
    forgotten_last_features,
    trusted_stale_pages,
    states_of_oneself,
    positions_of_the_target,
    unseen_passes,
]


def served() -> list[Request]:
    """The usual requests, run twice in few pages."""
    drafter = toy_eagle()
    plans = (PLAIN, chain(4), tree(9, 3))
    engine = drafting_engine(drafter, *plans, num_pages=26, max_model_len=100)
    added = []
    for _ in range(2):
        added += [engine.add_request(ids, params)[0] for ids, params in requests()]
        drain(engine, drafter)
    return added


def test_without_a_bug_nothing_fails():
    assert not any(request.failed_drafters for request in served())


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_noticed(bug, plant, caplog):
    bug(plant)
    requests = served()
    assert [request.error for request in requests] == [None] * len(requests)
    assert np.mean([bool(request.failed_drafters) for request in requests]) > 0.1
    for record in caplog.records:  # one for each failure of the drafter
        name, error = record.args
        assert name == "eagle3"
        assert isinstance(error, AssertionError)
        *_, last = traceback.extract_tb(error.__traceback__)
        assert last.filename in (toy.__file__, toy_head.__file__)
