"""The acceptance model: drafters' confidences, calibrated by what was accepted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.control.acceptance.calibration import POINTS_ARRAY, Calibration, chance_at
from paceline.control.acceptance.drafter import DrafterAcceptance
from paceline.control.config import CONFIG

KEPT, OWN = CONFIG.acceptance.shared_drafts, CONFIG.acceptance.request_drafts

ONE, OTHER = ("1", 0), ("2", 0)


def test_confidence_is_taken_as_chance_before_anything_was_observed():
    assert Calibration().chances([0.0, 0.25, 0.83, 1.0]) == pytest.approx([0.0, 0.25, 0.83, 0.995])


@pytest.mark.parametrize(("said", "right"), [(0.9, 0.2), (0.3, 0.7), (0.55, 0.55)])
def test_calibration_converges_to_the_observed_acceptance(said: float, right: float):
    calibration = Calibration()
    rng = np.random.default_rng(0)
    for _ in range(300):
        calibration.add([said], [bool(rng.random() < right)])
    calibration.fit()
    assert calibration.chances([said]) == pytest.approx([right], abs=0.12)
    assert calibration.confidence_for(0.999 * calibration.chances([said])[0]) <= said + 0.01


def test_calibration_is_monotone():
    calibration = Calibration()
    for _ in range(100):
        calibration.add([0.3, 0.8], [True, False])
    calibration.fit()
    line = calibration.chances(np.linspace(0, 1, 50).tolist())
    assert line == sorted(line)
    compiled = [chance_at(said, POINTS_ARRAY, np.array(calibration.line)) for said in np.linspace(0, 1, 50)]
    assert compiled == pytest.approx(line)


def test_counts_survive_a_restart_and_nonsense_does_not():
    calibration = Calibration()
    for _ in range(50):
        calibration.add([0.9, 0.5], [True, False])
    calibration.fit()
    again = Calibration.of_counts(json.loads(json.dumps(calibration.counts())))
    assert again.line == calibration.line
    for nonsense in ([[1.0], [1.0]], [[1.0] * 13, [2.0] * 13], [[float("nan")] * 13] * 2):
        with pytest.raises(ValueError, match="not counts"):
            Calibration.of_counts(nonsense)


def test_a_request_whose_drafts_did_better_is_expected_to_do_better():
    model = DrafterAcceptance(3)
    for _ in range(60):
        model.observe(ONE, "s", [0.6, 0.4], [True, True])
        model.observe(OTHER, "s", [0.6, 0.4], [False, False])
    good, bad = (model.chances(key, "s", [0.6])[0] for key in (ONE, OTHER))
    assert bad < 0.25 < 0.7 < good
    assert bad < model.chances(("new", 0), "s", [0.6])[0] < good


def test_a_new_request_starts_like_its_segment_and_a_new_segment_like_all():
    model = DrafterAcceptance(1)
    for _ in range(60):
        model.add_draft(ONE, "prose", [0.3], 1)
        model.add_draft(OTHER, "code", [0.9], 1)
    scenarios = model.sample_scenarios([(("3", 0), "prose"), (("4", 0), "code"), (("5", 0), "new")], 16)
    assert scenarios.shape == (16, 3, 1)
    assert scenarios[:, 0].mean() == pytest.approx(0.3, abs=0.02)
    assert scenarios[:, 1].mean() == pytest.approx(0.9, abs=0.02)
    assert scenarios[:, 2].mean() == pytest.approx(0.6, abs=0.05)


def test_a_cut_draft_is_extended_as_drafts_usually_continue_and_one_that_ended_is_not():
    model = DrafterAcceptance(4)
    for _ in range(300):
        model.add_draft(OTHER, "", [0.8, 0.4, 0.2, 0.1], asked=4)
    model.add_draft(ONE, "", [0.9], asked=1)
    assert model.sample_scenarios([(ONE, "")], 16)[0, 0].tolist() == pytest.approx(
        [0.9, 0.45, 0.225, 0.1125], rel=0.05
    )
    model = DrafterAcceptance(4)
    model.add_draft(ONE, "", [0.8], asked=4)
    assert model.sample_scenarios([(ONE, "")], 16)[0, 0].tolist() == pytest.approx([0.8, 0, 0, 0])


def test_a_change_of_topic_shows_within_a_few_drafts():
    model = DrafterAcceptance(2)
    for _ in range(200):
        model.add_draft(ONE, "", [0.9, 0.8], 2)
        model.observe(ONE, "", [0.9, 0.8], [True, True])
    for _ in range(OWN):
        model.add_draft(ONE, "", [0.2], 2)
        model.observe(ONE, "", [0.2], [False])
    assert (model.sample_scenarios([(ONE, "")], 16).max(axis=(1, 2)) < 0.25).mean() >= 0.5
    for _ in range(KEPT):
        model.add_draft(ONE, "", [0.2], 2)
        model.observe(ONE, "", [0.2], [False])
    assert model.sample_scenarios([(ONE, "")], 16).max() < 0.25


def test_a_requests_poor_drafts_are_forgotten_when_no_more_are_made():
    model = DrafterAcceptance(1)
    for _ in range(KEPT):
        model.add_draft(OTHER, "", [0.8], 1)
    for _ in range(OWN):
        model.add_draft(ONE, "", [0.2], 1)
    means = [model.sample_scenarios([(ONE, "")], 16).mean() for _ in range(5)]
    assert means == sorted(means)
    assert means[0] < 0.45
    assert means[-1] > 0.6


def test_requests_that_ended_are_forgotten():
    model = DrafterAcceptance(1)
    for _ in range(30):
        model.observe(ONE, "", [0.5], [True])
        model.observe(OTHER, "", [0.5], [False])
    before = model.ratio(ONE, "")
    model.keep_only({OTHER})
    assert model.ratio(ONE, "") < before


def test_what_was_learned_survives_a_restart():
    model = DrafterAcceptance(2)
    for _ in range(40):
        model.add_draft(ONE, "", [0.9, 0.5], 2)
        model.observe(ONE, "", [0.9, 0.5], [True, False])
    again = DrafterAcceptance(3)  # may draft more now
    again.begin_with(json.loads(json.dumps(model.facts())))
    new = [(("9", 0), "elsewhere")]
    np.testing.assert_allclose(
        again.sample_scenarios(new, 16)[:, :, :2], model.sample_scenarios(new, 16), rtol=0.2
    )
    assert again.drafts == model.drafts
    with pytest.raises(KeyError):
        again.begin_with({})
