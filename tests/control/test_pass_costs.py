"""Pass costs, learned from simulated passes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.control.cost import StepCosts

MEASURED = {1: 0.004, 8: 0.006, 9: 0.009, 16: 0.012}


def make() -> StepCosts:
    return StepCosts(list(MEASURED), list(MEASURED.values()))


def test_interpolates_between_measured_row_counts_and_extrapolates_above():
    costs = make()
    rows = np.array([1.0, 4.5, 8.0, 9.0, 16.0, 30.0])
    slope = 0.012 / 16  # the share of a row: that of the upper half would be more
    expected = [0.004, 0.005, 0.006, 0.009, 0.012, 0.012 + 14 * slope]
    np.testing.assert_allclose(costs.seconds(rows, 0), expected)


def test_each_row_pays_for_the_keys_it_reads():
    costs = StepCosts([1, 2], [0.004, 0.004], per_key=1e-6)
    assert float(costs.seconds(2, 1000)) == pytest.approx(0.004 + 2 * 1000 * 1e-6)


def test_a_wrong_entry_is_corrected_and_its_neighbour_beyond_a_cliff_is_not_touched():
    costs = make()
    for _ in range(200):
        costs.observe(8, 0, 0.0075)
        costs.observe(9, 0, 0.009)
        costs.observe(1, 0, 0.004)
    assert float(costs.seconds(8, 0)) == pytest.approx(0.0075, rel=0.03)
    assert float(costs.seconds(9, 0)) == pytest.approx(0.009, rel=0.03)


def test_a_cliff_above_the_measured_rows_is_learned():
    costs = make()
    for _ in range(300):
        costs.observe(1, 0, 0.004)
        costs.observe(64, 0, 0.2)
    assert float(costs.seconds(64, 0)) == pytest.approx(0.2, rel=0.1)


def roofline(rows: float) -> float:
    return max(0.012, 0.00006 * rows)


def test_a_few_passes_tell_what_was_never_measured_and_leave_the_rest_alone():
    costs = StepCosts([1, 32, 64], [roofline(rows) for rows in (1, 32, 64)])
    costs.observe(768, 0, roofline(768))
    rows = np.array([1.0, 64.0, 128.0, 192.0, 384.0, 768.0])
    np.testing.assert_allclose(costs.seconds(rows, 0), [roofline(own) for own in rows], rtol=0.02)


def test_one_slow_pass_that_was_never_measured_is_corrected_by_the_next():
    costs = StepCosts([1, 32, 64], [roofline(rows) for rows in (1, 32, 64)])
    costs.observe(256, 0, 10 * roofline(256))
    for _ in range(20):
        costs.observe(256, 0, roofline(256))
    assert float(costs.seconds(256, 0)) < 1.5 * roofline(256)


def test_a_slower_machine_scales_all_row_counts():
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
