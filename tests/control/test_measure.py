"""The measurement at start-up: what it asks of a backend, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.control.config import CONFIG
from paceline.control.cost.measure import measure_steps, step_costs
from paceline.control.memory import Memory
from paceline.core.forward import ForwardBatch, ForwardOutput
from tests.toy import ToyBackend


class TimedToy(ToyBackend):
    """A toy whose passes take as long as a formula says, on a clock of its own."""

    def __init__(self, seconds: Callable[[int, int], float], **sizes: int) -> None:
        super().__init__(**sizes)
        self._seconds = seconds
        self.now = 0.0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now += self._seconds(batch.num_rows, int(batch.context_lengths[0]))
        return super().forward(batch)

    def clock(self) -> float:
        return self.now


def cost(rows: int, context: int) -> float:
    return 0.004 + 0.001 * (rows > 8) + 1e-6 * rows * context


def test_rows_and_keys_cost_what_was_timed():
    toy = TimedToy(cost)
    costs = measure_steps(toy, 256, toy.clock)
    for rows in (1, 8, 9, 16, 64):
        assert float(costs.seconds(rows, 0)) == pytest.approx(cost(rows, 0))
    assert costs.per_key == pytest.approx(1e-6)


class CompilingToy(TimedToy):
    """A toy whose first pass of a size takes seconds, unless it was compiled ahead."""

    def __init__(self) -> None:
        super().__init__(lambda rows, context: cost(rows, context) + self._first_time(rows, context))
        self._ready: set[tuple[int, int]] = set()
        self._compiles = False

    def _first_time(self, rows: int, context: int) -> float:
        is_first = (rows, context) not in self._ready
        self._ready.add((rows, context))
        return 5.0 if is_first and not self._compiles else 0.0

    def compile_ahead(self, warm_up: Callable[[], object]) -> None:
        self._compiles = True
        warm_up()
        self._compiles = False


def test_no_compilation_is_timed():
    toy = CompilingToy()
    costs = measure_steps(toy, 256, toy.clock)
    for rows in (1, 8, 9, 16, 64, 128):
        assert float(costs.seconds(rows, 0)) == pytest.approx(cost(rows, 0))


def test_a_slow_model_is_measured_at_fewer_points():
    toy = TimedToy(lambda rows, context: 0.3)
    costs = measure_steps(toy, 256, toy.clock)
    assert toy.now < 2 * CONFIG.measure.max_seconds + 3 * 0.3
    assert len(costs.facts()["rows"]) >= 2


@pytest.mark.parametrize(("max_rows", "longest"), [(1, 2), (2, 8), (3, 1000), (64, 20)])
def test_small_engines_are_measured_within_their_limits(max_rows: int, longest: int):
    toy = TimedToy(cost, max_rows=max_rows)
    costs = measure_steps(toy, longest, toy.clock)
    assert float(costs.seconds(1, 0)) == pytest.approx(0.004)


def test_a_model_is_measured_once_and_a_damaged_file_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    first = step_costs(toy := ToyBackend(), 64, Memory.of("model a")).facts()
    passes = len(toy.batches)
    assert step_costs(toy, 64, Memory.of("model a")).facts() == first
    assert len(toy.batches) == passes
    step_costs(toy, 64, Memory.of("model b"))
    assert len(toy.batches) > passes
    for path in (tmp_path / "costs").iterdir():
        path.write_text('{"steps": {"rows": [2, 1], "seconds": [1], "per_key": 0}}')
    passes = len(toy.batches)
    step_costs(toy, 64, Memory.of("model a"))
    assert len(toy.batches) > passes
