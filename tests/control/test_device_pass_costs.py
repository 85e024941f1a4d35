"""Seconds of passes on the device: what one plan's passes say of the others."""

from __future__ import annotations

import pytest

from paceline.control.cost.device_passes import DevicePassCosts
from paceline.core.trees import PLAIN, DraftPlan


def test_what_passes_take_longer_in_traffic_is_expected_of_plans_that_were_not_used_too():
    costs, two, seven = DevicePassCosts(), DraftPlan("head", 2), DraftPlan("head", 7)
    for plan, seconds in ((PLAIN, 1.0), (two, 1.5), (seven, 2.0)):
        costs.expect(plan, 64, seconds)
    for _ in range(200):
        costs.observe(two, 64, 0, 1.9)
    assert costs.seconds(seven, 64, 0) == pytest.approx(2.4, rel=0.02)
    assert costs.seconds(PLAIN, 64, 0) == pytest.approx(1.4, rel=0.02)


def test_seconds_of_plans_that_are_no_longer_used_follow_those_in_use():
    costs, two = DevicePassCosts(), DraftPlan("head", 2)
    for plan, seconds in ((PLAIN, 1.0), (two, 1.5)):
        costs.expect(plan, 16, seconds)
    for _ in range(100):
        costs.observe(PLAIN, 16, 0, 1.6)  # long contexts, for example
    for _ in range(50):
        costs.observe(two, 16, 0, 1.6)
    assert costs.seconds(two, 16, 0) == pytest.approx(1.6, rel=0.02)
    assert costs.seconds(PLAIN, 16, 0) < 1.25
    for _ in range(20):
        costs.observe(PLAIN, 16, 0, 1.4)  # it differs more from the other than at start-up
        costs.observe(two, 16, 0, 1.6)
    assert costs.seconds(PLAIN, 16, 0) == pytest.approx(1.4, rel=0.07)


def test_a_plan_is_not_blamed_for_what_slows_all_plans_down():
    """Another process takes the GPU for a moment, and then the next plan is in use."""
    costs, two, seven = DevicePassCosts(), DraftPlan("head", 2), DraftPlan("head", 7)
    for plan, seconds in ((PLAIN, 1.0), (two, 1.2), (seven, 1.5)):
        costs.expect(plan, 1, seconds)
    for _ in range(20):
        for plan, seconds in ((two, 1.2), (two, 2.4), (seven, 1.5), (seven, 1.5)):
            for _ in range(25):
                costs.observe(plan, 1, 0, seconds)
    assert costs.seconds(seven, 1, 0) == pytest.approx(1.5, rel=0.02)
    assert costs.seconds(two, 1, 0) == pytest.approx(1.2, rel=0.05)


def test_what_drafts_cost_the_host_is_learned_from_a_few_passes_between_plain_ones():
    """Start-up times only the device. Drafted passes are outside of the gate then, but plain ones are not."""
    costs, two, three = DevicePassCosts(), DraftPlan("head", 2), DraftPlan("head", 3)
    for plan, seconds in ((PLAIN, 1.0), (two, 1.2), (three, 1.3)):
        costs.expect(plan, 64, seconds)
    for _ in range(2):
        for plan, seconds in ((PLAIN, 1.0), (two, 2.2)):
            for _ in range(8):
                costs.observe(plan, 64, 0, seconds)
    assert costs.seconds(PLAIN, 64, 0) == pytest.approx(1.0, rel=0.05)
    assert costs.seconds(two, 64, 0) == pytest.approx(2.2, rel=0.05)
    assert costs.seconds(three, 64, 0) == pytest.approx(2.3, rel=0.05)  # never used
