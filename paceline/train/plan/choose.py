"""From predicted acceptance and measured steps to the head that is worth most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.train.plan.law import Law, Pilot, Prediction


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of the engine at the planned concurrency."""

    plain: float
    drafted: Mapping[int, Mapping[int, float]]  # by layers of the head, then by drafted tokens

    def of(self, layers: int) -> Iterator[tuple[int, float]]:
        """Drafted tokens, from the fewest that were timed to the most, and the seconds of such a step."""
        timed = sorted(self.drafted[layers])
        seconds = [self.drafted[layers][drafts] for drafts in timed]
        for drafts in range(timed[0], timed[-1] + 1):
            yield drafts, float(np.interp(drafts, timed, seconds))


@dataclass(frozen=True)
class Choice:
    """One head that could be trained on all of the data."""

    layers: int
    epochs: int
    drafts: int  # tokens of a block, as many as are worth their rows
    step_seconds: float
    acceptance: Prediction
    speedup: float  # tokens per second times those of plain decoding
    hours: float  # of training
    more_data: float  # speedup with twice the data, relative to this one


def choices(
    law: Law, pilots: Sequence[Pilot], costs: StepCosts, answered_tokens: int, epochs: Sequence[int]
) -> list[Choice]:
    """Every size of head and number of epochs, each with its best block, the fastest first."""
    pace = {pilot.layers: pilot.seconds_per_token for pilot in pilots}
    found = []
    for layers in costs.drafted:
        for count in epochs:
            tokens = count * answered_tokens
            blocks = [
                (law.predict(layers, tokens, drafts), drafts, cost) for drafts, cost in costs.of(layers)
            ]
            acceptance, drafts, seconds = max(blocks, key=lambda block: block[0].length / block[2])
            more = law.predict(layers, 2 * tokens, drafts).length / acceptance.length
            speedup, hours = acceptance.length * costs.plain / seconds, tokens * pace[layers] / 3600
            found.append(Choice(layers, count, drafts, seconds, acceptance, speedup, hours, more))
    return sorted(found, key=lambda choice: -choice.speedup)
