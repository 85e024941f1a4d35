"""From predicted acceptance and measured steps to the head that is worth most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.train.plan.law import Law, Pilot, Prediction


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of the engine at the planned concurrency."""

    plain: float
    drafted: Mapping[int, float]  # by layers of the head


@dataclass(frozen=True)
class Choice:
    """One head that could be trained on all of the data."""

    layers: int
    epochs: int
    acceptance: Prediction
    speedup: float  # tokens per second times those of plain decoding
    hours: float  # of training
    more_data: float  # speedup with twice the data, relative to this one


def choices(
    law: Law, pilots: Sequence[Pilot], costs: StepCosts, answered_tokens: int, epochs: Sequence[int]
) -> list[Choice]:
    """Every size of head and number of epochs, the fastest first."""
    pace = {pilot.layers: pilot.seconds_per_token for pilot in pilots}
    found = [
        Choice(
            layers,
            count,
            acceptance,
            acceptance.length * costs.plain / drafted,
            count * answered_tokens * pace[layers] / 3600,
            law.predict(layers, 2 * count * answered_tokens).length / acceptance.length,
        )
        for layers, drafted in costs.drafted.items()
        for count in epochs
        for acceptance in [law.predict(layers, count * answered_tokens)]
    ]
    return sorted(found, key=lambda choice: -choice.speedup)
