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
    # by layers of the head, then by its vocabulary, then by drafted tokens
    drafted: Mapping[int, Mapping[int, Mapping[int, float]]]

    def of(self, layers: int, vocabulary: int) -> Iterator[tuple[int, float]]:
        """Drafted tokens, from the fewest that were timed to the most, and the seconds of such a step."""
        sizes = sorted(self.drafted[layers])
        timed = sorted(self.drafted[layers][sizes[0]])
        seconds = [
            np.interp(vocabulary, sizes, [self.drafted[layers][size][drafts] for size in sizes])
            for drafts in timed
        ]
        for drafts in range(timed[0], timed[-1] + 1):
            yield drafts, float(np.interp(drafts, timed, seconds))


@dataclass(frozen=True)
class Choice:
    """One head that could be trained on all of the data."""

    layers: int
    vocabulary: int  # tokens that it can guess, as many as are worth their time
    epochs: int
    drafts: int  # tokens of a block, as many as are worth their rows
    step_seconds: float
    acceptance: Prediction
    speedup: float  # tokens per second times those of plain decoding
    hours: float  # of training
    more_data: float  # speedup with twice the data, relative to this one


def choices(
    laws: Mapping[int, Law],
    pilots: Sequence[Pilot],
    costs: StepCosts,
    answered_tokens: int,
    epochs: Sequence[int],
) -> list[Choice]:
    """Every size of head and number of epochs, each with its best vocabulary and block, the fastest first.

    `laws` are those of each vocabulary.
    """
    pace = {pilot.layers: pilot.seconds_per_token for pilot in pilots}
    found = []
    for layers in costs.drafted:
        for count in epochs:
            tokens = count * answered_tokens
            heads = [
                (law.predict(layers, tokens, drafts), vocabulary, drafts, cost)
                for vocabulary, law in laws.items()
                for drafts, cost in costs.of(layers, vocabulary)
            ]
            acceptance, vocabulary, drafts, seconds = max(heads, key=lambda head: head[0].length / head[3])
            more = laws[vocabulary].predict(layers, 2 * tokens, drafts).length / acceptance.length
            speedup, hours = acceptance.length * costs.plain / seconds, tokens * pace[layers] / 3600
            found.append(Choice(layers, vocabulary, count, drafts, seconds, acceptance, speedup, hours, more))
    return sorted(found, key=lambda choice: -choice.speedup)
