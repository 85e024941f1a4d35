"""Forecasts: what a drafter is expected to do for the requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.acceptance.model import AcceptanceModel
from paceline.control.cost import Float64Array
from paceline.control.cost.model import CostModel
from paceline.core.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one drafter can do for the requests of a batch."""

    chances: Float64Array  # [scenarios, requests, nodes] descending; 0: there is no such node
    levels: int  # most that its drafts can have
    catch_up: Float64Array  # [requests] seconds of catching up, per step


def make_forecast(
    name: str, plan: DraftPlan, requests: Sequence[Request], costs: CostModel, acceptance: AcceptanceModel
) -> Forecast:
    """The forecast of a drafter for these requests; its plan says how much it may draft."""
    chances = acceptance.sample_scenarios(name, requests)
    catch_up = [costs.catch_up_seconds(name, request) for request in requests]
    return Forecast(chances, plan.levels, np.array(catch_up))
