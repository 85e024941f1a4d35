"""hybrid: which of its two drafters drafts when, and that both observe every pass."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.backends.async_decoding import NgramLookup
from paceline.core.trees import DraftPlan, DraftTrees, Draws
from paceline.draft.base import DrafterNeeds, DraftSampling, UnboundDrafter
from paceline.draft.hybrid import HybridDrafter, union
from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.draft.methods import METHODS, Method
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError
from tests.draft.requests import make_request
from tests.engine.test_exactness import requests, result
from tests.large import in_turn
from tests.toy import drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

NGRAM = {"method": "ngram"}
COPYING = [*range(30), 77, *range(20)]  # the suffix drafter is sure of 20, 21, ...
NEW = [3]  # and knows nothing here


class Fixed(ScriptedDrafter):
    """Drafts 90, 91, ... always, drawn from a distribution if `drawn`; notes what it is asked and told."""

    name = "fixed"
    needs = DrafterNeeds(feature_layers=(2,), bytes_per_page=10)

    def __init__(self, drawn=False):
        super().__init__({}, "right")
        self.drawn = drawn
        self.calls = []
        self.memory = self

    def propose(self, requests, plans):
        self.calls.append((list(requests), list(plans)))
        trees = DraftTrees.chains([range(90, 90 + plan.levels) for plan in plans])
        if self.drawn:
            rows = np.arange(trees.num_nodes, dtype=np.int32)
            trees = replace(trees, draws=Draws(np.eye(100)[trees.tokens], rows))
        return trees

    @classmethod
    def load(cls, options, target):
        drafter = cls()
        return UnboundDrafter("fixed", lambda kv: drafter.calls.append(kv) or drafter, bytes_per_page=10)

    def observe(self, *seen):
        self.calls.append(seen)

    def remember(self, prompt, output):
        self.calls.append((prompt, output))

    def save(self):
        self.calls.append("save")


def hybrid(other, most=3, **options):
    options = HybridDrafter.Options(fallback=NGRAM, **options)
    return HybridDrafter(options, SuffixDrafter(options), other, most)


def tree_of(drafter, tokens, plan):
    return drafter.propose([make_request(tokens)], [plan]).tree_lists(0)


def test_the_suffix_drafter_drafts_where_it_is_confident_and_the_fallback_elsewhere():
    other = Fixed()
    asked = [make_request(COPYING), make_request(NEW), make_request(COPYING)]
    trees = hybrid(other).propose(asked, [DraftPlan("hybrid", 5)] * 3)
    assert [trees.tree_lists(number)[0] for number in range(3)] == [
        [20, 21, 22, 23, 24],
        [90, 91, 92],
        [20, 21, 22, 23, 24],
    ]
    assert other.calls == [([asked[1]], [DraftPlan("fixed", 3)])], "asked once, with its own length"


def test_the_fallback_is_not_asked_where_all_suffix_drafts_are_confident():
    other = Fixed()
    tree_of(hybrid(other), COPYING, DraftPlan("hybrid", 5))
    assert other.calls == []


def test_confidence_decides_when_the_fallback_is_asked():
    plan = DraftPlan("hybrid", 5)
    assert tree_of(hybrid(Fixed(), confidence=5.0), COPYING, plan)[0] == [90, 91, 92]
    assert tree_of(hybrid(Fixed(), confidence=0.0), NEW, plan)[0] == []


def test_draws_of_the_fallback_stay_with_their_nodes():
    asked = [make_request(COPYING), make_request(NEW)]
    trees = hybrid(Fixed(drawn=True)).propose(asked, [DraftPlan("hybrid", 5)] * 2)
    assert trees.draws_of(0) is None
    draws = trees.draws_of(1)
    assert draws is not None
    assert draws.draft_probs[draws.rows].argmax(axis=1).tolist() == [90, 91, 92]


@pytest.mark.parametrize(
    ("budget", "branching", "expected"),
    [
        (4, 2, ([90, 91, 92, 3], [-1, 0, 1, -1])),
        (3, 2, ([90, 91, 92], [-1, 0, 1])),
        (4, 1, ([90, 91, 92], [-1, 0, 1])),
    ],
)
def test_a_tree_holds_both_drafts_where_the_suffix_draft_is_not_confident(budget, branching, expected):
    drafter = hybrid(Fixed(), combine="tree")
    assert tree_of(drafter, [1, 2, 3, 7, 8, 1, 2], DraftPlan("hybrid", budget, branching)) == expected
    assert tree_of(drafter, COPYING, DraftPlan("hybrid", 5, 2))[0] == [20, 21, 22, 23, 24]


def with_chances(tree, chance):
    return (*tree, [chance] * len(tree[0]))


@pytest.mark.parametrize(
    ("first", "second", "budget", "branching", "expected"),
    [
        (([1, 2], [-1, 0]), ([1, 3], [-1, 0]), 9, 2, ([1, 2, 3], [-1, 0, 0])),  # a shared node once
        (([1, 2], [-1, 0]), ([1, 2, 3], [-1, 0, 1]), 9, 1, ([1, 2, 3], [-1, 0, 1])),  # a longer chain
        (([1, 2], [-1, 0]), ([4, 5], [-1, 0]), 9, 1, ([1, 2], [-1, 0])),  # no room for a sibling
        (([1, 2], [-1, 0]), ([4, 5], [-1, 0]), 3, 2, ([1, 2, 4], [-1, 0, -1])),  # budget
        (([], []), ([4, 5, 6], [-1, -1, 1]), 9, 2, ([4, 5, 6], [-1, -1, 1])),
        (([7, 8], [-1, -1]), ([4, 5, 7, 6], [-1, 0, -1, 2]), 9, 2, ([7, 8, 6], [-1, -1, 0])),
    ],
)
def test_the_union_of_two_trees(first, second, budget, branching, expected):
    plan = DraftPlan("hybrid", budget, branching)
    assert union(with_chances(first, 0.5), with_chances(second, 0.5), plan)[:2] == expected


def test_a_node_of_a_union_has_the_higher_chance():
    plan = DraftPlan("hybrid", 9, 2)
    sure, unsure = ([1, 2], [-1, 0], [0.9, 0.2]), ([1, 2, 3], [-1, 0, -1], [0.5, 0.4, 0.1])
    assert union(sure, unsure, plan)[2] == [0.9, 0.4, 0.1]
    silent = with_chances(([1, 4], [-1, 0]), np.nan)
    assert np.array_equal(union(silent, sure, plan)[2], [0.9, np.nan, 0.2], equal_nan=True)


def test_a_full_union_keeps_the_likeliest_nodes_of_both():
    head = ([1, 2, 3, 4], [-1, 0, 1, -1], [0.7, 0.4, 0.1, 0.2])
    copies = ([5, 6, 7], [-1, 0, 1], [0.6, 0.5, 0.15])
    tokens, parents, chances = union(head, copies, DraftPlan("hybrid", 5, 2))
    assert (tokens, chances) == ([1, 5, 6, 2, 7], [0.7, 0.6, 0.5, 0.4, 0.15])
    assert parents == [-1, -1, 1, 0, 2]


def test_both_parts_keep_the_chances_of_their_trees():
    trees = hybrid(Fixed()).propose([make_request(COPYING), make_request(NEW)], [DraftPlan("hybrid", 5)] * 2)
    assert np.isnan(trees.chances).tolist() == [False] * 5 + [True] * 3, "the other has no opinion"


def test_both_parts_are_shown_every_pass_and_their_memories_are_saved(tmp_path):
    other = Fixed()
    drafter = hybrid(other, suffix_cache_path=str(tmp_path / "past.npz"))
    assert drafter.needs == other.needs
    request = make_request([1, 2, 3], [4, 5, 6])
    drafter.observe([request], [], None)
    drafter.forget(request)
    drafter.memory.remember([1], [7, 8, 9])
    drafter.memory.save()
    assert other.calls == [([request], [], None), ([1], [7, 8, 9]), "save"]
    assert other.forgotten == [request]
    assert (tmp_path / "past.npz").exists()
    for tokens in ([1, 2, 3, 4], [7, 8]):
        assert tree_of(drafter, tokens, DraftPlan("hybrid", 2))[0] != []


def test_the_fallback_gets_the_cache_for_which_room_was_counted(monkeypatch):
    monkeypatch.setitem(METHODS, "fixed", Method(__name__, "Fixed", 3, trees=False, paged=True))
    options = HybridDrafter.Options(fallback={"method": "fixed"})
    loaded = HybridDrafter.load(options, SimpleNamespace(sampling=DraftSampling.COUPLED))
    assert loaded.bytes_per_page == 10
    drafter = loaded.bind("kv")
    assert drafter.needs == Fixed.needs
    assert tree_of(drafter, NEW, DraftPlan("hybrid", 2))[0] == [90, 91]
    assert drafter._fallback.calls[0] == "kv"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "hybrid needs fallback"),
        ({"fallback": "ngram"}, "hybrid needs fallback"),
        ({"fallback": {"method": "suffix"}}, "may not be suffix"),
        ({"fallback": {"method": "none"}}, "method must be one of"),
        ({"fallback": NGRAM | {"prompt_lookup": 2}}, "did you mean 'prompt_lookup_min'"),
        ({"fallback": NGRAM | {"branching": 2}}, "give branching beside method hybrid"),
        ({"fallback": NGRAM | {"verification": "block"}}, "give verification beside method hybrid"),
        ({"fallback": NGRAM | {"num_speculative_tokens": 0}}, "drafts nothing"),
        ({"fallback": NGRAM, "combine": "or"}, "combine must be one of either, tree"),
        ({"fallback": NGRAM, "confidence": -1}, "confidence must be"),
        ({"fallback": NGRAM, "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_speculative_config({"method": "hybrid", **options})


def test_loading_brings_both_parts():
    config = parse_speculative_config(
        {"method": "hybrid", "fallback": NGRAM | {"num_speculative_tokens": 2, "prompt_lookup_min": 1}}
    ).drafters["hybrid"]
    target = SimpleNamespace(sampling=DraftSampling.COUPLED)
    drafter = HybridDrafter.load(config.options, target).bind(None)
    assert tree_of(drafter, [5, 6, 7, 8, 9, 5], DraftPlan("hybrid", 4))[0] == [6, 7]
    assert drafter.device.look_up == NgramLookup(1, 4)  # where a decoder can, as the other would


def test_chosen_and_drawn_nodes_in_one_tree_are_refused():
    options = HybridDrafter.Options(fallback=NGRAM, combine="tree")
    with pytest.raises(ConfigError, match="Use combine 'either'"):
        HybridDrafter.load(options, SimpleNamespace(sampling=DraftSampling.INDEPENDENT))


COMBINED = {name: name for name in ("either", "tree")}
STYLES = {name: name for name in ("right", "wrong", "tree", "partly")}


@pytest.mark.parametrize(("style", "combine"), in_turn(STYLES, COMBINED))
def test_the_engine_gives_the_same_results_with_it(alone, combine, style):
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(requests())}
    engine = toy_engine(drafter=hybrid(ScriptedDrafter(truth, style), 6, combine=combine), budget=6)
    added = [engine.add_request(ids, params)[0] for ids, params in requests()]
    drain(engine)
    assert [result(request) for request in added] == alone
    assert not any(request.failed_drafters for request in added)
    if style != "wrong":
        assert sum(request.speculative.num_accepted_draft_tokens for request in added) > 50
