"""A draft model over the toy: the same bytes, and proposals that do not depend on earlier steps."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN
from paceline.draft.base import DraftSampling
from tests.draft.draft_models import (
    MIXED,
    AgainstReference,
    HazyToy,
    Plans,
    chain,
    counts,
    drafting_engine,
    drain,
    toy_drafter,
    tree,
)
from tests.engine.test_exactness import prompt, requests, result
from tests.large import in_turn
from tests.toy import ToyBackend, toy_engine
from tests.toy import drain as drain_plain


def together(engine, drafter):
    added = [engine.add_request(ids, params)[0] for ids, params in requests()]
    drain(engine, drafter)
    assert not any(request.failed_drafters for request in added)
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages, "pages leaked"
    return added


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_chain_of_the_target_itself_is_accepted_whole(alone, budget):
    drafter = toy_drafter()
    added = together(drafting_engine(drafter, chain(budget)), drafter)
    assert [result(request) for request in added] == alone
    drafted, accepted = counts(added)
    assert accepted == drafted > 100


@pytest.mark.parametrize(
    ("plan", "sampling"),
    in_turn({"chain": chain(5), "tree": tree(8, 3), "flat tree": tree(12, 2, depth=3)}, DraftSampling),
)
def test_every_proposal_is_that_of_the_reference(alone, plan, sampling):
    drafter = toy_drafter(HazyToy(max_rows=128), sampling, kind=AgainstReference)
    added = together(drafting_engine(drafter, plan), drafter)
    assert [result(request) for request in added] == alone
    drafted, accepted = counts(added)
    assert drafter.compared > 50
    assert 0 < accepted < drafted


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small passes": {"rows": 17, "max_num_seqs": 7},
    "preemption": {"num_pages": 26, "max_model_len": 100},
    "no prefix cache": {"num_pages": 26, "max_model_len": 100, "enable_prefix_caching": False},
    "pages of 1": {"backend": ToyBackend(page_size=1, max_rows=128), "num_pages": 1600},
    "pages of 16": {"backend": ToyBackend(page_size=16, max_rows=128), "num_pages": 100},
}


@pytest.mark.parametrize(
    ("setting", "sampling"), in_turn(SETTINGS, DraftSampling, repeats=("roomy", "pages of 16"))
)
def test_with_plans_that_change_from_step_to_step(alone, setting, sampling):
    page_size = setting["backend"].page_size if "backend" in setting else 4
    backend = HazyToy(max_rows=setting.get("rows", 128), page_size=page_size)
    drafter = toy_drafter(backend, sampling, kind=AgainstReference)
    engine = drafting_engine(drafter, *MIXED, **setting)
    for _ in range(1 + setting.get("enable_prefix_caching", True)):  # the second time with prefix hits
        added = together(engine, drafter)
        assert [result(request) for request in added] == alone
    assert drafter.compared > 20
    assert engine.scheduler.num_preemptions > 0 or "max_model_len" not in setting


def test_drafted_rows_are_not_computed_twice():
    drafter = toy_drafter()
    engine = drafting_engine(drafter, chain(4))
    (request,) = engine.add_request(
        prompt(1, 30), SamplingParams(temperature=0, max_tokens=101, ignore_eos=True)
    )
    drain(engine, drafter)
    assert request.speculative.num_accepted_draft_tokens == 80
    # each step: the bonus token and the last drafted one, then one row for each of the next three
    assert [rows for _, rows in drafter._backend.batches[4:12]] == [2, 1, 1, 1] * 2
    assert sum(rows for _, rows in drafter._backend.batches) == 31 + 3 + 19 * 5


def test_a_request_that_is_not_drafted_for_costs_no_pass():
    drafter = toy_drafter()
    engine = drafting_engine(drafter, PLAIN)
    engine.add_request(prompt(1, 30), SamplingParams(max_tokens=20))
    drain(engine, drafter)
    assert drafter._backend.batches == []


def test_the_first_proposal_catches_up_in_passes_of_the_allowed_size(alone):
    drafter = toy_drafter(ToyBackend(max_rows=16))
    engine = drafting_engine(drafter, chain(2), rows=64, max_num_seqs=4)
    added = [
        engine.add_request(prompt(9, 70), SamplingParams(temperature=0, max_tokens=9))[0] for _ in range(3)
    ]
    drain(engine, drafter)
    assert len({tuple(request.output_token_ids) for request in added}) == 1
    assert max(rows for _, rows in drafter._backend.batches) <= 16
    drafted, accepted = counts(added)
    assert accepted == drafted
    # the prompt's 17 full pages are shared, and computed once for all three
    assert sum(rows for _, rows in drafter._backend.batches) < 70 + 2 * 20 + drafted + 20


def test_children_of_n_share_the_drafts_keys_and_values():
    drafter = toy_drafter()
    engine = drafting_engine(drafter, chain(3))
    children = engine.add_request(prompt(3, 41), SamplingParams(n=4, seed=11, max_tokens=12))
    drain(engine, drafter)
    plain = toy_engine()
    expected = plain.add_request(prompt(3, 41), SamplingParams(n=4, seed=11, max_tokens=12))
    drain_plain(plain)
    assert [child.token_ids for child in children] == [child.token_ids for child in expected]
    drafted, accepted = counts(children)
    assert accepted == drafted > 10
    assert sum(rows for _, rows in drafter._backend.batches) < 41 + 4 * 30


def test_requests_that_begin_to_draft_late_compute_their_common_pages_once():
    drafter = toy_drafter(kind=AgainstReference)
    plans = Plans(PLAIN)
    engine = drafting_engine(drafter, PLAIN)
    engine._controller = plans
    params = SamplingParams(n=4, seed=11, max_tokens=20, ignore_eos=True)
    children = engine.add_request(prompt(3, 41), params)
    while min(child.num_output for child in children) < 5:
        engine.step()
    lengths = [len(child.token_ids) for child in children]
    plans.plans = (chain(3),)
    engine.step()
    # the ten full pages of the prompt are computed for the first of them, and found done by the others
    alone, together = drafter._backend.batches[:2]
    assert alone == (1, lengths[0] - 1)
    assert together[0] == 4
    assert together[1] <= 1 + sum(length - 40 for length in lengths[1:])
    drain(engine, drafter)
    drafted, accepted = counts(children)
    assert accepted == drafted > 20


def test_a_request_that_outgrows_the_drafts_context_continues_without_drafts():
    drafter = toy_drafter(longest=40)
    engine = drafting_engine(drafter, chain(4), tree(6, 2))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    short, long = (
        engine.add_request(prompt(number, length), params)[0] for number, length in ((1, 10), (2, 45))
    )
    drain(engine, drafter)
    for request, ids in ((short, prompt(1, 10)), (long, prompt(2, 45))):
        plain = toy_engine()
        (expected,) = plain.add_request(ids, params)
        drain_plain(plain)
        assert request.token_ids == expected.token_ids
        assert not request.failed_drafters
    assert 20 < short.speculative.num_accepted_draft_tokens <= 30
    assert long.speculative.num_draft_tokens == 0


def test_nothing_is_drafted_below_a_token_that_ends_the_request(alone):
    drafter = toy_drafter()
    engine = drafting_engine(drafter, chain(8), tree(8, 2))
    proposals = []
    propose = drafter.propose

    def spy(requests, plans):
        trees = propose(requests, plans)
        for number, request in enumerate(requests):
            tokens, parents = trees.tree_lists(number)
            proposals.extend(tokens[parent] in request.ending_ids for parent in parents if parent >= 0)
        return trees

    drafter.propose = spy
    together(engine, drafter)
    assert proposals
    assert not any(proposals)


def test_a_failing_pass_leaves_consistent_state(alone):
    drafter = toy_drafter(HazyToy(), kind=AgainstReference)
    engine = drafting_engine(drafter, *MIXED, num_pages=60, max_model_len=128)
    added = []
    for number, (ids, params) in enumerate(requests()):
        added.append(engine.add_request(ids, params)[0])
        engine.step()
        if number % 5 == 2:
            drafter._backend.fail_next = RuntimeError("planned")
    drain(engine, drafter)
    assert [result(request) for request in added] == alone
    assert any(request.failed_drafters for request in added)
    assert drafter.compared > 20


def test_unusable_logits_of_the_draft_end_the_drafts_of_their_request_only():
    ids = prompt(4, 8)
    bad = next(token for token in range(2, 97) if token not in ids)
    drafter = toy_drafter(ToyBackend(nan_after=bad))
    engine = drafting_engine(drafter, chain(3))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={bad: -100.0})
    good, damaged = (engine.add_request(prompt, params)[0] for prompt in (ids, [bad, *ids]))
    drain(engine, drafter)
    assert good.speculative.num_accepted_draft_tokens > 10
    assert damaged.speculative.num_draft_tokens == 0
    assert (damaged.num_output, damaged.failed_drafters) == (20, set())
