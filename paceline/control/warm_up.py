"""Compiles what decisions run, because the first of them would wait for it."""

from __future__ import annotations

import numpy as np

from paceline.control.acceptance.calibration import POINTS_ARRAY
from paceline.control.acceptance.drafter import DrafterAcceptance
from paceline.control.acceptance.model import CalibrationLines
from paceline.control.cost import StepCosts
from paceline.control.cost.draft_calls import TERMS, CallCosts
from paceline.control.planner import evaluate
from paceline.control.planner.row_costs import Batch, RowCosts
from paceline.control.planner.trim import FastTrim
from paceline.core.trees import DraftTrees


def warm_up(steps: StepCosts) -> None:
    """Compile it all."""
    evaluate.prepare()
    CallCosts(1.0).observe([1.0] * TERMS, 1.0)
    acceptance = DrafterAcceptance(1)
    acceptance.recent.sample(1, 1)
    acceptance.sample_scenarios([(("", 0), "")], 1)
    lines = CalibrationLines(POINTS_ARRAY[None, None], np.ones((1, 1)))
    trees = DraftTrees.chains([[0]], [[0.0]])
    FastTrim(["drafter"], lines, RowCosts(Batch(1.0, 1, 0.0), steps, 1), 1.0).trim(["drafter"], trees)
