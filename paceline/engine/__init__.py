"""The engine: requests, scheduling, the step loop, executors."""

from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.engine.admission import Limits
from paceline.engine.engine import Delta, Engine

__all__ = ["Delta", "Engine", "Limits", "Request", "StepStats"]
