"""The engine: requests, the scheduler, the step loop."""

from paceline.engine.admission import Limits
from paceline.engine.engine import Delta, Engine
from paceline.engine.request import Request
from paceline.engine.stats import StepStats

__all__ = ["Delta", "Engine", "Limits", "Request", "StepStats"]
