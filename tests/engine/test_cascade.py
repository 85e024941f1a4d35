"""The cascade of two drafters, and the controller's trimming of nodes that are not worth a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.control.controller import Controller, FixedController, StepPlan
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from tests.engine.test_speculative_metrics import IDS, PLAIN_OUTPUT, truth
from tests.engines import new_engine
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, drain

CHEAP, DEAR = "cheap", "dear"


class Chains(Drafter):
    """Drafts the true continuation up to a given length, each token with the same chance."""

    def __init__(self, name: str, length: int, chance: float | None) -> None:
        self.name = name
        self.length, self.chance = length, chance
        self.truth = truth()
        self.asked: list[DraftPlan] = []
        self.fails = False

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        self.asked += plans
        assert not self.fails, "out of order"
        chains = [
            self.truth[request.num_output :][: min(self.length, plan.levels)]
            for request, plan in zip(requests, plans, strict=True)
        ]
        chance = self.chance
        return DraftTrees.chains(
            chains, None if chance is None else [[chance ** (at + 1) for at in range(len(c))] for c in chains]
        )


def engine_of(controller: Controller, *drafters: Drafter) -> Engine:
    by_name = {drafter.name: drafter for drafter in drafters}
    limits = Limits(VOCAB, 128, 8, 32)
    return new_engine(
        ToyBackend(), ToyTokenizer(), limits, num_pages=200, controller=controller, drafters=by_name
    )


def stepped(engine: Engine, requests: int = 1):
    """The draft statistics of the first step that can draft."""
    for _ in range(requests):
        params = SamplingParams(temperature=0, max_tokens=PLAIN_OUTPUT, ignore_eos=True)
        engine.add_request(IDS, params)
    engine.step()
    if engine.stats.new_tokens < requests:
        engine.step()
    engine.step()
    return engine.stats.drafts


def cascade(cheap: Chains, dear: Chains, enough: float, budget: int = 6) -> Engine:
    plan = DraftPlan(CHEAP, budget, otherwise=DraftPlan(DEAR, 4), enough=enough)
    return engine_of(FixedController(plan), cheap, dear)


@pytest.mark.parametrize(
    ("cheap", "dear", "enough", "used", "asked"),
    [
        ((3, 0.9), (4, 0.9), 1.5, CHEAP, 0),  # promises 0.9 + 0.81 + 0.73
        ((1, 0.9), (4, 0.9), 1.5, DEAR, 1),
        ((0, 0.9), (4, 0.9), 1.5, DEAR, 1),
        ((1, 0.9), (0, 0.9), 1.5, CHEAP, 1),  # the other drafts nothing
        ((1, 0.9), (2, 0.1), 1.5, CHEAP, 1),  # or is less sure
        ((1, 0.9), (2, None), 1.5, DEAR, 1),
        ((1, None), (4, 0.9), 1.5, CHEAP, 0),  # an unknown chance is no reason to ask another drafter
    ],
)
def test_the_second_drafter_is_asked_where_the_first_expects_too_few_tokens(cheap, dear, enough, used, asked):
    first, second = Chains(CHEAP, *cheap), Chains(DEAR, *dear)
    (facts,) = stepped(cascade(first, second, enough))
    assert facts.drafter == used
    assert facts.nodes == facts.accepted == (cheap if used == CHEAP else dear)[0]
    assert len(second.asked) == asked


def test_the_second_drafter_drafts_only_where_the_first_expects_too_few_tokens():
    class Sometimes(Chains):
        def propose(self, requests, plans):
            trees = super().propose(requests, plans)
            return trees.kept(np.repeat([request.request_id == "1" for request in requests], self.length))

    first, second = Sometimes(CHEAP, 3, 0.9), Chains(DEAR, 4, 0.9)
    facts = stepped(cascade(first, second, 1.5), requests=3)
    assert [(draft.drafter, draft.nodes) for draft in facts] == [(DEAR, 4), (CHEAP, 3), (DEAR, 4)]
    assert len(second.asked) == 2


def test_the_second_drafter_keeps_to_its_own_plan_and_to_what_the_first_had_reserved():
    first, second = Chains(CHEAP, 0, 0.9), Chains(DEAR, 9, 0.9)
    stepped(cascade(first, second, 1.0, budget=6))
    stepped(cascade(first, second, 1.0, budget=2))
    assert [plan.budget for plan in second.asked] == [4, 2]


def test_the_second_drafter_replaces_one_that_failed():
    first, second = Chains(CHEAP, 3, 0.9), Chains(DEAR, 4, 0.9)
    first.fails = True
    engine = cascade(first, second, 1.5)
    (facts,) = stepped(engine)
    assert facts.drafter == DEAR, "in the very step"
    engine.step()
    assert engine.stats.drafts[0].drafter == DEAR
    assert len(first.asked) == 1
    second.fails = True
    drain(engine)
    assert not engine.has_unfinished


class Trims(FixedController):
    """Keeps nodes that are likely enough; records the requests that it was asked about."""

    def __init__(self, plan: DraftPlan, least: float) -> None:
        super().__init__(plan)
        self.least = least
        self.asked: list[list[str]] = []

    def trim(self, step: StepPlan, parts: Sequence[Scheduled], trees: DraftTrees) -> DraftTrees:
        self.asked.append([part.request.request_id for part in parts])
        assert trees.chances is not None
        return trees.kept(trees.chances >= self.least)


def test_what_the_controller_trims_is_not_verified():
    controller = Trims(DraftPlan(DEAR, 6), least=0.7)
    (one, other) = stepped(engine_of(controller, Chains(DEAR, 6, 0.9)), requests=2)
    assert (one.nodes, one.accepted, one.path) == (3, 3, (0, 1, 2))  # 0.9, 0.81, 0.73
    assert other.nodes == 3
    assert controller.asked == [["0", "1"]], "once, when there is a draft"


def test_a_step_whose_draft_is_trimmed_away_is_plain():
    controller = Trims(DraftPlan(DEAR, 6), least=0.95)
    engine = engine_of(controller, Chains(DEAR, 6, 0.9))
    assert stepped(engine) == ()
    assert engine.stats.rows == engine.stats.new_tokens == 1


def test_trimming_counts_as_plan_time_and_a_pass_as_forward_time():
    now = [0.0]

    class SlowPasses(ToyBackend):
        def forward(self, batch):
            now[0] += 4.0
            return super().forward(batch)

    class Slow(Trims):
        def trim(self, step, parts, trees):
            now[0] += 1.0
            return super().trim(step, parts, trees)

    class SlowChains(Chains):
        def propose(self, requests, plans):
            now[0] += 2.0
            return super().propose(requests, plans)

    engine = new_engine(
        SlowPasses(),
        ToyTokenizer(),
        Limits(VOCAB, 128, 8, 32),
        num_pages=200,
        controller=Slow(DraftPlan(DEAR, 6), 0.5),
        drafters={DEAR: SlowChains(DEAR, 6, 0.9)},
        clock=lambda: now[0],
    )
    stepped(engine)
    assert (engine.stats.plan_time, engine.stats.draft_time, engine.stats.forward_time) == (1.0, 2.0, 4.0)
    assert engine.stats.total_time == 7.0
