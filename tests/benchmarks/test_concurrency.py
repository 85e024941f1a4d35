"""Concurrent requests: their throughput, and that none affects another."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.concurrency import Concurrency, measure_concurrency
from benchmarks.engine.views import concurrency_result
from paceline.bench.report.result import Finding
from paceline.bench.timing import Timing
from paceline.core.forward import ForwardBatch
from paceline.errors import ConfigError
from tests.toy import ToyBackend, toy_engine

FACTS = {"model": "toy", "rounds": 2}
TEXT = [2 + number * number % 64 for number in range(300)]


def test_requests_have_different_prompts_and_get_what_they_get_alone() -> None:
    engine = toy_engine(enable_prefix_caching=False)
    seen: list[tuple[int, ...]] = []
    add = engine.add_request

    def watch(prompt: Any, params: Any) -> Any:
        seen.append(tuple(prompt))
        assert params.greedy
        return add(prompt, params)

    engine.add_request = watch  # type: ignore[method-assign]
    result = measure_concurrency(engine, TEXT, counts=[4], tokens=5, rounds=2)
    assert result.identical
    assert list(result.timings) == [1, 4]
    assert len(set(seen)) == 4
    assert len(seen) == 4 + 3 * (1 + 4)  # alone, then one round of warm-up and two that count
    (finding,) = concurrency_result(result, FACTS).findings
    assert finding == Finding("Every request got, token for token, what it gets alone.")


class Crosstalk(ToyBackend):
    """A toy model with the fault to find: in a batch, the second request depends on the first."""

    def forward(self, batch: ForwardBatch) -> Any:
        output = super().forward(batch)
        if batch.num_requests > 1:
            output.logits[1] = output.logits[0]
        return output


def test_an_output_that_depends_on_the_others_is_found() -> None:
    engine = toy_engine(Crosstalk(max_rows=64), enable_prefix_caching=False)
    result = measure_concurrency(engine, TEXT, counts=[1, 3], tokens=6, rounds=1)
    assert not result.identical
    assert result.differing == {1: [], 3: [1]}
    assert [line["identical_to_alone"] for line in result.facts()] == [True, False]
    (finding,) = concurrency_result(result, FACTS).findings
    assert not finding.good


def test_speed_counts_the_tokens_of_all_requests() -> None:
    timings = {1: Timing((2.0, 1.0, 3.0)), 4: Timing((2.0, 2.0, 8.0))}
    one, four = Concurrency(10, timings, {1: [], 4: []}).facts()
    assert (one["tokens_per_second"], one["median_tokens_per_second"]) == (10.0, 5.0)
    assert (four["tokens_per_second"], four["median_tokens_per_second"]) == (20.0, 20.0)
    assert (four["ratio"], four["median_ratio"]) == (2.0, 4.0)


def test_what_cannot_run_is_refused() -> None:
    engine = toy_engine(max_num_seqs=4)
    with pytest.raises(ConfigError, match="a concurrency must be an integer from 1 to 4"):
        measure_concurrency(engine, TEXT, counts=[5])
    with pytest.raises(ConfigError, match="no 4 different prompts"):
        measure_concurrency(engine, TEXT[:17], counts=[4])
