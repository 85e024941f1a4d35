"""What steps and drafters' calls cost, learned from simulated ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.control.cost import Call, DraftCosts, StepCosts

MEASURED = {1: 0.004, 8: 0.006, 9: 0.009, 16: 0.012}


def make() -> StepCosts:
    return StepCosts(list(MEASURED), list(MEASURED.values()))


def test_between_measured_row_counts_it_is_linear_and_above_them_it_goes_on():
    costs = make()
    rows = np.array([1.0, 4.5, 8.0, 9.0, 16.0, 30.0])
    slope = (0.012 - 0.009) / 7
    expected = [0.004, 0.005, 0.006, 0.009, 0.012, 0.012 + 14 * slope]
    np.testing.assert_allclose(costs.seconds(rows, 0), expected)


def test_each_row_pays_for_the_keys_it_reads():
    costs = StepCosts([1, 2], [0.004, 0.004], per_key=1e-6)
    assert float(costs.seconds(2, 1000)) == pytest.approx(0.004 + 2 * 1000 * 1e-6)


def test_a_row_count_that_was_measured_wrong_is_learned_and_its_neighbour_beyond_a_cliff_is_not_touched():
    costs = make()
    for _ in range(60):
        costs.observe(8, 0, 0.0075)
        costs.observe(9, 0, 0.009)
        costs.observe(1, 0, 0.004)
    assert float(costs.seconds(8, 0)) == pytest.approx(0.0075, rel=0.03)
    assert float(costs.seconds(9, 0)) == pytest.approx(0.009, rel=0.03)


def test_a_cliff_above_all_that_was_measured_is_found_by_going_there():
    costs = make()
    for _ in range(100):
        costs.observe(1, 0, 0.004)
        costs.observe(64, 0, 0.2)
    assert float(costs.seconds(64, 0)) == pytest.approx(0.2, rel=0.1)


def test_a_machine_that_becomes_slower_makes_every_row_count_dearer():
    costs = make()
    for seconds in [0.004] * 50 + [0.008] * 100:
        costs.observe(1, 0, seconds)
    assert float(costs.seconds(16, 0)) > 1.3 * 0.012


def test_one_step_that_took_a_second_changes_little():
    costs = make()
    for _ in range(50):
        costs.observe(8, 0, 0.006)
    costs.observe(8, 0, 1.0)
    assert float(costs.seconds(8, 0)) < 1.07 * 0.006


def test_what_was_learned_survives_a_restart_and_nonsense_does_not():
    costs = make()
    for rows in (2, 5, 40):
        costs.observe(rows, 0, 0.01)
    facts = json.loads(json.dumps(costs.facts()))
    again = StepCosts.from_facts(facts)
    rows = np.array([1.0, 2.0, 3.3, 40.0])
    np.testing.assert_allclose(again.seconds(rows, 0), costs.seconds(rows, 0))
    for nonsense in ({"rows": [2, 1]}, {"seconds": [1.0]}, {"seconds": [float("nan")] * len(facts["rows"])}):
        with pytest.raises(ValueError, match="not costs"):
            StepCosts.from_facts(facts | nonsense)


def test_prices_of_drafters_survive_a_restart_each_by_its_name():
    costs = DraftCosts(["head", "copy"])
    for levels in (1, 4, 2, 7) * 10:
        costs.observe([Call("head", 1, levels, levels, late=100 * (levels == 7))], 1e-3 * levels)
    again = DraftCosts(["other", "head"])
    again.begin_with(json.loads(json.dumps(costs.facts())))
    assert float(again.seconds("head", 1, 4, 4)) == pytest.approx(float(costs.seconds("head", 1, 4, 4)))
    assert float(again.seconds("other", 1, 4, 4)) == 0.0
    for nonsense in ([[1.0]], [[0.0] * 5] * 5 + [[7.0] * 5]):
        with pytest.raises(ValueError, match="not prices"):
            again.begin_with({"head": nonsense})


def test_what_is_not_called_becomes_cheaper_until_it_is_tried_again():
    costs = DraftCosts(["head"])
    for _ in range(3):
        costs.observe([Call("head", 1, 1, 1)], 2.0)
    before = float(costs.seconds("head", 1, 1, 1))
    for _ in range(1000):
        costs.fade(["head"])
    assert float(costs.seconds("head", 1, 1, 1)) < before / 4


def test_catching_up_has_a_price_of_its_own():
    costs = DraftCosts(["head"])
    for late in (0, 0, 0, 800, 0, 0, 30, 0, 0, 400) * 6:
        costs.observe([Call("head", 1, 3, 3, late)], 3e-4 + 2e-5 * late)
    assert costs.prices("head")[-1] == pytest.approx(2e-5, rel=0.1)
    assert float(costs.seconds("head", 1, 3, 3)) == pytest.approx(3e-4, rel=0.2)


def test_the_price_of_a_drafter_is_learned_from_calls_of_different_sizes():
    costs = DraftCosts(["head", "copy"])
    rng = np.random.default_rng(0)
    for _ in range(300):
        requests, levels = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        nodes = requests * levels
        costs.observe([Call("head", requests, levels, nodes)], 2e-3 + 1e-3 * levels)
        costs.observe([Call("copy", requests, levels, nodes)], 2e-5 * requests)
    assert float(costs.seconds("head", 4, 5, 20)) == pytest.approx(7e-3, rel=0.05)
    assert float(costs.seconds("copy", 4, 5, 20)) == pytest.approx(8e-5, rel=0.2)
    assert float(costs.seconds("head", 0, 0, 0)) == 0.0


def test_calls_of_two_drafters_in_one_step_are_told_apart():
    costs = DraftCosts(["head", "copy"])
    for levels in (1, 4, 2, 7) * 20:
        costs.observe([Call("copy", 1, levels, levels)], 1e-5)
        costs.observe([Call("head", 1, levels, levels), Call("copy", 3, 2, 6)], 1e-3 * levels + 3e-5)
    assert float(costs.seconds("head", 1, 4, 4)) == pytest.approx(4e-3, rel=0.1)
    assert float(costs.seconds("copy", 1, 4, 4)) < 1e-4


def test_one_call_says_what_the_next_will_cost_and_what_is_not_known_is_thought_to_lie_in_its_length():
    costs = DraftCosts(["head"])
    costs.observe([Call("head", 1, 7, 7)], 7e-3)
    assert float(costs.seconds("head", 1, 7, 7)) == pytest.approx(7e-3, rel=0.05)
    assert float(costs.seconds("head", 1, 1, 1)) == pytest.approx(1e-3, rel=0.2)


def test_the_first_call_may_be_slow():
    costs = DraftCosts(["head"])
    costs.observe([Call("head", 1, 4, 4)], 0.5)
    costs.observe([Call("head", 1, 4, 4)], 0.004)
    assert float(costs.seconds("head", 1, 4, 4)) == pytest.approx(0.004, rel=0.1)
