"""Chains of one length for all who run: never slower than none, and close to the best length."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.control.controller import Load
from paceline.control.decision import Decision
from paceline.control.lengths import ChainChances, LengthController
from paceline.core.stats import DraftFacts, StepStats
from paceline.core.trees import PLAIN, DraftPlan
from tests.control.simulation import SimulatedDrafter, SimulatedRequest, Step, World

LENGTHS = [plan.levels for plan in LengthController("eagle3", 7).plans_ahead()]
PER_LEVEL = 0.00004


def small(rows: float) -> float:
    """Seconds of a pass that rows hardly matter to."""
    return 0.0006 + 0.000002 * rows


def busy(rows: float) -> float:
    """Seconds of a pass that pays for rows."""
    return 0.0006 + 0.00001 * max(0.0, rows - 16)


def world(
    right: Callable[[int], float], seconds: Callable[[float], float], count: Callable[[int], int]
) -> World:
    return World({"eagle3": SimulatedDrafter(right, 0.0, PER_LEVEL)}, seconds, count)


def rate(steps: list[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def rate_of(length: int, right: float, seconds: Callable[[float], float], count: int) -> float:
    """Tokens per second of chains of this length."""
    tokens = sum(right**depth for depth in range(length + 1))
    return count * tokens / (seconds(count * (1 + length)) + PER_LEVEL * length)


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("seconds", [small, busy])
@pytest.mark.parametrize("right", [0.05, 0.5, 0.9])
def test_it_is_as_good_as_plain_decoding_and_as_the_best_length(right, seconds, count):
    done = world(lambda step: right, seconds, lambda step: count).run(LengthController("eagle3", 7), 900)
    reached = rate(done[200:])
    assert reached > 0.98 * rate_of(0, right, seconds, count)
    assert reached > 0.95 * max(rate_of(length, right, seconds, count) for length in LENGTHS)


def test_a_head_that_becomes_good_or_bad_is_noticed():
    controller = LengthController("eagle3", 7)
    right = [0.9, 0.02, 0.9]
    done = world(lambda step: right[step // 1200], small, lambda step: 4).run(controller, 3600)
    assert rate(done[1300:2400]) > 0.98 * rate_of(0, 0.02, small, 4)
    assert rate(done[3000:]) > 0.95 * rate_of(LENGTHS[-1], 0.9, small, 4)


def test_another_load_gets_another_length_and_its_own_times():
    count = [1, 16, 1]
    done = world(lambda step: 0.3, busy, lambda step: count[step // 400]).run(
        LengthController("eagle3", 7), 1200
    )
    for part, running in enumerate(count):
        best = max(rate_of(length, 0.3, busy, running) for length in LENGTHS)
        assert rate(done[400 * part + 100 : 400 * (part + 1)]) > 0.95 * best


def test_times_of_the_start_spare_it_trying():
    controller = LengthController("eagle3", 7)
    for plan in controller.plans_ahead():
        controller.expect(plan, {16: busy(16 * (1 + plan.levels))})
    controller._ahead = False  # the simulated steps do not run ahead
    controller._times._known = {(False, *kind[1:]): known for kind, known in controller._times._known.items()}
    done = world(lambda step: 0.1, busy, lambda step: 16).run(controller, 60)
    assert max(step.nodes[0] for step in done[20:]) == 0


def test_a_prompt_that_is_computed_by_a_step_of_its_own_has_nothing_tried():
    controller = LengthController("eagle3", 7, [0.9])
    for plan in controller.plans_ahead():
        controller.expect(plan, {1: small(1 + plan.levels) + PER_LEVEL * plan.levels})
    plain = 0
    for number in range(20):
        request = SimulatedRequest(str(number), 150, num_pending=40)
        controller.plan([request], Load(1, 0))
        controller.observe(StepStats(requests=1, rows=40, prefill_tokens=40, forward_time=0.002))
        request.num_pending = 1
        for _ in range(23 + number):  # so that times to choose fall on all steps of a request
            (plan,) = controller.plan([request], Load(1, 0))
            plain += plan.budget == 0
            draft = DraftFacts(str(number), "", "eagle3", plan.levels, plan.levels, accepted=plan.levels)
            seconds = small(1 + plan.levels) + PER_LEVEL * plan.levels
            facts = StepStats(requests=1, drafts=(draft,) if plan.budget else (), forward_time=seconds)
            facts.ahead = True
            controller.observe(facts)
    assert plain == 0


def test_trials_take_less_than_a_hundredth_of_the_time():
    controller = LengthController("eagle3", 7)
    done = world(lambda step: 0.05, small, lambda step: 4).run(controller, 3000)
    assert 0 < controller.facts().regret < 0.01 * sum(step.seconds for step in done)
    assert 0 < sum(max(step.nodes) > 0 for step in done[500:]) < 0.03 * 2500


def test_who_asks_for_a_plan_gets_it_and_so_does_who_asks_for_none():
    controller = LengthController("eagle3", 7)
    own = DraftPlan("suffix", 3)
    free, asks, off = (SimulatedRequest(str(number), 9) for number in range(3))
    asks.plan, off.plan = own, PLAIN
    for plan in controller.plans_ahead():
        controller.expect(plan, {1: 1.0, 2: 1.0})
    alone = controller.plan([free], Load(1, 0))
    assert alone[0].drafter == "eagle3"
    assert controller.plan([free, asks], Load(2, 0)) == [*alone, own]
    assert controller.plan([free, off], Load(2, 0)) == [*alone, PLAIN]


def test_nothing_is_changed_while_prompts_are_computed():
    controller = LengthController("eagle3", 7)
    running = [SimulatedRequest(str(number), 9) for number in range(2)]
    running[1].num_pending = 40
    assert len({tuple(controller.plan(running, Load(2, 0))) for _ in range(100)}) == 1


def test_chances_are_counted_by_depth_and_what_was_not_tried_is_kept():
    chances = ChainChances(3, [0.5, 0.5, 0.8])
    assert chances.tokens(3) == pytest.approx(1 + 0.5 + 0.25 + 0.2)
    for _ in range(2000):
        chances.fade()
        chances.add(
            [DraftFacts("a", "", "eagle3", nodes=2, depth=2, accepted=accepted) for accepted in (2, 1)]
        )
    assert chances.tokens(3) == pytest.approx(1 + 1 + 0.5 + 0.4, abs=1e-3)


def test_every_decision_says_what_it_was_made_by():
    decisions: list[Decision] = []
    controller = LengthController("eagle3", 7, log=decisions.append)
    world(lambda step: 0.8, small, lambda step: 2).run(controller, 200)
    last = decisions[-1].facts()
    assert (last["reason"], last["drafts"]) == ("gain", (("all", "eagle3", LENGTHS[-1]),))
    assert last["gain"] > 2
    assert controller.facts().gain == pytest.approx(last["gain"], rel=0.01)
