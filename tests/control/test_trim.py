"""The fast trim of steps that reuse cached plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.control.acceptance.calibration import Calibration
from paceline.control.acceptance.model import CalibrationLines
from paceline.control.cost import StepCosts
from paceline.control.planner.row_costs import Batch, RowCosts
from paceline.control.planner.trim import FastTrim
from paceline.core.trees import DraftTrees, Draws

RATE = 250.0


def fast_trim(seconds: list[float], ratios: list[float]) -> FastTrim:
    steps = StepCosts(range(1, len(seconds) + 1), seconds)
    row_costs = RowCosts(Batch(1, 1, 0), steps, len(seconds) - 1)
    lines = CalibrationLines(np.array([[Calibration().line]] * len(ratios)), np.array(ratios)[:, None])
    return FastTrim(["head"], lines, row_costs, RATE)


@pytest.mark.parametrize("seed", range(6))
def test_keeps_the_nodes_that_are_worth_most_together(seed: int):
    rng = np.random.default_rng(seed)
    said = [sorted(rng.random(4), reverse=True) for _ in range(2)]
    seconds = (0.003 + np.cumsum(rng.choice([1e-5, 1e-3, 3e-3], size=9))).tolist()
    trees = DraftTrees.chains([range(4), range(4)], said)
    kept = fast_trim(seconds, [0.5, 1.0]).trim(["head", "head"], trees)
    chances = sorted([0.5 * chance for chance in said[0]] + said[1], reverse=True)
    worth = [sum(chances[:count]) - RATE * seconds[count] for count in range(9)]
    assert kept.num_nodes == int(np.argmax(worth))
    left = [0.5 * chance for chance in kept.chances_of(0)] + list(kept.chances_of(1))
    assert sorted(left, reverse=True) == pytest.approx(chances[: kept.num_nodes], abs=0.01)


def test_drawn_nodes_and_nodes_without_confidence_stay():
    expensive = fast_trim([0.004, 0.1, 0.2], [1.0])
    said = DraftTrees.chains([range(2)], [[0.3, 0.2]])
    assert expensive.trim(["head"], said).num_nodes == 0
    silent = DraftTrees.chains([range(2)], [[np.nan, np.nan]])
    assert expensive.trim(["head"], silent) is silent
    drawn = replace(said, draws=Draws(np.full((1, 4), 0.25), np.zeros(2, dtype=np.int32)))
    assert expensive.trim(["head"], drawn) is drawn


def test_forced_tokens_that_no_choice_asked_for_are_kept_whole():
    """A constrained request may be planned plain, and still draft what its grammar forces."""
    expensive = fast_trim([0.004, 0.1, 0.2, 0.3], [1.0, 1.0])
    trees = DraftTrees.chains([[5, 6], [7, 8]], [[1.0, 1.0], [0.01, 0.01]])
    kept = expensive.trim(["grammar", "head"], trees)
    assert [kept.tree_lists(index)[0] for index in range(2)] == [[5, 6], []]
