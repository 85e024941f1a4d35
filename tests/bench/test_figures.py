"""Percentiles, confidence intervals and objectives, each against a plain reference."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paceline.bench.run.figures import (
    RESAMPLES,
    Objective,
    parse_objective,
    percentiles,
    ratio_interval,
)
from paceline.bench.run.turns import Answer
from paceline.errors import ConfigError


def plain_percentile(values: list[float], share: float) -> float:
    """By the definition: on a line through the sorted values."""
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def test_percentiles_are_those_of_the_definition() -> None:
    rng = random.Random(3)
    for count in (1, 2, 7, 100):
        values = [rng.expovariate(1) for _ in range(count)]
        expected = {f"p{share}": plain_percentile(values, share) for share in (50, 90, 99)}
        assert percentiles(values) == pytest.approx(expected)
    assert percentiles([]) is None


def test_the_interval_is_a_paired_bootstrap() -> None:
    rng = random.Random(4)
    off = [rng.uniform(1, 3) for _ in range(12)]
    own = [value / rng.uniform(1.2, 1.8) for value in off]
    drawn = np.random.default_rng(0).integers(12, size=(RESAMPLES, 12)).tolist()
    ratios = [sum(off[i] for i in again) / sum(own[i] for i in again) for again in drawn]
    expected = (plain_percentile(ratios, 2.5), plain_percentile(ratios, 97.5))
    found = ratio_interval(off, own)
    assert found == pytest.approx(expected)
    assert found is not None
    assert found[0] < sum(off) / sum(own) < found[1]


def test_equal_ratios_have_no_spread_and_one_pair_no_interval() -> None:
    assert ratio_interval([2.0, 4.0, 60.0], [1.0, 2.0, 30.0]) == pytest.approx((2.0, 2.0))
    assert ratio_interval([2.0], [1.0]) is None


def test_a_request_is_good_if_it_meets_every_limit() -> None:
    answer = Answer([1, 2, 3], 3, (0.4, 0.45, 0.5), 0.5)  # 50 ms a token
    assert parse_objective("ttft=500,tpot=50") == Objective(ttft=500, tpot=50)
    assert Objective(ttft=400, tpot=51, e2e=500).met_by(answer)
    assert not Objective(ttft=399).met_by(answer)
    assert not Objective(tpot=49).met_by(answer)
    assert not Objective(e2e=499).met_by(answer)
    assert not Objective().met_by(Answer([], 0, (), 0.0, error="status 500"))
    assert Objective(tpot=1).met_by(Answer([1], 1, (0.4,), 0.4)), "one token has no time per token"
    for text in ("ttft", "ttft=fast", "tpot=-1", "itl=5", ""):
        with pytest.raises(ConfigError, match="--slo must be milliseconds such as"):
            parse_objective(text)
