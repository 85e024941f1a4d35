"""Passes on the device: one plan for all requests, never slower than plain, close to the best arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise

import numpy as np
import pytest

from paceline.control.acceptance.chains import ChainAcceptance
from paceline.control.auto import AutoController
from paceline.control.config import CONFIG
from paceline.control.controller import FixedController, Load
from paceline.control.cost.device_passes import DevicePassCosts
from paceline.control.decision import Decision
from paceline.control.explorer import DeviceExplorer
from paceline.control.memory import Memory
from paceline.control.planner.arms import Arm, ArmEstimate, device_arms, drafting_parts, prior_acceptance
from paceline.control.planner.device import DevicePlanner
from paceline.core.stats import DraftStats, StepStats
from paceline.core.trees import PLAIN, DraftPlan
from tests.control.simulation import SimulatedDrafter, SimulatedRequest, Step, World
from tests.large import in_turn

HEAD = (2, 3, 5, 7)
TEXT = (3, 7)
PER_LEVEL = 0.00004  # seconds


def small(rows: float) -> float:
    """Seconds of a pass in which rows are almost free."""
    return 0.0006 + 0.000002 * rows


def busy(rows: float) -> float:
    """Seconds of a pass in which rows are expensive."""
    return 0.0006 + 0.00001 * max(0.0, rows - 16)


def controller(
    name: str = "head", log: Callable[[Decision], None] | None = None, memory: Memory | None = None
) -> AutoController:
    lengths, chances, weight = (HEAD, [0.7], 12) if name == "head" else (TEXT, [0.1, 0.7], 3)
    arms = [Arm(DraftPlan(name, length), attaches=name == "head") for length in lengths]
    acceptance = {(name, greedy): ChainAcceptance(7, chances, weight) for greedy in (True, False)}
    planner = DevicePlanner(arms, acceptance)
    costs = World({}).costs()
    return AutoController({name: DraftPlan(name, 7)}, costs, log=log, memory=memory, device=planner)


def world(
    right: Callable[[int], float],
    seconds: Callable[[float], float],
    count: Callable[[int], int],
    name: str = "head",
    finds: Callable[[int], float] = lambda step: 1.0,
) -> World:
    per_level = PER_LEVEL if name == "head" else 0.0
    drafter = SimulatedDrafter(right, 0.0, per_level, finds)
    return World({name: drafter}, seconds, count, on_device=True)


def rate(steps: list[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def rate_of(length: int, right: float, seconds: Callable[[float], float], count: int) -> float:
    """Tokens per second of a head's chains of this length."""
    tokens = sum(right**depth for depth in range(length + 1))
    return count * tokens / (seconds(count * (1 + length)) + PER_LEVEL * length)


@pytest.mark.parametrize(
    ("right", "load"),
    in_turn(
        {"0.9": 0.9, "0.05": 0.05, "0.5": 0.5},
        {"sixteen": (small, 16), "alone": (small, 1), "busy": (busy, 16), "one busy": (busy, 1)},
    ),
)
def test_as_fast_as_plain_decoding_and_as_the_best_length(right, load):
    seconds, count = load
    done = world(lambda step: right, seconds, lambda step: count).run(controller(), 900)
    reached = rate(done[200:])
    assert reached > 0.98 * rate_of(0, right, seconds, count)
    assert reached > 0.95 * max(rate_of(length, right, seconds, count) for length in (0, *HEAD))


@pytest.mark.parametrize(
    ("finds", "count"),
    in_turn({"0.9": 0.9, "0.02": 0.02, "0.2": 0.2}, {str(count): count for count in (4, 64, 1)}),
)
def test_lookup_drafts_never_cost_more_than_two_percent(finds, count):
    """Where most lookups find nothing, their empty rows cost as much as accepted ones."""

    def seconds(rows: float) -> float:
        return 0.0012 * (1.0 + 0.02 * (rows - 1) ** 0.8)

    done = world(lambda step: 0.8, seconds, lambda step: count, "text", lambda step: finds).run(
        controller("text"), 900
    )
    accepted = {length: finds * sum(0.8**depth for depth in range(1, length + 1)) for length in (0, *TEXT)}
    rates = {length: count * (1 + own) / seconds(count * (1 + length)) for length, own in accepted.items()}
    assert rate(done[100:]) > 0.98 * rates[0]
    assert rate(done[100:]) > 0.95 * max(rates.values())


