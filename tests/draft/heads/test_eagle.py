"""An EAGLE head over the toy: the same bytes, and every slot always reads the right feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.control.controller import Controller, StepPlan
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling
from paceline.draft.heads.head_drafter import LoadedHead, Mask
from tests.draft.draft_models import Plans, counts, drafting_engine
from tests.engine.test_exactness import prompt, requests, result
from tests.large import in_turn
from tests.models.heads.toy_head import chain, drain, toy_eagle, tree
from tests.toy import VOCAB, ToyBackend, toy_engine
from tests.toy import drain as drain_plain

MIXED = (PLAIN, chain(1), chain(4), chain(7), tree(6, 2), tree(9, 3), tree(5, 4, depth=2))
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def together(engine, drafter):
    added = [engine.add_request(ids, params)[0] for ids, params in requests()]
    drain(engine, drafter)
    assert not any(request.failed_drafters for request in added)
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages, "pages leaked"
    return added


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_chain_of_a_head_that_knows_the_target_is_accepted_whole(alone, budget):
    drafter = toy_eagle()
    added = together(drafting_engine(drafter, chain(budget)), drafter)
    assert [result(request) for request in added] == alone
    drafted, accepted = counts(added)
    assert accepted == drafted > 100


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small passes": {"rows": 17, "max_num_seqs": 7},
    "preemption": {"num_pages": 26, "max_model_len": 100},
    "no prefix cache": {"num_pages": 26, "max_model_len": 100, "enable_prefix_caching": False},
    "pages of 1": {"backend": ToyBackend(page_size=1, max_rows=128), "num_pages": 1600},
    "pages of 16": {"backend": ToyBackend(page_size=16, max_rows=128), "num_pages": 100},
}


@pytest.mark.parametrize(
    ("setting", "sampling"), in_turn(SETTINGS, DraftSampling, repeats=("roomy", "pages of 1"))
)
def test_no_slot_reads_a_wrong_feature_with_plans_that_change_from_step_to_step(alone, setting, sampling):
    """The toy head raises if it does, and then its requests are marked."""
    drafter = toy_eagle(setting.get("backend"), sampling)
    engine = drafting_engine(drafter, *MIXED, **setting)
    for _ in range(2):  # the second time with prefix hits
        added = together(engine, drafter)
        assert [result(request) for request in added] == alone
    drafted, accepted = counts(added)
    assert 20 < accepted < drafted
    assert engine.scheduler.num_preemptions > 0 or "max_model_len" not in setting


def test_only_tokens_of_the_trimmed_vocabulary_are_guessed(alone):
    drafter = toy_eagle(ids=[token for token in range(VOCAB) if token % 5])
    engine = drafting_engine(drafter, chain(4), tree(8, 3))
    proposals = []
    propose = drafter.propose
    drafter.propose = lambda *args: proposals.append(propose(*args)) or proposals[-1]
    added = together(engine, drafter)
    assert [result(request) for request in added] == alone
    guessed = {int(token) for trees in proposals for token in trees.tokens}
    assert len(guessed) > 50
    assert all(token % 5 for token in guessed)


def test_one_pass_over_new_tokens_then_one_row_a_level():
    drafter = toy_eagle()
    engine = drafting_engine(drafter, chain(4))
    (request,) = engine.add_request(prompt(1, 12), LONG)
    drain(engine, drafter)
    drafted, accepted = counts([request])
    assert accepted == drafted > 40
    # the 12 slots of the prompt and its first output; then what was accepted and the bonus token
    assert drafter._runner.passes[:8] == [(12, True), *[(1, False)] * 3, (5, True), *[(1, False)] * 3]


def test_each_request_of_a_pass_drafts_what_is_likely_enough_for_it():
    """Chains of one call end where each plan says, and nothing is left out that was likely enough."""
    drafter = toy_eagle()
    engine = drafting_engine(drafter)
    proposals: list[tuple[Sequence[DraftPlan], DraftTrees]] = []
    propose = drafter.propose

    def noted(requests, plans):
        proposals.append((plans, propose(requests, plans)))
        return proposals[-1][1]

    drafter.propose = noted
    plans = [DraftPlan("eagle3", 6, least_chance=least) for least in (0.0, 0.3, 0.6)]
    engine._controller = ByRequest(plans)
    for number in range(3):
        engine.add_request(prompt(number, 9), LONG)
    drain(engine, drafter)
    lengths = {plan.least_chance: [] for plan in plans}
    for asked, trees in proposals:
        for number, plan in enumerate(asked):
            chances = trees.chances_of(number)
            assert all(chance >= plan.least_chance for chance in chances)
            assert chances == sorted(chances, reverse=True)
            lengths[plan.least_chance].append(len(chances))
    assert np.mean(lengths[0.0]) > np.mean(lengths[0.3]) > np.mean(lengths[0.6]) > 0


class ByRequest(Controller):
    """A plan for each request, in the order of their names."""

    def __init__(self, plans: Sequence[DraftPlan]) -> None:
        self.plans = plans

    def plan(self, running, load):
        return StepPlan([self.plans[int(request.request_id)] for request in running])

    def observe(self, step, stats):
        return


def test_a_prompt_of_one_token_is_drafted_for_from_its_first_output_on():
    drafter = toy_eagle()
    engine = drafting_engine(drafter, chain(3))
    (request,) = engine.add_request([5], LONG)
    drain(engine, drafter)
    drafted, accepted = counts([request])
    assert accepted == drafted > 40


def test_nothing_is_computed_while_nothing_is_drafted_and_all_is_caught_up_with_then():
    drafter = toy_eagle(strict=True, longest=400)
    plans = Plans(PLAIN)
    engine = drafting_engine(drafter, max_model_len=400, num_pages=800)
    engine._controller = plans
    children = engine.add_request(
        prompt(3, 210), SamplingParams(n=4, seed=11, max_tokens=80, ignore_eos=True)
    )
    assert [drafter.kv.backlog(child) for child in children] == [209] * 4, "they wait, and hold no pages"
    while min(child.num_output for child in children) < 50:
        engine.step()
    assert drafter._runner.passes == []
    assert [drafter.kv.backlog(child) for child in children] == [
        len(child.token_ids) - 2
        for child in children  # the first has no slot, the last is to be drafted from
    ]
    plans.plans = (chain(3),)
    known = [len(child.token_ids) for child in children]
    engine.step()
    assert [drafter.kv.backlog(child) for child in children] == [
        len(child.token_ids) - 1 - before for child, before in zip(children, known, strict=True)
    ]
    drain(engine, drafter)
    drafted, accepted = counts(children)
    assert accepted == drafted > 20
    assert not any(child.failed_drafters for child in children)


def test_prompts_that_were_warmed_up_with_one_token_are_found_with_their_features():
    drafter = toy_eagle()
    engine = drafting_engine(drafter, chain(4))
    for length in (9, 60):
        warm, late = (prompt(length, length) for _ in range(2))
        engine.add_request(warm, SamplingParams(temperature=0, max_tokens=1))
        drain(engine, drafter)
        (request,) = engine.add_request([*late, 7], LONG)
        drain(engine, drafter)
        assert request.num_cached_tokens == length // 4 * 4
        assert not request.failed_drafters
        drafted, accepted = counts([request])
        assert accepted == drafted > 40


def test_a_conversation_continues_from_the_pages_of_its_last_answer():
    drafter = toy_eagle()
    engine = drafting_engine(drafter, chain(5))
    tokens = prompt(4, 11)
    for turn in range(4):
        (request,) = engine.add_request(tokens, SamplingParams(temperature=0, max_tokens=13, ignore_eos=True))
        drain(engine, drafter)
        assert not request.failed_drafters
        drafted, accepted = counts([request])
        assert accepted == drafted > 8
        tokens = [*request.token_ids, *prompt(turn, 3)]
    assert request.num_cached_tokens > 40


def test_aborted_requests_leave_nothing_that_harms_others():
    drafter = toy_eagle()
    engine = drafting_engine(drafter, chain(3), PLAIN)
    for number in range(6):
        engine.add_request(prompt(number % 2, 30), LONG, request_id=str(number))
        for _ in range(3):
            engine.step()
        if number % 3 == 0:
            engine.abort(str(number))
    drain(engine, drafter)
    (request,) = engine.add_request(prompt(0, 30), LONG)
    drain(engine, drafter)
    assert not request.failed_drafters
    drafted, accepted = counts([request])
    assert accepted == drafted > 20


def test_features_that_were_never_seen_make_poor_guesses_and_nothing_else():
    drafter = toy_eagle(strict=False)
    engine = drafting_engine(drafter, chain(3))
    observe = drafter.observe
    drafter.observe = lambda *args: None
    engine.add_request(prompt(5, 40), SamplingParams(temperature=0, max_tokens=1))
    drain(engine, drafter)
    drafter.observe = observe
    (request,) = engine.add_request(prompt(5, 40), LONG)
    drain(engine, drafter)
    plain = toy_engine()
    (expected,) = plain.add_request(prompt(5, 40), LONG)
    drain_plain(plain)
    assert request.token_ids == expected.token_ids
    assert request.num_cached_tokens == 36
    assert drafter._runner.poor > 0
    assert not request.failed_drafters


def test_a_request_that_outgrows_the_heads_context_continues_without_drafts():
    drafter = toy_eagle(longest=40)
    engine = drafting_engine(drafter, chain(4), tree(6, 2))
    short, long = (
        engine.add_request(prompt(number, length), LONG)[0] for number, length in ((1, 10), (2, 45))
    )
    drain(engine, drafter)
    assert not short.failed_drafters
    assert 15 < short.speculative.num_accepted_draft_tokens <= 30
    assert long.speculative.num_draft_tokens == 0


def test_a_head_that_drafts_by_masks_drafts_no_trees_on_the_device_also_if_it_comes_later():
    drafter = toy_eagle()
    drafting_engine(drafter, chain(3))
    assert drafter.device_draft(tree(6, 2)) is not None
    masked = replace(drafter._shape, mask=Mask(1, np.ones(2, np.float32)))
    drafter.replace(LoadedHead(drafter._runner, masked, DraftSampling.COUPLED))
    assert drafter.device_draft(tree(6, 2)) is None
    assert drafter.device_draft(chain(6)) is not None


def test_what_was_prefilled_ahead_is_not_computed_again_when_it_is_attached():
    drafter = toy_eagle()
    engine = drafting_engine(drafter, PLAIN)
    lengths = (1, 5, 16, 33)
    added = [engine.add_request(prompt(number, length), LONG)[0] for number, length in enumerate(lengths)]
    while any(request.num_output == 0 for request in added):
        engine.step()
    drafter.prefill_ahead(added)
    passes = list(drafter._runner.passes)
    assert sum(rows for rows, _ in passes) == sum(len(request.token_ids) - 1 for request in added)
    assert drafter.attach(added)
    assert drafter._runner.passes == passes
