"""The plan search against a search of everything, and what it must do at cliffs and under load."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.control.cost import StepCosts
from paceline.control.cost.draft_calls import DraftCosts
from paceline.control.planner.forecast import Forecast
from paceline.control.planner.row_costs import Batch, RowCosts, worth_verifying
from paceline.control.planner.search import Choice, PlanSearch
from paceline.core.stats import DraftCall

FLAT = StepCosts([1, 64], [0.004, 0.0041])
LINEAR = StepCosts([1, 64], [0.004, 4 * 0.064])
CLIFF = StepCosts([1, 4, 5, 8], [0.004, 0.004, 0.008, 0.008])


def forecast(*chances: float, nodes: int = 4, scenarios: int = 3) -> Forecast:
    """Requests whose drafts are right with these chances at each depth."""
    each = [[chance**level for level in range(1, nodes + 1)] for chance in chances]
    return Forecast(np.array([each] * scenarios), nodes, np.zeros(len(chances)))


def search(
    steps: StepCosts, drafts: DraftCosts | None = None, **forecasts: Forecast
) -> tuple[PlanSearch, Choice]:
    """A search, and its best choice."""
    count = len(next(iter(forecasts.values())).catch_up)
    found = PlanSearch(Batch(count, count, 0), count, 4, steps, drafts or DraftCosts(list(forecasts), 0.004))
    return found, found.best(forecasts)


def names(choice: Choice) -> list[tuple[str, ...]]:
    return [] if choice.candidate is None else list(choice.candidate.names)


def verified(steps: StepCosts, chances: list[float], rows: int = 1) -> int:
    return worth_verifying(
        np.array(chances), RowCosts(Batch(1, rows, 0), steps, len(chances)).seconds, rate=250.0
    )


def test_all_nodes_are_verified_where_rows_are_free_and_none_where_they_cost_a_step():
    assert verified(FLAT, [0.9, 0.5, 0.1]) == 3
    assert verified(LINEAR, [0.9, 0.5, 0.1]) == 0


def test_a_tile_is_filled_and_not_exceeded_unless_that_pays():
    assert verified(CLIFF, [0.9, 0.8, 0.3, 0.25, 0.2]) == 3
    assert verified(CLIFF, [0.9] * 7) == 7  # the whole next tile is worth its cost


@pytest.mark.parametrize("seed", range(8))
def test_no_other_number_of_nodes_is_worth_more(seed: int):
    rng = np.random.default_rng(seed)
    chances = np.sort(rng.random(10))[::-1]
    seconds = 0.003 + np.cumsum(rng.choice([1e-5, 8e-4, 4e-3], size=11))
    costs = StepCosts(range(1, 12), seconds)
    worth = [chances[:count].sum() - 250.0 * seconds[count] for count in range(11)]
    assert verified(costs, chances.tolist()) == int(np.argmax(worth))


def test_all_requests_draft_where_rows_are_free_and_none_where_they_cost_a_step():
    _, best = search(FLAT, d=forecast(0.9))
    assert names(best) == [("d",)]
    assert best.rows == 4
    assert best.rate > 3 * 250
    expensive, best = search(LINEAR, d=forecast(0.9))
    assert best is expensive.plain
    assert expensive.headroom() < 0.01


def test_expensive_levels_make_drafts_short():
    drafts = DraftCosts(["d"], 0.004)
    for levels, requests in itertools.product((1, 2, 3, 4) * 6, (1, 2, 3)):
        drafts.observe(DraftCall("d", requests, levels, requests * levels, 0.0015 * levels), 0)
    _, best = search(FLAT, drafts, d=forecast(0.6))
    assert best.candidate is not None
    assert best.candidate.length == 1


def test_requests_compete_for_rows_and_each_gets_its_best_drafter():
    steps = StepCosts([1, 2, 64], [0.004, 0.004, 0.03])
    _, best = search(steps, copy=forecast(0.9, 0.05), head=forecast(0.1, 0.8))
    assert names(best) == [("copy",), ("head",)]
    _, best = search(steps, head=forecast(0.9, 0.001))
    assert best.tokens > 2.5


def test_an_expensive_drafter_is_asked_only_where_a_cheap_one_has_nothing():
    drafts = DraftCosts(["copy", "head"], 0.004)
    for _ in range(20):
        drafts.observe(DraftCall("copy", 1, 4, 4, 1e-5), 0)
        drafts.observe(DraftCall("head", 1, 4, 4, 2e-3), 0)
    copy = forecast(0.95, scenarios=4)
    copy.chances[2:] = 0.0  # it finds something every other time
    both, best = search(FLAT, drafts, copy=copy, head=forecast(0.8, scenarios=4))
    assert names(best) == [("copy", "head")]
    assert best.candidate is not None
    assert 0.0 < best.candidate.enough[0] < copy.chances[0].sum()
    for single in ("copy", "head"):
        assert best.rate > both.alone(single).rate


def test_catching_up_is_paid_for():
    behind = Forecast(forecast(0.7).chances, 4, np.array([0.02]))
    found, best = search(FLAT, d=behind)
    assert best is found.plain


def test_requests_for_which_nothing_can_be_drafted_are_left_out():
    _, best = search(FLAT, d=Forecast(forecast(0.9, 0.9).chances * [[[1.0], [0.0]]], 4, np.zeros(2)))
    assert names(best) in ([("d",), ()], [("d",), ("d",)])
    assert best.tokens == pytest.approx(2 + sum(0.9**depth for depth in (1, 2, 3, 4)))
