"""The cost of drafter calls, learned from simulated calls."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.control.cost.draft_calls import DraftCosts
from paceline.core.stats import DraftCall


def costs_of(*drafters: str) -> DraftCosts:
    return DraftCosts(drafters, plain=0.004)


def call(seconds: float, requests: int = 1, levels: int = 1, drafter: str = "head") -> DraftCall:
    return DraftCall(drafter, requests, levels, requests * levels, seconds)


def call_seconds(costs: DraftCosts, requests: int = 1, levels: int = 1) -> float:
    return float(costs.seconds("head", requests, levels, requests * levels))


def test_costs_are_learned_from_calls_of_different_sizes():
    costs = costs_of("head", "copy")
    rng = np.random.default_rng(0)
    for _ in range(300):
        requests, levels = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        costs.observe(call(2e-3 + 1e-3 * levels, requests, levels), 0)
        costs.observe(call(2e-5 * requests, requests, levels, "copy"), 0)
    assert call_seconds(costs, 4, 5) == pytest.approx(7e-3, rel=0.1)
    assert float(costs.seconds("copy", 4, 5, 20)) == pytest.approx(8e-5, rel=0.3)
    assert float(costs.seconds("head", 0, 0, 0)) == 0.0


def test_one_call_predicts_the_next_and_its_cost_is_attributed_to_levels():
    costs = costs_of("head")
    costs.observe(call(7e-3, levels=7), 0)
    assert call_seconds(costs, levels=7) == pytest.approx(7e-3, rel=0.05)
    assert call_seconds(costs) < 3e-3


def test_a_few_calls_separate_the_cost_of_a_call_from_that_of_a_level():
    costs = costs_of("head")
    rng = np.random.default_rng(0)
    for levels in (1, 0, 1, 2, 1, 1, 0, 3, 1, 2, 1, 0):
        costs.observe(call((4e-4 + 1.2e-4 * levels) * float(rng.uniform(0.9, 1.3)), levels=levels), 0)
    assert call_seconds(costs, levels=7) == pytest.approx(1.1 * (4e-4 + 7 * 1.2e-4), rel=0.35)


def test_costs_that_calls_say_nothing_about_stay():
    costs = costs_of("head")
    for levels in (1, 4, 2, 7) * 20:
        costs.observe(call(1e-3 * levels, levels=levels), 0)
    for _ in range(200):
        costs.observe(call(1e-3), 0)
    assert call_seconds(costs, levels=7) == pytest.approx(7e-3, rel=0.2)


def test_constant_cost_is_predicted_for_all_sizes():
    costs = costs_of("head")
    rng = np.random.default_rng(1)
    for _ in range(500):
        requests, levels = int(rng.integers(1, 17)), int(rng.integers(0, 6))
        costs.observe(call(3e-5 * float(rng.lognormal(0.0, 0.05)), requests, levels), 0)
    for requests, levels in ((1, 5), (16, 1), (8, 3)):
        assert call_seconds(costs, requests, levels) == pytest.approx(3e-5, rel=0.5)


def test_catching_up_has_a_cost_of_its_own():
    costs = costs_of("head")
    for late in (0, 0, 0, 800, 0, 0, 30, 0, 0, 400, 0) * 12:
        costs.observe(call(3e-4 + 2e-5 * late, levels=3), late)
    assert costs.terms("head")[-1] == pytest.approx(2e-5, rel=0.15)
    assert call_seconds(costs, levels=3) == pytest.approx(3e-4, rel=0.2)


def test_the_first_call_may_be_slow():
    costs = costs_of("head")
    costs.observe(call(0.5, levels=4), 0)
    costs.observe(call(0.004, levels=4), 0)
    assert call_seconds(costs, levels=4) == pytest.approx(0.004, rel=0.1)


def test_one_preempted_call_changes_little_and_a_slower_drafter_is_noticed():
    costs = costs_of("head")
    for _ in range(20):
        costs.observe(call(5e-4), 0)
    costs.observe(call(1.0), 0)
    assert call_seconds(costs) < 1.2e-3
    for _ in range(60):
        costs.observe(call(0.02), 0)
    assert call_seconds(costs) > 0.015


def test_a_drafter_that_found_nothing_at_first_may_cost_much_more_later():
    costs = costs_of("head")
    for _ in range(3):
        costs.observe(call(3e-5, levels=0), 0)
    for _ in range(15):
        costs.observe(call(8e-4), 0)
    assert call_seconds(costs) == pytest.approx(8e-4, rel=0.3)


def test_an_unused_drafter_becomes_cheaper_until_it_is_tried_again():
    costs = costs_of("head")
    for _ in range(3):
        costs.observe(call(2.0), 0)
    before = call_seconds(costs)
    for _ in range(1000):
        costs.fade(["head"])
    assert call_seconds(costs) < before / 4


def test_costs_survive_a_restart_each_by_its_name_and_nonsense_does_not():
    costs = costs_of("head", "copy")
    for levels in (1, 4, 2, 7) * 10:
        costs.observe(call(1e-3 * levels, levels=levels), 0)
    again = costs_of("other", "head")
    again.begin_with(json.loads(json.dumps(costs.facts())))
    assert call_seconds(again, levels=4) == pytest.approx(call_seconds(costs, levels=4))
    assert float(again.seconds("other", 1, 4, 4)) == 0.0
    for nonsense in ([1.0], [700.0] * 5, [float("nan")] * 5, [-1.0] * 5):
        with pytest.raises(ValueError, match="not"):
            again.begin_with({"head": nonsense})
