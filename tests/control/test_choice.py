"""The choice against a search of everything, and what it must do at cliffs and under load."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.control.choice import Batch, Prospect, choose, priced
from paceline.control.cost import Call, DraftCosts, StepCosts

FLAT = StepCosts([1, 64], [0.004, 0.0041])
LINEAR = StepCosts([1, 64], [0.004, 4 * 0.064])


def prospect(*chances: float, depth: int = 4) -> Prospect:
    """Requests whose drafts are right with these chances at each depth."""
    tokens = np.array([[chance**level for level in range(1, depth + 1)] for chance in chances])
    return Prospect(tokens, np.ones_like(tokens))


def free(*drafters: str) -> DraftCosts:
    return DraftCosts(drafters)


def test_where_rows_are_free_all_is_drafted_and_where_they_cost_a_step_nothing():
    batch = Batch(1, 1, 0)
    assert choose(batch, {"d": prospect(0.9)}, FLAT, free("d"))[0].lengths == (4,)
    best, plain = choose(batch, {"d": prospect(0.9)}, LINEAR, free("d"))
    assert best is plain
    assert best.lengths == (0,)


def test_a_tile_is_filled_and_not_exceeded():
    steps = StepCosts([1, 4, 5, 8], [0.004, 0.004, 0.008, 0.008])
    best, _ = choose(Batch(1, 1, 0), {"d": prospect(0.9, depth=7)}, steps, free("d"))
    assert best.lengths == (3,)


def test_requests_compete_for_rows():
    steps = StepCosts([1, 6, 7, 16], [0.004, 0.004, 0.04, 0.04])
    best, _ = choose(Batch(2, 2, 0), {"d": prospect(0.9, 0.7)}, steps, free("d"))
    assert best.lengths == (3, 1)  # 0.9, 0.81, 0.73 and 0.7: a fourth of the first is 0.66
    best, _ = choose(Batch(2, 2, 0), {"d": prospect(0.8, 0.8)}, steps, free("d"))
    assert best.lengths == (2, 2)


def test_each_request_has_the_drafter_that_is_good_for_it():
    prospects = {"copy": prospect(0.9, 0.05), "head": prospect(0.1, 0.8)}
    best, _ = choose(Batch(2, 2, 0), prospects, StepCosts([1, 64], [0.004, 0.03]), free("copy", "head"))
    assert best.drafters == ("copy", "head")
    assert min(best.lengths) > 0


def test_a_level_that_costs_a_pass_of_the_drafter_is_taken_for_all_or_for_none():
    drafts = DraftCosts(["d"])
    for levels, requests in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        drafts.observe([Call("d", requests, levels, requests * levels)], 0.0015 * levels)
    few, _ = choose(Batch(1, 1, 0), {"d": prospect(0.6)}, FLAT, drafts)
    many, _ = choose(Batch(8, 8, 0), {"d": prospect(*[0.6] * 8)}, FLAT, drafts)
    assert len(set(many.lengths)) == 1
    assert few.lengths[0] == many.lengths[0] == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 3])
def test_no_other_lengths_are_much_better(seed: int, count: int):
    rng = np.random.default_rng(seed)
    prospects = {"d": prospect(*rng.uniform(0.1, 0.95, size=count), depth=3)}
    rises = np.cumsum(rng.choice([1e-5, 3e-4, 1e-3], size=12, p=[0.5, 0.3, 0.2]))
    steps = StepCosts(range(1, 13), 0.003 + rises)
    drafts = DraftCosts(["d"])
    for levels in (1, 2, 3):
        drafts.observe([Call("d", 3, levels, 3 * levels)], 2e-4 * levels)
    batch = Batch(count, count, 0)
    best, _ = choose(batch, prospects, steps, drafts)
    tried = itertools.product(range(4), repeat=count)
    rates = [
        priced([("d", length) for length in lengths], batch, prospects, steps, drafts).rate
        for lengths in tried
    ]
    assert best.rate >= 0.99 * max(rates)
    same = priced(list(zip(best.drafters, best.lengths, strict=True)), batch, prospects, steps, drafts)
    assert same.rate == pytest.approx(best.rate)
