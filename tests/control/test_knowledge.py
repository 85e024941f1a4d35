"""What the controller knows of requests and drafters together."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.control.draft_cost import LATE
from paceline.control.knowledge import Knowledge
from paceline.core.trees import DraftPlan
from tests.control.simulation import SimulatedCounts, SimulatedRequest, World

PROMPT = 99  # tokens of a request's prompt


def late_tokens(known: Knowledge, name: str, request: SimulatedRequest) -> float:
    """Tokens that a drafter is thought to catch up with in each step."""
    (seconds,) = known.prospect(name, cast(Any, [request])).late
    return float(seconds / (LATE * known.steps.seconds(1, 0)))


def request_of(num_output: int, max_output: int = 201) -> SimulatedRequest:
    return SimulatedRequest("1", max_output, num_output=num_output, num_computed=PROMPT + num_output)


def test_catching_up_with_a_prompt_is_shared_by_the_steps_that_requests_last() -> None:
    """Also if a drafter has caught up with the request that a choice is made for: it holds for others."""
    backlogs = {"1": PROMPT + 1}
    plans = {"head": DraftPlan("head", 3), "copies": DraftPlan("copies", 3)}
    of_head = {"head": lambda request: backlogs[request.request_id]}
    known = Knowledge(plans, World({}).costs(), cast(Any, of_head), None, {})
    assert late_tokens(known, "head", request_of(1)) == pytest.approx((PROMPT + 1) / (0.5 * 199))
    backlogs["1"] = 0
    assert late_tokens(known, "head", request_of(1)) == 0.0
    ended = request_of(40, max_output=40)
    ended.speculative = SimulatedCounts(num_accepted_draft_tokens=30)
    known.forget_others([], cast(Any, [ended, request_of(1)]))
    assert late_tokens(known, "head", request_of(1)) == pytest.approx(PROMPT / 10)
    assert late_tokens(known, "copies", request_of(1)) == 0.0


def test_who_ends_soon_has_few_steps_to_share_what_is_caught_up_with() -> None:
    of_head = {"head": lambda request: PROMPT + 90}
    known = Knowledge({"head": DraftPlan("head", 3)}, World({}).costs(), cast(Any, of_head), None, {})
    ended = request_of(100, max_output=100)
    known.forget_others([], cast(Any, [ended]))
    assert late_tokens(known, "head", request_of(90, max_output=101)) == pytest.approx((PROMPT + 90) / 5)
    assert late_tokens(known, "head", request_of(90, max_output=999)) == pytest.approx((PROMPT + 90) / 100)
