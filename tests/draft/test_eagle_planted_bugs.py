"""The tests of the head's bookkeeping can fail: each planted bug is noticed by the toy head."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft.eagle import GuessedTree, HeadPasses
from paceline.draft.head_pages import HeadPages
from paceline.draft.trees import PLAIN
from tests.draft.heads.toy_head import chain, drain, eagle_engine, toy_eagle, tree
from tests.engine.test_exactness import requests


def shifted_features(monkeypatch):
    """A slot reads the feature of its own token."""
    features = HeadPages.features

    def one_later(self, spans):
        return features(self, [(context, start + 1, end + 1) for context, start, end in spans])

    monkeypatch.setattr(HeadPages, "features", one_later)


def forgotten_last_features(monkeypatch):
    """The slot behind a page finds no feature."""
    put = HeadPages.put

    def without_last(self, *args):
        put(self, *args)
        self._known[self._kv.page_size - 1 :: self._kv.page_size] = -1

    monkeypatch.setattr(HeadPages, "put", without_last)


def trusted_stale_pages(monkeypatch):
    """Slots of a page's former life count as computed."""

    def without_generations(self, contexts):
        self._generations[:] = self._kv.pages.generations
        return [max(known, 1) for known in super(HeadPages, self).computed(contexts)]

    monkeypatch.setattr(HeadPages, "computed", without_generations)


def states_of_oneself(monkeypatch):
    """A node reads the state of another node than its parent."""
    states_of = GuessedTree.states_of
    monkeypatch.setattr(GuessedTree, "states_of", lambda self, part: states_of(self, part)[::-1])


def positions_of_the_target(monkeypatch):
    monkeypatch.setattr(HeadPasses, "first_position", 0)


def unseen_passes(monkeypatch):
    """What is accepted from drafts is not observed."""
    put = HeadPages.put

    def only_first(self, spans, *args):
        put(self, np.minimum(spans, [99, 999, 999, 1]), *args)

    monkeypatch.setattr(HeadPages, "put", only_first)


BUGS = [
    shifted_features,
    forgotten_last_features,
    trusted_stale_pages,
    states_of_oneself,
    positions_of_the_target,
    unseen_passes,
]


def failed_requests() -> list[bool]:
    """Which of the usual requests the drafter failed for, run twice in few pages."""
    drafter = toy_eagle()
    plans = (PLAIN, chain(4), tree(9, 3))
    engine = eagle_engine(drafter, *plans, num_pages=26, max_model_len=100)
    added = []
    for _ in range(2):
        added += [engine.add_request(ids, params)[0] for ids, params in requests()]
        drain(engine, drafter)
    return [bool(request.failed_drafters) for request in added]


def test_without_a_bug_nothing_fails():
    assert not any(failed_requests())


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_noticed(bug, monkeypatch):
    bug(monkeypatch)
    assert np.mean(failed_requests()) > 0.1