def text_pass(rows: float) -> float:
    """Seconds of a pass of a 1.5B model on an H200, about."""
    return 0.00095 * (1 + 0.007 * (rows - 1))


@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_nothing_is_lost_in_the_first_passes_where_texts_do_not_repeat(count):
    auto = controller("text")
    for plan in auto.device_plans():
        auto.expect(plan, {count: text_pass(count * (1 + plan.levels))})
    simulated = world(lambda step: 0.5, text_pass, lambda step: count, "text", lambda step: 0.02)
    simulated.noise = 0.0
    assert rate(simulated.run(auto, 60)) > 0.99 * count / text_pass(count)


@pytest.mark.parametrize("count", [1, 16])
def test_repetitive_text_is_drafted_after_a_few_passes(count):
    auto = controller("text")
    for plan in auto.device_plans():
        auto.expect(plan, {count: text_pass(count * (1 + plan.levels))})
    simulated = world(lambda step: 0.95, text_pass, lambda step: count, "text", lambda step: 0.9)
    drafted = [max(step.nodes) for step in simulated.run(auto, 200)]
    assert max(drafted[:20]) > 0
    assert set(drafted[40:]) == {7}


def test_follows_text_that_starts_and_stops_repeating():
    finds = [0.05, 0.95, 0.05]
    done = world(
        lambda step: 0.9,
        lambda rows: 0.0006 + 0.00001 * rows,
        lambda step: 4,
        "text",
        lambda step: finds[step // 800],
    ).run(controller("text"), 2400)
    drafted = np.array([max(step.nodes) > 0 for step in done])
    assert drafted[400:800].mean() < 0.15
    assert drafted[1000:1600].mean() > 0.85
    assert drafted[1800:].mean() < 0.15


def test_follows_a_head_that_becomes_bad_and_good_again():
    right = [0.9, 0.02, 0.9]
    done = world(lambda step: right[step // 1200], small, lambda step: 4).run(controller(), 3600)
    assert rate(done[1300:2400]) > 0.98 * rate_of(0, 0.02, small, 4)
    assert rate(done[3000:]) > 0.95 * rate_of(HEAD[-1], 0.9, small, 4)


def test_each_load_has_its_own_length_and_times():
    count = [1, 16, 1]
    done = world(lambda step: 0.3, busy, lambda step: count[step // 400]).run(controller(), 1200)
    for part, running in enumerate(count):
        best = max(rate_of(length, 0.3, busy, running) for length in (0, *HEAD))
        assert rate(done[400 * part + 100 : 400 * (part + 1)]) > 0.95 * best


def test_times_measured_at_start_up_spare_trials():
    auto = controller()
    for plan in auto.device_plans():
        auto.expect(plan, {16: busy(16 * (1 + plan.levels)) + PER_LEVEL * plan.levels})
    done = world(lambda step: 0.1, busy, lambda step: 16).run(auto, 60)
    assert max(step.nodes[0] for step in done[20:]) == 0


def test_a_plan_without_buffers_for_the_load_is_not_chosen():
    auto = controller()
    for plan in auto.device_plans():
        auto.expect(plan, {4: 0.001} if plan.budget else {4: 0.001, 16: 0.001})
    done = world(lambda step: 0.9, small, lambda step: 16).run(auto, 200)
    assert {max(step.nodes) for step in done[3:]} == {0}


def test_trials_take_about_one_percent_of_the_time():
    auto = controller()
    done = world(lambda step: 0.05, small, lambda step: 4).run(auto, 3000)
    assert 0 < auto.stats().regret < 0.011 * sum(step.seconds for step in done)
    assert 0 < sum(max(step.nodes) > 0 for step in done[500:]) < 0.06 * 2500


def test_a_trial_that_costs_more_than_is_usually_saved_up_comes_in_the_end():
    plain, head = PLAIN, DraftPlan("head", 2)
    arms = {
        plain: ArmEstimate(1.0, 0.001, 0.0, 0.0, True),
        head: ArmEstimate(2.0, 0.001, catch_up=0.02, catch_up_per_token=0.0, is_timed=True),
    }
    explorer = DeviceExplorer(list(arms), None)
    tried = 0
    while explorer.pick(plain, arms) == plain and tried < 10_000:
        tried += 1
        explorer.observe(plain, tried, 0.001)
    assert tried == pytest.approx(2000, abs=2)  # 1 % of their time


def test_a_request_keeps_the_plan_it_asks_for_also_plain():
    auto = controller()
    own = DraftPlan("suffix", 3)
    free, asks, off = (SimulatedRequest(str(number), 9) for number in range(3))
    asks.plan, off.plan = own, PLAIN
    for plan in auto.device_plans():
        auto.expect(plan, {1: 1.0, 2: 1.0})
    (alone,) = auto.plan([free], Load(1, 0, on_device=True)).plans
    assert alone.drafter == "head"
    assert auto.plan([free, asks], Load(2, 0, on_device=True)).plans == [alone, own]
    assert auto.plan([free, off], Load(2, 0, on_device=True)).plans == [alone, PLAIN]


def test_the_plan_stays_during_prefill():
    auto = controller()
    running = [SimulatedRequest(str(number), 9) for number in range(2)]
    running[1].num_pending = 40
    assert len({tuple(auto.plan(running, Load(2, 0, on_device=True)).plans) for _ in range(100)}) == 1


def test_a_pass_through_the_host_does_not_update_the_device_model():
    auto = controller()
    running = [SimulatedRequest("0", 900)]
    step = auto.plan(running, Load(1, 0, on_device=True))
    auto.observe(step, StepStats(requests=1, rows=40, prefill_tokens=39, new_tokens=1, forward_time=1.0))
    assert auto.stats().regret == 0
    assert auto._device.seconds(PLAIN) == 1  # the guess before anything was measured


@pytest.mark.parametrize("disturbed", [True, False])
def test_passes_beside_a_trainer_are_not_timed(disturbed):
    auto = controller()
    for plan in auto.device_plans():
        auto.expect(plan, {1: 0.001})
    running = [SimulatedRequest("0", 900)]
    for _ in range(50):
        step = auto.plan(running, Load(1, 0, on_device=True))
        stats = StepStats(requests=1, rows=1, new_tokens=1, plan=step.record, forward_time=0.0012)
        auto.observe(step, replace(stats, disturbed=disturbed))
    assert auto._device.seconds(PLAIN) == pytest.approx(0.001 if disturbed else 0.0012, rel=0.02)


@pytest.mark.parametrize("others_follow", [False, True])
def test_passes_in_which_requests_end_are_not_timed_unless_most_are_like_that(others_follow):
    """The device waits for the host there. If it did not know, the next batch would expect slow passes."""
    planner, names, slow = DevicePlanner([], {}), count(), 0.0015
    planner.expect(PLAIN, dict.fromkeys((1, 2, 4, 8, 16, 32), 0.001))
    batches, passes = (1, 240) if others_follow else (6, 40)
    for _ in range(batches):
        running = [SimulatedRequest(str(next(names)), 64, num_pending=9) for _ in range(32)]
        for number in range(passes):
            planner.choose(running, Load(len(running), 0, on_device=True))
            for request in running:
                request.num_pending = 1
            ended, size = number % 3 == 2, len(running)
            if ended:
                running[0].num_output = running[0].max_output
                others = [SimulatedRequest(str(next(names)), 64)] if others_follow else []
                running = [*running[1:], *others]
            seconds = slow if ended or number % 3 == 0 else 0.001
            stats = StepStats(requests=size, running=size - ended, rows=size, plan=PLAIN)
            planner.observe(PLAIN, replace(stats, forward_time=seconds))
        for request in running:
            request.num_output = request.max_output
    assert planner._costs.seconds(PLAIN, 32, 0) == pytest.approx(slow if others_follow else 0.001, rel=0.05)


def test_ends_are_noted_with_the_next_choice():
    """Not in each pass: the device waits for the host there."""
    planner = controller()._device
    for plan in planner.arms:
        planner.expect(plan, {16: 0.001, 32: 0.001})
    running = [SimulatedRequest(str(number), 64) for number in range(32)]
    planner.choose(running, Load(32, 0, on_device=True))
    left, hold = [planner._load.tokens_left], CONFIG.device_planner.hold
    for _ in range(hold):
        running[0].num_output = running[0].max_output
        running = running[1:]
        for request in running:
            request.num_output += 1
        planner.choose(running, Load(len(running), 0, on_device=True))
        left.append(planner._load.tokens_left)
    assert left[:hold] == [left[0]] * hold
    assert left[hold] != left[0]
    assert planner._load.remaining == 1 - hold / 32


def facts(accepted: int, nodes: int = 2, depth: int = 2) -> DraftStats:
    return DraftStats("a", "", "head", nodes=nodes, depth=depth, accepted=accepted)


def test_chances_are_counted_by_depth_and_untried_depths_keep_theirs():
    chances = ChainAcceptance(3, [0.5, 0.5, 0.8], 12)
    assert chances.reached(3) == pytest.approx([0.5, 0.25, 0.2], rel=0.1)
    for _ in range(2000):
        chances.add([facts(2), facts(1)], 2, 2)
    assert chances.reached(3) == pytest.approx([1, 0.5, 0.4], rel=0.1)


def test_an_empty_draft_counts_as_rejected_and_a_request_that_ends_does_not():
    chances = ChainAcceptance(2, [0.5], 12)
    for _ in range(2000):
        chances.add([facts(2)], 4, 2)  # three found nothing
    assert chances.reached(2) == pytest.approx([0.25, 0.25], rel=0.03)
    chances = ChainAcceptance(2, [0.5], 12)
    for _ in range(2000):
        chances.add([facts(1, depth=1), facts(2)], 2, 2)  # the first ended with its first token
    assert chances.reached(2) == pytest.approx([1, 1], rel=0.03)


@pytest.mark.parametrize(("seconds", "count", "is_tree"), [(small, 1, True), (busy, 16, False)])
def test_trees_are_chosen_where_their_rows_are_almost_free(seconds, count, is_tree):
    longest = {"head": 7}
    arms = device_arms("head", None, longest, trees=True)
    auto = AutoController(
        {"head": DraftPlan("head", 7)},
        World({}).costs(),
        device=DevicePlanner(arms, prior_acceptance(longest, ["head"], {})),
    )
    for plan in auto.device_plans():
        auto.expect(plan, {count: seconds(count * (1 + plan.nodes)) + PER_LEVEL * plan.levels})
    requests = [SimulatedRequest(str(number), 900) for number in range(count)]
    step = auto.plan(requests, Load(count, 0, on_device=True))
    assert (step.record.branching > 1) == is_tree


def test_trees_beside_lookups_are_cascades_whose_lookups_are_chains():
    arms = device_arms("head", "ngram", {"head": 7, "ngram": 15}, trees=True)
    trees = [arm.plan for arm in arms if arm.plan.branching > 1]
    assert [(plan.drafter, plan.nodes, plan.levels) for plan in trees] == [
        ("ngram", nodes, depth) for nodes, _, depth in CONFIG.device_planner.trees
    ]
    found, tree = drafting_parts(trees[0])
    assert (found.drafter, found.nodes, found.branching) == ("ngram", trees[0].levels, 1)
    assert (tree.drafter, tree.nodes, tree.branching) == ("head", trees[0].nodes, trees[0].branching)
    chain = trees[0].as_chain()
    assert (chain.nodes, chain.second().nodes, chain.second().branching) == (chain.levels, chain.levels, 1)


@pytest.mark.parametrize(("longest", "expected"), [(2, []), (3, [(15, 3)]), (4, [(7, 4), (15, 3)])])
def test_trees_have_no_path_that_is_longer_than_the_head_may_draft(longest, expected):
    arms = device_arms("head", None, {"head": longest}, trees=True)
    assert [(arm.plan.nodes, arm.plan.levels) for arm in arms if arm.plan.branching > 1] == expected


def test_what_was_learned_on_the_device_is_known_to_the_next_engine(tmp_path):
    memory = Memory(tmp_path / "memory.json")
    first = controller(memory=memory)
    world(lambda step: 0.05, small, lambda step: 16).run(first, 300)
    first.close()
    for plan in (again := controller(memory=memory)).device_plans():
        again.expect(plan, {16: small(16 * (1 + plan.levels)) + PER_LEVEL * plan.levels})
    done = world(lambda step: 0.05, small, lambda step: 16).run(again, 60)
    assert max(step.nodes[0] for step in done) == 0


def test_long_prompts_with_short_answers_are_not_drafted_for_because_a_head_must_catch_up():
    plans = []
    for prompt in (50, 4000):
        auto = controller()
        for plan in auto.device_plans():
            auto.expect(plan, {16: small(16 * (1 + plan.levels)) + PER_LEVEL * plan.levels}, 1e-7)
        requests = [SimulatedRequest(str(number), 40, num_pending=prompt) for number in range(16)]
        plans.append(auto.coming_plan(requests, Load(16, 0, on_device=True)))
    assert [plan.drafter for plan in plans] == ["head", None]


def test_decisions_are_logged_with_their_numbers():
    decisions: list[Decision] = []
    auto = controller(log=decisions.append)
    world(lambda step: 0.8, small, lambda step: 2).run(auto, 200)
    gains = [decision.facts() for decision in decisions if decision.reason == "gain"]
    assert gains[-1]["drafts"][0][:2] == ("all", "head")
    assert gains[-1]["gain"] > 1.5
    assert auto.stats().gain > 2


def both(lookups: float, copied: float, seconds: Callable[[float], float], count: int) -> World:
    """A head that is right in 7 of 10 cases, beside lookups that find something for this share of passes."""
    head = SimulatedDrafter(lambda step: 0.7, 0.0, PER_LEVEL)
    texts = SimulatedDrafter(lambda step: copied, 0.0, 0.0, lambda step: lookups)
    return World({"text": texts, "head": head}, seconds, lambda step: count, on_device=True)


@pytest.mark.parametrize(
    ("texts", "load"),
    in_turn(
        {"new": (0.02, 0.3), "repeating": (0.5, 0.97)},
        {"alone": (small, 1), "sixteen": (small, 16), "one busy": (busy, 1), "busy": (busy, 16)},
    ),
)
def test_lookups_and_a_head_in_one_pass_are_as_fast_as_the_best_of_their_arms(texts, load):
    (lookups, copied), (seconds, count) = texts, load
    longest = {"text": 15, "head": 7}
    arms = device_arms("head", "text", longest)
    planner = DevicePlanner(arms, prior_acceptance(longest, ["head"], {}))
    plans = {name: DraftPlan(name, most) for name, most in longest.items()}
    auto = AutoController(plans, World({}).costs(), device=planner)
    for plan in auto.device_plans():
        head = plan.levels if plan.otherwise is None else plan.otherwise.levels
        by_head = 0.0 if plan.drafter == "text" and plan.otherwise is None else PER_LEVEL * head
        auto.expect(plan, {count: seconds(count * (1 + plan.levels)) + by_head})
    fixed = {
        plan.label: rate(both(lookups, copied, seconds, count).run(FixedController(plan), 600))
        for plan in auto.device_plans()
    }
    done = both(lookups, copied, seconds, count).run(auto, 700)
    assert rate(done[100:]) > 0.95 * max(fixed.values())
    assert rate(done[:100]) > 0.9 * max(fixed.values())


@pytest.mark.parametrize("others_follow", [False, True])
def test_the_last_tokens_of_a_batch_are_decoded_by_the_present_plan(others_follow):
    """A choice and a switch take longer than another plan could gain, unless other requests follow."""
    planner = controller()._device
    for plan in planner.arms:
        planner.expect(plan, {1: 0.001, 2: 0.001, 4: 0.001})
    running = [SimulatedRequest(str(number), 64) for number in range(4)]

    def choices() -> int:
        planner.choose(running, Load(len(running), 0, on_device=True))
        return planner.choices

    choices()
    for number in range(10 if others_follow else 1):
        running[0].num_output = running[0].max_output
        running = [*running[1:], *[SimulatedRequest(f"later {number}", 64)] * others_follow]
        choices()
    before = choices()
    for request in running[:2]:
        request.num_output = request.max_output
    running = running[2:]
    for request in running:
        request.num_output = 60
    assert (choices() > before) == others_follow


def test_recent_drafts_are_forgotten_with_the_requests_that_they_were_made_for():
    """If drafting stops after a few bad drafts, nothing but that would ever correct them."""
    chances = ChainAcceptance(3, [0.6], 12)
    for _ in range(60):
        chances.add([facts(2), facts(1), facts(0)], 3, 2)
        usual = sum(chances.reached(2))
    for _ in range(8):
        chances.add([facts(0)] * 3, 3, 2)
    streak = sum(chances.reached(2))
    chances.fade_recent(0.5)
    half = sum(chances.reached(2))
    chances.fade_recent(0.0)
    assert streak < half < sum(chances.reached(2)) < usual
    assert sum(chances.reached(2)) > 1.3 * streak


@pytest.mark.parametrize("length", [0, 1])
def test_recent_drafts_are_forgotten_after_thousands_of_requests(length: int) -> None:
    """What remains of their counts would overflow, and no draft of two tokens would be chosen any more."""
    chances = ChainAcceptance(3, [0.6], 12)
    chances.add([facts(3)] * 4, 4, 3)
    for _ in range(3000):  # one of four requests ends, and another one comes
        if length:
            chances.add([facts(1)] * 4, 4, length)
        chances.fade_recent(0.75)
    assert chances.reached(3) == sorted(chances.reached(3), reverse=True)
    assert 0.3 < chances.reached(2)[1] < 1.0


def test_a_few_accepted_lookups_do_not_promise_long_ones():
    chances = ChainAcceptance(15, [0.1, 0.7], 3)
    before = sum(chances.reached(15))
    for _ in range(5):
        chances.add([facts(2)], 1, 2)
    assert before < sum(chances.reached(15)) < 8


def test_one_request_is_believed_as_soon_after_a_crowd_as_after_another_one():
    """What texts of many requests at once had in common says little of the next text."""
    after = []
    for crowd in (1, 16):
        chances = ChainAcceptance(2, [0.6], 12)
        for _ in range(60):
            chances.add([facts(2)] * crowd, crowd, 2)
        chances.fade_recent(0.0)
        for _ in range(30):
            chances.add([facts(0)], 1, 2)
        chances.fade_recent(0.0)
        after.append(chances.reached(1)[0])
    assert after[0] == pytest.approx(after[1], rel=0.05)
    assert after[1] < 0.5


def test_moments_of_accepted_tokens_are_those_of_the_chances_by_depth():
    estimate = ChainAcceptance(3, [0.9, 0.5, 0.8], 12).estimate()
    for length in range(4):
        reached = [1.0, *estimate.reached[:length], 0.0]
        chances = [above - below for above, below in pairwise(reached)]  # [accepted tokens]
        moments = [sum(chance * count**power for count, chance in enumerate(chances)) for power in (1, 2)]
        assert [estimate.accepted[length], estimate.squared[length]] == pytest.approx(moments)


def test_passes_that_are_counted_together_teach_about_as_much_as_one_by_one():
    together, one_by_one = DevicePassCosts(), DevicePassCosts()
    for costs in (together, one_by_one):
        costs.expect(PLAIN, 4, 1.0)
    for seconds in (1.2, 1.1, 1.3, 9.0, 1.2, 1.15):
        together.observe(PLAIN, 4, 0, seconds)
        one_by_one.observe(PLAIN, 4, 0, seconds)
        one_by_one.seconds(PLAIN, 4, 0)
    assert together.seconds(PLAIN, 4, 0) == pytest.approx(one_by_one.seconds(PLAIN, 4, 0), rel=0.03)
    assert together.seconds(PLAIN, 4, 0) == pytest.approx(1.19, rel=0.05)


def test_a_choice_that_stays_the_same_is_made_less_often():
    """Each takes the host 0.15 ms, while the device waits."""
    auto = controller()
    world(lambda step: 0.7, small, lambda step: 16).run(auto, 100)
    planner = auto._device
    before = planner.choices
    running = [SimulatedRequest(str(number), 4096) for number in range(16)]
    for _ in range(10 * CONFIG.device_planner.hold):
        planner.choose(running, Load(16, 0, on_device=True))
    assert planner.choices - before <= 6


def test_lookups_that_find_nothing_say_nothing_of_what_others_find():
    lookups = ChainAcceptance(7, [0.1, 0.7], 12, share=0.12)
    for _ in range(60):
        lookups.add([facts(5, 7, 7)], 2, 7)
    lookups.fade_recent(0.0)
    before = lookups.reached(7)
    for _ in range(8):
        lookups.add([], 1, 7)
    after = lookups.reached(7)
    assert after[0] < 0.7 * before[0]
    assert after[4] / after[0] == pytest.approx(before[4] / before[0], rel=0.03)


def test_the_easy_beginning_of_many_answers_does_not_promise_as_much_for_the_rest():
    """Sixteen requests are at the same place of their answers at once."""
    head = ChainAcceptance(5, [0.6], 12)
    for _ in range(60):
        head.add([facts(1, 5, 5)] * 16, 16, 5)
    head.fade_recent(0.0)
    for _ in range(3):
        head.add([facts(5, 5, 5)] * 16, 16, 5)
    assert 1.5 < sum(head.reached(5)) < 2.3
