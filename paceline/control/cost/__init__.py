"""The cost model: seconds of passes, of drafter calls, and of passes on the device."""

from paceline.control.cost.passes import Float64Array, Numbers, StepCosts

__all__ = ["Float64Array", "Numbers", "StepCosts"]
