"""Forecasts: what catching up with a prompt costs a drafter in each step."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.control.acceptance.model import AcceptanceModel
from paceline.control.config import CONFIG
from paceline.control.cost.model import CostModel
from paceline.control.planner.forecast import make_forecast
from paceline.core.trees import DraftPlan
from tests.control.simulation import SimulatedCounts, SimulatedRequest, World

PROMPT = 99  # tokens of a request's prompt


PLANS = {"head": DraftPlan("head", 3), "copies": DraftPlan("copies", 3)}


def catch_up_tokens(costs: CostModel, name: str, request: SimulatedRequest) -> float:
    """Tokens that a drafter is expected to catch up with in each step."""
    forecast = make_forecast(name, PLANS[name], cast(Any, [request]), costs, AcceptanceModel(PLANS))
    return float(forecast.catch_up[0] / (CONFIG.draft_calls.catch_up_cost * costs.passes.seconds(1, 0)))


def request_of(num_output: int, max_output: int = 201) -> SimulatedRequest:
    return SimulatedRequest("1", max_output, num_output=num_output, num_computed=PROMPT + num_output)


def test_catching_up_is_spread_over_the_steps_of_a_request() -> None:
    """Also if a drafter has caught up with the request that a choice is made for: it holds for others."""
    backlogs = {"1": PROMPT + 1}
    of_head = {"head": lambda request: backlogs[request.request_id]}
    costs = CostModel(PLANS, World({}).costs(), cast(Any, of_head))
    assert catch_up_tokens(costs, "head", request_of(1)) == pytest.approx((PROMPT + 1) / (0.5 * 199))
    backlogs["1"] = 0
    assert catch_up_tokens(costs, "head", request_of(1)) == 0.0
    ended = request_of(40, max_output=40)
    ended.speculative = SimulatedCounts(num_accepted_draft_tokens=30)
    costs.observe_ended(cast(Any, [ended, request_of(1)]))
    assert catch_up_tokens(costs, "head", request_of(1)) == pytest.approx(PROMPT / 10)
    assert catch_up_tokens(costs, "copies", request_of(1)) == 0.0


def test_a_request_near_its_end_has_few_steps_to_spread_it_over() -> None:
    of_head = {"head": lambda request: PROMPT + 90}
    costs = CostModel(["head"], World({}).costs(), cast(Any, of_head))
    ended = request_of(100, max_output=100)
    costs.observe_ended(cast(Any, [ended]))
    assert catch_up_tokens(costs, "head", request_of(90, max_output=101)) == pytest.approx((PROMPT + 90) / 5)
    assert catch_up_tokens(costs, "head", request_of(90, max_output=999)) == pytest.approx(
        (PROMPT + 90) / 100
    )
