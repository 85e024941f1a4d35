"""The cost of a pass by its rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.rows import RowCosts, measure_rows
from paceline.bench.timing import Timing
from paceline.core.forward import ForwardBatch
from paceline.errors import ConfigError
from tests.toy import ToyBackend

TEXT = list(range(2, 60))


class Recording(ToyBackend):
    """A toy model that checks every batch, and remembers it."""

    def __init__(self) -> None:
        super().__init__(max_rows=16)
        self.passes: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch) -> Any:
        self.passes.append(batch)
        return super().forward(batch)


def test_numbers_of_rows_take_turns_over_the_same_context() -> None:
    backend = Recording()
    turns: list[str] = []
    costs = measure_rows(
        backend, TEXT, max_position=256, counts=[4, 2, 4], context=20, rounds=2, on_turn=turns.append
    )
    assert list(costs.timings) == [1, 2, 4]
    assert all(len(timing.seconds) == 2 for timing in costs.timings.values())
    context, passes = backend.passes[:2], backend.passes[2:]
    assert [batch.num_rows for batch in context] == [16, 4]  # a chunk as large as a pass may be, and the rest
    assert [batch.num_rows for batch in passes] == [1, 2, 4] * 3  # one round of warm-up
    for batch in passes:
        assert batch.context_lengths.tolist() == [20]
        assert batch.tokens.tolist() == TEXT[20 : 20 + batch.num_rows]
        assert batch.logit_rows.tolist() == list(range(batch.num_rows))
        assert batch.parents.tolist() == list(range(-1, batch.num_rows - 1))
    assert turns[0] == "rows: 1, round 1 of 2"
    assert len(turns) == 6


def test_a_short_text_starts_again_and_no_context_is_a_context() -> None:
    backend = Recording()
    measure_rows(backend, [5, 6, 7], max_position=256, counts=[4], context=0, rounds=1)
    assert backend.passes[-1].tokens.tolist() == [5, 6, 7, 5]


def test_ratios_are_to_one_row() -> None:
    lines = RowCosts({1: Timing((0.002, 0.004, 0.003)), 4: Timing((0.009, 0.003, 0.006))}).facts()
    assert [line["rows"] for line in lines] == [1, 4]
    assert lines[1]["ms"] == pytest.approx(3.0)
    assert lines[1]["median_ms"] == pytest.approx(6.0)
    assert lines[1]["ratio"] == pytest.approx(1.5)
    assert lines[1]["median_ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counts": [17]}, "a number of rows must be an integer from 1 to 16"),
        ({"counts": [0]}, "a number of rows must be an integer from 1 to 16"),
        ({"context": 249}, r"context must be an integer from 0 to 248, got 249\. The rows come after it"),
        ({"rounds": 0}, "rounds must be"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_rows(Recording(), TEXT, 256, **{"counts": [8], "context": 4, "rounds": 1, **options})
