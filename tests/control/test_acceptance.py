"""Chances by depth, from counts that fade and from the levels above."""

from __future__ import annotations

import pytest

from paceline.control.acceptance import FIRST_GUESS, MOST_SEGMENTS, AcceptanceModel

ONE, OTHER = ("1", 0), ("2", 0)


def expected(model: AcceptanceModel, request=ONE, segment: str = "") -> tuple[list[float], list[float]]:
    tokens, rows = model.expected([(request, segment)])
    return tokens[0], rows[0]


def test_a_drafter_nobody_knows_is_thought_to_be_right_more_often_than_not():
    tokens, rows = expected(AcceptanceModel(3))
    assert tokens == pytest.approx([FIRST_GUESS, FIRST_GUESS**2, FIRST_GUESS**3])
    assert rows == [1.0, 1.0, 1.0]


def test_the_denominator_of_a_depth_is_the_drafts_that_were_right_above_it():
    model = AcceptanceModel(3)
    for _ in range(200):
        model.observe(ONE, "", 3, 3, 1)
        model.observe(ONE, "", 3, 3, 3)
    tokens, _ = expected(model)
    assert tokens == pytest.approx([1.0, 0.5, 0.5], abs=0.06)


def test_a_drafter_that_often_finds_nothing_takes_few_rows():
    model = AcceptanceModel(2)
    for _ in range(100):
        model.observe(ONE, "", 2, 0, 0)
        model.observe(ONE, "", 2, 0, 0)
        model.observe(ONE, "", 2, 2, 2)
    tokens, rows = expected(model)
    assert rows == pytest.approx([1 / 3, 1 / 3], abs=0.06)
    assert tokens == pytest.approx([1 / 3, 1 / 3], abs=0.06)


def test_a_new_request_is_thought_to_be_like_its_segment():
    model = AcceptanceModel(1)
    for _ in range(100):
        model.observe(ONE, "code", 1, 1, 1)
        model.observe(OTHER, "chat", 1, 1, 0)
    new = ("3", 0)
    assert expected(model, new, "code")[0][0] > 0.9
    assert expected(model, new, "chat")[0][0] < 0.1
    assert expected(model, new, "other")[0][0] == pytest.approx(0.5, abs=0.1)


def test_a_request_that_differs_from_its_segment_is_known_after_a_few_drafts():
    model = AcceptanceModel(1)
    for _ in range(200):
        model.observe(ONE, "", 1, 1, 1)
    for _ in range(20):
        model.observe(OTHER, "", 1, 1, 0)
    assert expected(model, OTHER)[0][0] < 0.4
    assert expected(model, ONE)[0][0] > 0.85


def test_a_text_that_changes_its_topic_is_followed():
    model = AcceptanceModel(1)
    for _ in range(300):
        model.observe(ONE, "", 1, 1, 1)
    for _ in range(50):
        model.observe(ONE, "", 1, 1, 0)
    assert expected(model)[0][0] < 0.3


def test_what_was_never_asked_for_is_not_held_against_a_depth():
    model = AcceptanceModel(4)
    for _ in range(50):
        model.observe(ONE, "", 1, 1, 1)
    tokens, _ = expected(model)
    assert tokens[3] > 0.8  # as good as the first, until it is seen


def test_requests_that_ended_and_segments_beyond_the_limit_take_no_memory():
    model = AcceptanceModel(1)
    for number in range(3 * MOST_SEGMENTS):
        model.observe((str(number), 0), f"segment {number}", 1, 1, 1)
    assert len(model._segments) == MOST_SEGMENTS
    model.keep_only({("0", 0)})
    assert list(model._requests) == [("0", 0)]
