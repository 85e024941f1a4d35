"""A draft model with another vocabulary, over the toy.

The draft turns its own tokens back into the target's and asks the toy, so it is right whenever the
target's token is shared; a lost, doubled or misplaced token makes it wrong.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from paceline.draft.base import DraftSampling
from paceline.draft.model.separate_pages import SeparatePages
from paceline.draft.model.vocabulary import vocabulary_intersection
from tests.draft.draft_models import MIXED, chain, counts, drafting_engine, model_drafter, tree
from tests.draft.model.test_vocabulary import Texts
from tests.engine.test_exactness import prompt, requests, result
from tests.engines import Later
from tests.large import in_turn
from tests.toy import VOCAB, ToyBackend, drain

UNSHARED = {token for token in range(VOCAB) if token % 7 == 3}
TARGET_TEXTS = Texts(*(b"<%d>" % token for token in range(VOCAB)))
PIECES = [b"<", b">", *(b"%d" % digit for digit in range(10))]
DRAFT_TOKENS = PIECES + [b"<%d>" % token for token in reversed(range(VOCAB)) if token not in UNSHARED]
DRAFT_TEXTS = Texts(*DRAFT_TOKENS)


class TranslatingToy(ToyBackend):
    """The toy in the draft's tokens."""

    def __init__(self, **options) -> None:
        super().__init__(vocab=len(DRAFT_TOKENS), **options)
        self._toy = ToyBackend()

    def logits_of(self, tokens, positions):
        assert (positions == np.arange(len(tokens))).all()
        text = b"".join(DRAFT_TOKENS[token] for token in tokens)
        ids = np.array([int(token) for token in text.strip(b"<>").split(b"><")])
        logits = self._toy.logits_of(ids, np.arange(len(ids)))
        own = np.full(self.vocab, -5.0, dtype=np.float32)
        for token, spelled in enumerate(DRAFT_TOKENS[len(PIECES) :], start=len(PIECES)):
            own[token] = logits[int(spelled[1:-1])]
        return own


def translating_drafter(sampling=DraftSampling.COUPLED, longest=600, **options) -> Later:
    backend = TranslatingToy(**options)
    vocabulary = vocabulary_intersection(TARGET_TEXTS, DRAFT_TEXTS, VOCAB, backend.vocab, "draft")
    cache_of = partial(SeparatePages, longest=longest, vocabulary=vocabulary)
    return model_drafter(backend, vocabulary, cache_of, sampling)


def together(engine):
    added = [engine.add_request(ids, params)[0] for ids, params in requests()]
    drain(engine)
    assert not any(request.failed_drafters for request in added)
    return added


def test_a_chain_is_right_until_the_target_says_what_is_not_shared():
    drafter = translating_drafter()
    engine = drafting_engine(drafter, chain(5))
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    (request,) = engine.add_request(prompt(1, 40), params)
    wrong = 0
    while engine.has_unfinished:
        before = request.num_output
        engine.step()
        facts = engine.stats.drafts
        gained = request.output_token_ids[before:]
        if facts and facts[0].accepted < facts[0].nodes:
            wrong += 1
            assert gained[-1] in UNSHARED
        assert UNSHARED.isdisjoint(gained[:-1])
    assert wrong > 3
    assert request.speculative.num_accepted_draft_tokens > 40


SETTINGS: dict[str, dict[str, int]] = {
    "roomy": {},
    "small passes": {"rows": 17, "max_num_seqs": 7},
    "few pages": {"num_pages": 26, "max_model_len": 100},
}


@pytest.mark.parametrize(("setting", "sampling"), in_turn(SETTINGS, DraftSampling))
def test_the_same_bytes_under_plans_that_change(alone, setting, sampling):
    drafter = translating_drafter(sampling, max_rows=setting.get("rows", 128))
    engine = drafting_engine(drafter, *MIXED, **setting)
    for _ in range(2):
        added = together(engine)
        assert [result(request) for request in added] == alone
        drafted, accepted = counts(added)
        assert 0 < accepted < drafted
    kv = drafter._cache._kv
    assert kv.pages.num_available == kv.pages.num_pages, "pages leaked"
    assert not drafter._cache._readings


@pytest.mark.parametrize("plan", [chain(4), tree(6, 2)], ids=["chain", "tree"])
def test_proposals_are_those_of_a_fresh_drafter(plan):
    drafter = translating_drafter()
    engine = drafting_engine(drafter, plan, num_pages=60, max_model_len=160)
    propose, compared = drafter.propose, []

    def compare(requests, plans):
        trees = propose(requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            fresh = translating_drafter().bind(engine.kv)
            compared.append(trees.tree_lists(number))
            if compared[-1][0]:  # else there were no pages for it
                assert compared[-1] == fresh.propose([request], [plan]).tree_lists(0)
        return trees

    drafter.propose = compare
    together(engine)
    assert sum(bool(tokens) for tokens, _ in compared) > 50
    assert engine.scheduler.num_preemptions > 0


def test_without_pages_the_least_recently_used_request_is_evicted():
    drafter = translating_drafter()
    engine = drafting_engine(drafter, chain(2), num_pages=40, max_model_len=120, max_num_seqs=3)
    evict, evicted = drafter._cache._evict, []
    drafter._cache._evict = lambda in_use: evicted.append(evict(in_use)) or evicted[-1]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    unshared = sorted(UNSHARED)[:12]  # each takes three or four tokens of the draft
    added = [engine.add_request([*unshared, number], params)[0] for number in range(3)]
    drain(engine)
    assert not any(request.failed_drafters for request in added)
    assert sum(request.speculative.num_accepted_draft_tokens for request in added) > 20
    assert True in evicted


def test_a_text_that_the_draft_cannot_spell_is_not_drafted_for():
    unspeakable = Texts(*(b"\xff" * (token + 1) for token in range(VOCAB - 1)), b"<1>")
    vocabulary = vocabulary_intersection(unspeakable, DRAFT_TEXTS, VOCAB, VOCAB, "draft")
    cache_of = partial(SeparatePages, longest=100, vocabulary=vocabulary)
    drafter = model_drafter(TranslatingToy(), vocabulary, cache_of, vocab_size=VOCAB)
    engine = drafting_engine(drafter, chain(3))
    (request,) = engine.add_request(
        [5, 6], SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={96: -100})
    )
    drain(engine)
    assert (request.num_output, request.failed_drafters) == (4, set())
