"""Shadow drafts: they measure a drafter beside plain device passes, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.control.controller import Controller, Load, StepPlan
from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DrafterNeeds
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.engine.executors.shadow import MAX_FOLLOWED
from tests.engine.mixed_requests import params
from tests.engine.test_exactness import prompt
from tests.engine.test_lookup import Repeating
from tests.toy import drain, toy_engine

LENGTH = 4
SHADOW = DraftPlan("ngram", LENGTH)


class Shadowing(Controller):
    """Plain decoding, and shadow drafts beside it."""

    def __init__(self, drafted: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.drafted, self.step = drafted, 0
        self.tries, self.hits = np.zeros(LENGTH, int), np.zeros(LENGTH, int)

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        self.step += 1
        plan = SHADOW if self.step in self.drafted else PLAIN
        return StepPlan([plan] * len(running), shadow=None if plan.budget else SHADOW)

    def observe(self, step: StepPlan, stats: StepStats) -> None:
        if stats.shadow is not None:
            assert stats.shadow.drafter == "ngram"
            self.tries += stats.shadow.tries
            self.hits += stats.shadow.hits


def run(controller: Controller | None, count: int = 1, tokens: int = 60):
    drafter = NgramDrafter(NgramDrafter.Options(prompt_lookup_min=1))
    options = {"controller": controller} if controller else {"budget": LENGTH, "branching": 1}
    engine = toy_engine(Repeating(on_device=True), drafter=drafter, num_pages=2000, **options)
    own = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    requests = [engine.add_request(prompt(n, 5), params(n, **own))[0] for n in range(count)]
    drain(engine)
    return requests


def test_shadow_drafts_count_what_verified_drafts_would():
    """Except the last one, whose end is not observed, and the first, after the passes in flight."""
    controller = Shadowing()
    (shadowed,), (drafted,) = run(controller), run(None)
    assert shadowed.output_token_ids == drafted.output_token_ids
    assert shadowed.speculative.num_draft_tokens == 0
    accepted = drafted.speculative.num_accepted_draft_tokens
    assert accepted > 20
    assert abs(int(controller.hits.sum()) - accepted) <= 2 * LENGTH
    assert (controller.hits <= controller.tries).all()
    assert (controller.tries[1:] <= controller.hits[:-1]).all()  # deeper only where all above were right


def test_shadow_counts_stay_consistent_with_drafted_passes_in_between():
    controller = Shadowing({7, 8, 9, 20, 31, 32})
    (mixed,), (drafted,) = run(controller), run(None)
    assert mixed.output_token_ids == drafted.output_token_ids
    assert mixed.speculative.num_accepted_draft_tokens > 0
    assert (controller.tries[1:] <= controller.hits[:-1]).all()


def test_a_few_requests_are_followed_and_others_when_these_have_ended():
    controller = Shadowing()
    requests = run(controller, count=MAX_FOLLOWED + 4, tokens=20)
    assert all(request.num_output == 20 for request in requests)
    assert controller.tries[0] <= MAX_FOLLOWED * 20
    assert controller.tries.sum() > MAX_FOLLOWED * 10


def test_a_drafter_that_needs_more_than_texts_drafts_in_no_shadow():
    """It would compute, and may write to the target's pages, while a pass runs."""

    class Deep(NgramDrafter):
        needs = DrafterNeeds(target_pages=True)

        def propose(self, requests, plans):
            raise AssertionError("asked while a pass runs")

    controller = Shadowing()
    engine = toy_engine(
        Repeating(on_device=True), drafter=Deep(NgramDrafter.Options()), controller=controller
    )
    (request,) = engine.add_request(prompt(2, 5), params(2, max_tokens=20, ignore_eos=True))
    drain(engine)
    assert (request.num_output, controller.tries.sum()) == (20, 0)
    assert not request.failed_drafters
