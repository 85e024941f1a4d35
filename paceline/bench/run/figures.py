"""Statistics of times: percentiles, confidence of a ratio, and the service-level objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.bench.run.turns import Answer
from paceline.errors import ConfigError

PERCENTILES = (50, 90, 99)
RESAMPLES = 2000
CONFIDENCE = 0.95


def percentiles(values: Sequence[float], shares: Sequence[int] = PERCENTILES) -> dict[str, float] | None:
    """p50, p90 and p99 of the values, or other percentiles; None if there are no values."""
    if not values:
        return None
    return {f"p{share}": float(np.percentile(values, share)) for share in shares}


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the ratio of sums, over the choice of prompts.

    Bootstrap: pairs are resampled with replacement. None for fewer than two pairs.
    """
    if len(over) < 2:
        return None
    pairs = np.array([over, under])  # [2, prompts]
    drawn = np.random.default_rng(0).integers(len(over), size=(RESAMPLES, len(over)))
    sums = pairs[:, drawn].sum(axis=2)  # [2, resamples]
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(sums[0] / sums[1], [edge, 1 - edge])
    return float(low), float(high)


@dataclass(frozen=True)
class Objective:
    """A service-level objective per request, in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met_by(self, answer: Answer) -> bool:
        """Whether an answer arrived, and in time."""
        if answer.error is not None:
            return False
        limits_and_times = (
            (self.ttft, answer.ttft),
            (self.tpot, answer.tpot),
            (self.e2e, answer.e2e_seconds),
        )
        return all(limit is None or took is None or 1e3 * took <= limit for limit, took in limits_and_times)


def parse_objective(text: str) -> Objective:
    """The objective of a text such as ttft=500,tpot=50."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = 0.0
        if name not in ("ttft", "tpot", "e2e") or not bounds[name] > 0:
            raise ConfigError(
                f"--slo must be milliseconds such as ttft=500,tpot=50 of ttft, tpot and e2e; got {text!r}."
            )
    return Objective(**bounds)
